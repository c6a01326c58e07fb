"""What the page `/ui` works out by itself: asked of its own modules, in the browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.http.conftest import Proxy
from tests.integration.viewer.conftest import looking

pytestmark = pytest.mark.viewer


async def test_of_several_reasons_the_ledgers_first_one_is_shown(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions", "table.rows tbody tr")
        found = await looker.page.evaluate(
            """async () => {
              const { sessionReason } = await import("./static/token_facts.js");
              const scored = { status: "completed", group_id: "g", marks: [], reward: 1 };
              const of = (fields, purpose = "train") => sessionReason({ ...scored, ...fields }, purpose);
              return [of({}), of({ reward: null }), of({ marks: ["synthetic"], reward: null }), of({ status: "aborted" }),
                of({ status: "deleted" }), of({ group_id: null }, null), of({ status: "aborted" }, "eval"), of({}, "eval"),
                of({ status: "open" }, "eval"), of({}, null)];
            }"""
        )
        assert found == [
            None, "unscored", "synthetic", "aborted", "deleted", "ungrouped", "evaluation", "evaluation", "open", "unknown"
        ]  # fmt: skip


async def test_what_nobody_sees_has_a_name_and_emoji_stay_whole(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions", "table.rows tbody tr")
        texts = {
            "a\U000e0041b": "aU+E0041b", "a\U000e0100": "aU+E0100", "a\ufe01": "aU+FE01", "a\ufe0f": "aU+FE0F",
            "a\u200db": "aU+200Db", "\u034f\u00ad\u3164\u2028\ufffb": "U+034FU+00ADU+3164U+2028U+FFFB",
            "\x7f\x9b": "U+007FU+009B",
        }  # fmt: skip
        whole = [
            "\u2764\ufe0f", "1\ufe0f\u20e3", "\U0001f469\U0001f3fd\u200d\U0001f680", "\U0001f3f3\ufe0f\u200d\U0001f308",
            "a\tb\r\nc", "\u06dd", "e\u0301",
        ]  # fmt: skip
        shown = await looker.page.evaluate(
            "async (texts) => { const { plain } = await import('./static/format.js'); return texts.map(plain); }",
            [*texts, *whole],
        )
        assert shown == [*texts.values(), *whole]

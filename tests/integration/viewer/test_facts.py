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

"""What the page `/ui` works out by itself: asked of its own modules, in the browser."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from steno.contracts.records import Session
from steno.contracts.rest import GroupSpec
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.integration.viewer.conftest import looking
from tests.support.records.shown_sessions import made_turn, record

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


async def test_times_are_rounded_before_they_are_cut_into_hours_and_minutes(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions", "table.rows tbody tr")
        shown = await looker.page.evaluate(
            "async (times) => { const { seconds } = await import('./static/format.js'); return times.map(seconds); }",
            [12.34, 59.94, 59.96, 119.6, 3599.4, 3599.7, 7199, 7140],
        )
        assert shown == [
            "12.3 s",
            "59.9 s",
            "1 min 0 s",
            "2 min 0 s",
            "59 min 59 s",
            "1 h 0 min",
            "2 h 0 min",
            "1 h 59 min",
        ]


async def test_an_axis_ends_at_its_last_point_known_or_not(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions", "table.rows tbody tr")
        ticks = await looker.page.evaluate(
            """async () => {
              const { lineChart } = await import("./static/charts.js");
              const points = [1, 20, 25].map((x) => ({ x, y: x === 25 ? null : x, label: `step ${x}` }));
              return [...lineChart("Some", points).querySelectorAll(".tick")].map((one) => one.textContent);
            }"""
        )
        assert ticks[-2:] == ["step 1", "step 25"]


async def test_what_is_worked_out_of_a_record_is_not_written_into_it(proxy: Proxy, browser: Any) -> None:
    """The tab Record shows it."""
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions", "table.rows tbody tr")
        found = await looker.page.evaluate(
            """async () => {
              const { TokenFacts } = await import("./static/token_facts.js");
              const annotation = { step: 1, differences: btoa("\\x00\\x3c\\x00\\x00") };
              const turn = { turn_id: "t", versions: [], annotation };
              const facts = new TokenFacts([turn], { status: "open", group_id: null, marks: [] }, null, "difference");
              return [facts.difference(turn, 0), facts.difference(turn, 1), Object.keys(annotation)];
            }"""
        )
        assert found == [1, 0, ["step", "differences"]]


async def test_tools_that_each_turn_repeats_are_kept_once(proxy: Proxy, browser: Any) -> None:
    """A coding agent's are 72 KB, and a trial has hundreds of turns."""
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions", "table.rows tbody tr")
        kept = await looker.page.evaluate(
            """async () => {
              const { Recording } = await import("./static/record.js");
              const recording = new Recording();
              recording.take(["a", "a", "b", "b", "a"].map((name, index) => (
                { turn_id: `t${index}`, parent_id: index ? `t${index - 1}` : null, index, tools: [{ name }] })));
              const tools = recording.turns.map((turn) => turn.tools);
              return [tools.map(([tool]) => tool.name).join(""), new Set(tools).size];
            }"""
        )
        assert kept == ["aabba", 3]


async def test_arguments_of_a_call_are_shown_with_the_digits_that_were_sampled(proxy: Proxy, browser: Any) -> None:
    split = ['{"id": 12, "ratio": -0.5, "text": "1.0 and \\"2.0"}', '{"text": "\\\\", "ids": [1, 2]}']
    whole = ['{"id": 9007199254740993}', '{"ratio": 1.0}', '{"rate": 1e-5}', '{"deep": [{"at": -0}]}']
    whole += ['{"cmd": "rm", "cmd": "ls"}', '{"deep": [{"a": "\\"", "\\u0061": ","}]}']  # a name is given twice
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions", "table.rows tbody tr")
        shown = await looker.page.evaluate(
            """async (texts) => {
              const { Conversation } = await import("./static/conversation.js");
              const { Recording } = await import("./static/record.js");
              const { items: [turn] } = await (await fetch("/sessions/by-hand/turns?limit=1")).json();
              return texts.map((text) => {
                turn.reply.tool_calls = [{ id: "c", function: { name: "f", arguments: text } }];
                const { node } = new Conversation([turn], new Recording());
                const call = node.querySelector(".assistant .call");
                call.open = true;
                call.dispatchEvent(new Event("toggle"));
                return call.querySelector("dl") ? null : call.querySelector(".said.code").textContent;
              });
            }""",
            [*split, *whole],
        )
        assert shown == [None, None, *whole]


async def test_integers_that_no_float_holds_are_shown_as_they_are_on_record(browser: Any) -> None:
    """In the record, in a tool's schema, in a group's task, and where a value is shown by itself."""
    exact, rounded, store, now = 2**53 + 1, 2**53, MemoryStore(), time.time()
    tool = {"type": "function", "function": {"name": "at", "parameters": {"maximum": exact}}}
    asked = {"seed": exact, "least": -exact, "even": rounded, "text": f'"a": {exact},'}
    turn = made_turn(1, 0, None, now, asked=asked, tools=[tool])
    await record(store, Session(trial_id="exact", created_at=now, updated_at=now, metadata={"agent": exact}), [turn])
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await proxy.steno.create_group(GroupSpec(group_id="seeded", size=1, task={"seed": exact}))
        await looker.go("sessions/exact?tab=record", ".raw details")
        await page.click(".raw details summary")
        await page.click(".raw details button.rest")
        shown = json.loads(await page.text_content(".raw details .said.code"))
        assert (shown["asked"], shown["tools"]) == (asked, [tool])
        assert await page.text_content(".fact:has(dt:text-is('Agent')) dd") == str(exact)
        await page.click("role=tab[name=Conversation]")
        await page.click("summary:has-text('1 tool')")
        await page.click(".tools summary")
        assert json.loads(await page.text_content(".tools .said.code")) == tool
        await looker.go("groups/seeded", f".task summary >> text={exact}")
        await page.click(".task summary")
        assert json.loads(await page.text_content(".task .said.code")) == {"seed": exact}
        await looker.go("sessions", f"table.rows .chip:text-is('{exact}')")
        assert looker.troubles == []

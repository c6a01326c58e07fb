"""What an agent wrote is shown and does nothing: markup, scripts, bidi marks, ANSI's escapes, lines of a megabyte."""

from __future__ import annotations

import time
from typing import Any

import pytest

from steno.contracts.records import Session
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import running
from tests.integration.viewer.conftest import looking
from tests.support.records.shown_sessions import made_turn, record

pytestmark = pytest.mark.viewer

MARKUP = (
    "<script>window.pwned = 1; alert(1)</script><img src=x onerror='window.pwned = 1'>"
    "<a href='javascript:window.pwned = 1'>here</a><iframe srcdoc='<script>parent.pwned = 1</script>'></iframe>"
    "<svg onload='window.pwned = 1'>"
    "<style>* { display: none }</style>"
    "{{constructor.constructor('window.pwned = 1')()}} [link](http://evil.example) ![](http://evil.example/x.png)"
)
TURNED = "safe \u202egnp.exe\u202c \u2066hidden\u2069 \u200bzero\ufeff \U000e0041tag\U000e0101 \u034f\u3164"
ANSI = "\x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07link\x1b]8;;\x07 \x9b31m \x00 \x07"
HUGE = "a" * 1_000_000 + "THE-END"


async def test_nothing_that_an_agent_wrote_runs_or_is_fetched(browser: Any) -> None:
    store, began = MemoryStore(), time.time()
    everywhere = f"{MARKUP} {TURNED} {ANSI}"
    arguments = f'{{"{MARKUP[:30]}": "x"}} {everywhere}'
    call = {"id": "c", "type": "function", "function": {"name": MARKUP[:64], "arguments": arguments}}
    parts = [{"type": "text", "text": everywhere}, {"type": MARKUP}]
    first = made_turn(
        1, 0, None, began, task_step=everywhere[:256], served_model=everywhere, worker_id=MARKUP, finish_reason="tool_calls",
        error=everywhere, tools=[
            {"type": "function", "function": {"name": MARKUP, "description": everywhere, "parameters": {}}},
        ],
        messages=[{"role": "system", "content": everywhere}, {"role": "user", "content": parts}],
        call_ids={"c": "c"},
        reply={"role": "assistant", "reasoning_content": everywhere, "content": everywhere, "tool_calls": [call]},
    )  # fmt: skip
    second = made_turn(
        1,
        1,
        first,
        began,
        messages=[{"role": "tool", "tool_call_id": "c", "content": HUGE}, {"role": MARKUP, "content": everywhere}],
    )
    session = Session(
        trial_id="hostile",
        run_id=everywhere[:128],
        created_at=began,
        updated_at=began,
        metadata={"agent": everywhere},
        marks=[MARKUP],
    )
    await record(store, session, [first, second])
    await store.complete(
        "hostile", status="aborted", reward=0.0, end_reason=MARKUP[:100], metrics={MARKUP: 1.0}, now=began
    )
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions", "table.rows tbody tr")
        for tab in ("conversation", "tokens", "timeline", "record"):
            await looker.go(f"sessions/hostile?tab={tab}", f"#panel[aria-labelledby=tab-{tab}] > *:not(.loading)")
            await page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            await page.evaluate("new Promise((done) => setTimeout(done, 200))")
            assert (
                await page.evaluate(
                    "document.querySelectorAll('main script, main iframe, main object, main style, main img').length"
                )
                == 0
            )
            assert await page.evaluate("document.body.innerText.length") < 200_000, (
                "a long text is not in the page at once"
            )
        await looker.go("sessions/hostile", "section.turn")
        await looker.shot("hostile")
        shown = await page.evaluate("document.querySelector('main').textContent")
        assert "<script>window.pwned = 1" in shown, "it is shown as what it is"
        for char in "\u202e\u202c\u2066\u200b\ufeff\U000e0041\U000e0101\u034f\u3164\x1b\x9b\x00\x07":
            assert char not in shown, f"U+{ord(char):04X} is shown by its name"
        assert "U+202E" in shown and "U+001B" in shown and "U+E0041tagU+E0101 U+034FU+3164" in shown
        links = await page.evaluate("[...document.querySelectorAll('main a')].map((one) => one.href)")
        assert all(link.startswith(f"{proxy.url}/ui/#/") for link in links)
        result = page.locator("article.message.tool details").first
        more = result.locator("button.rest")
        await result.locator("summary").click()
        await more.wait_for()  # a browser tells of what was opened a moment after the click
        for _ in range(12):
            if not await more.count():
                break
            await more.click()
        assert "THE-END" in await result.text_content()
        assert await page.evaluate("window.pwned") is None
        assert looker.troubles == [] and all(asked.startswith(proxy.url) for asked in looker.asked)

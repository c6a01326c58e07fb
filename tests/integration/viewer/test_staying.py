"""The page `/ui` looks again and again: whoever reads it, or leaves it, does so undisturbed, and sees what is new."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import pytest

from steno.contracts.records import Session
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.integration.viewer.conftest import asker, looking
from tests.support.records.recordings import row
from tests.support.records.shown_sessions import long_session, made_turn, record, straight

pytestmark = pytest.mark.viewer

LEFT = """
const read = Response.prototype.text;
Response.prototype.text = function () {
  if (!this.url.includes("/turns")) return read.call(this);
  return new Promise((_, no) => addEventListener("hashchange", () => no(new DOMException("left", "AbortError"))));
};
"""
"""Bodies of turns never end, and are given up as a browser does it, when the page is left."""
FOCUSED = "document.activeElement.textContent"


async def looks(page: Any, path: str, times: int = 2) -> None:
    """Until it was looked at again so often, and that was shown."""
    for _ in range(times):
        async with page.expect_response(f"**/{path}"):
            pass
    await page.wait_for_timeout(300)


async def test_a_page_that_is_left_while_it_loads_does_not_disturb_the_next_one(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        await looker.page.add_init_script(LEFT)
        await looker.go("sessions/by-hand", "text=Reading the turns…")
        await looker.page.click("nav >> text=Runs")
        await looker.page.wait_for_selector("table.rows tbody tr")
        await looks(looker.page, "runs?*")
        assert await looker.page.locator("table.rows tbody tr").count() > 0
        assert await looker.page.locator("main [role=alert]").count() == 0 and looker.troubles == []


async def test_times_of_a_page_that_stays_grow(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await page.clock.install()
        await looker.go("runs", "table.rows time")
        await page.focus("table.rows a")
        run = await page.evaluate(FOCUSED)
        assert re.fullmatch(r"now|\d+ (s|min) ago", await page.text_content("table.rows time"))
        await page.clock.fast_forward(2 * 3600 * 1000)
        await page.wait_for_selector("table.rows time:text-is('2 h ago')")
        assert await page.evaluate(FOCUSED) == run and looker.troubles == []


async def test_what_is_the_same_at_the_next_look_keeps_its_focus_and_its_selection(proxy: Proxy, browser: Any) -> None:
    workers, policy = [(await proxy.http.get(path)).json() for path in ("/workers", "/policy")]
    heard = itertools.count(1)

    async def another(route: Any) -> None:
        """Of a worker that a busy machine does not lose."""
        workers["items"][0]["idle_s"] = float(next(heard))
        await route.fulfill(json=workers)

    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await page.route("**/workers", another)
        await page.route("**/policy", lambda route: route.fulfill(json=policy))
        await looker.go("workers", "article.worker >> text=1.00 s ago")
        await page.focus("[aria-label=Policies]")
        await page.evaluate("getSelection().selectAllChildren(document.querySelector('article.worker h2'))")
        await page.wait_for_selector("article.worker >> text=4.00 s ago")
        assert await page.evaluate("document.activeElement.getAttribute('aria-label')") == "Policies"
        assert await page.evaluate("String(getSelection())") == workers["items"][0]["id"]
        assert looker.troubles == [], "a style that is text is refused by the page's policy"


async def test_an_answer_that_was_asked_for_again_is_followed(browser: Any) -> None:
    store, began = MemoryStore(), time.time() - 30
    turns = straight(7, 2, began)
    turns[-1].partial, turns[-1].finish_reason = True, "cancelled"
    session = Session(trial_id="again", created_at=began, updated_at=began)
    await record(store, session, turns)
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions/again", f"#turn-{turns[1].turn_id}")
        again = made_turn(8, 1, turns[0], began, retry_of=turns[1].turn_id)
        await store.commit("again", again, row(again, parent=0), now=began + 9)
        await store.supersede("again", turns[1].turn_id, again.turn_id)
        await page.wait_for_selector(f"#turn-{again.turn_id} >> text=retry of #1")
        assert await page.locator("section.turn").count() == 2, "in the place of what was broken"
        await page.click(f"[data-turn='{turns[1].turn_id}']")
        await page.wait_for_selector(f"#turn-{turns[1].turn_id} >> text=superseded by #2")
        after = made_turn(8, 2, again, began, partial=True, finish_reason="cancelled")
        await store.commit("again", after, row(after, parent=2), now=began + 12)
        await page.wait_for_selector(f"[data-turn='{after.turn_id}']")
        assert await page.locator(f"#turn-{turns[1].turn_id}").count() == 1, "whoever looks at it stays there"
        await page.click(f"[data-turn='{after.turn_id}']")
        await page.wait_for_selector(f"#turn-{after.turn_id}")
        await page.route("**/sessions/again", lambda route: route.abort())  # as a tab in the background does not look
        twice = [made_turn(9, 2, again, began, retry_of=after.turn_id, partial=True, finish_reason="cancelled")]
        twice.append(made_turn(10, 2, again, began, retry_of=twice[0].turn_id))
        for n, (old, new) in enumerate(zip([after, *twice], twice, strict=False)):
            await store.commit("again", new, row(new, parent=2), now=began + 13 + n)
            await store.supersede("again", old.turn_id, new.turn_id)
        await page.unroute("**/sessions/again")
        await page.wait_for_selector(f"#turn-{twice[1].turn_id} >> text=retry of #4")
        assert [trouble for trouble in looker.troubles if trouble.startswith("exception")] == []


async def test_a_longer_branch_is_followed_until_somebody_chooses_one(browser: Any) -> None:
    store, began = MemoryStore(), time.time() - 30
    turns = straight(7, 4, began)
    beside = made_turn(8, 1, turns[0], began)
    await record(store, Session(trial_id="parts", created_at=began, updated_at=began), [turns[0], turns[1], beside])
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions/parts", f"#turn-{beside.turn_id}")
        for n, turn in enumerate(turns[2:]):
            await store.commit("parts", turn, row(turn, parent=(1, 3)[n]), now=began + 20 + n)
        for turn in turns:
            await page.wait_for_selector(f"#turn-{turn.turn_id}")
        assert await page.locator("section.turn").count() == 4
        await page.click(f"[data-turn='{beside.turn_id}']")
        await page.wait_for_selector(f"#turn-{beside.turn_id}")
        more = made_turn(7, 4, turns[3], began)
        await store.commit("parts", more, row(more, parent=4), now=began + 25)
        await page.wait_for_selector(f"[data-turn='{more.turn_id}']")
        assert await page.locator("section.turn").count() == 2, "who has chosen a branch stays there"
        assert looker.troubles == []


async def test_folds_and_rows_stay_while_a_session_grows(browser: Any) -> None:
    store, began = MemoryStore(), time.time() - 30
    *turns, new, newer = straight(7, 5, began)
    await record(store, Session(trial_id="grows", created_at=began, updated_at=began), turns)
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions/grows?tab=record", ".raw details")
        await page.click(".raw details >> nth=1")
        await page.wait_for_selector(f".raw details[open] >> text={turns[1].turn_id}")
        await store.commit("grows", new, row(new, parent=2), now=began + 20)
        await page.wait_for_selector(".raw details >> nth=3")
        assert await page.locator(".raw details[open]").count() == 1
        await page.click("role=tab[name=Timeline]")
        await page.focus(".gantt-row >> nth=2")
        await store.commit("grows", newer, row(newer, parent=3), now=began + 25)
        await page.wait_for_selector(".gantt-row >> nth=4")
        assert await page.get_attribute(".gantt-row:focus", "data-turn") == turns[2].turn_id
        await page.keyboard.press("Enter")
        await page.wait_for_selector(f"#turn-{turns[2].turn_id}")
        assert looker.troubles == []


async def test_whoever_is_in_the_head_on_a_tab_or_at_a_turn_stays_there_while_a_session_grows(
    proxy: Proxy, browser: Any
) -> None:
    ask = asker(proxy, "alive")
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await ask()
        await looker.go("sessions/alive", "section.turn")
        await page.click("role=tab[name=Timeline]")
        await page.wait_for_selector(".gantt-row")
        assert await page.evaluate(FOCUSED) == "Timeline"
        await page.click("role=tab[name=Conversation]")
        await page.focus(".crumbs a")
        await ask()
        await page.wait_for_selector("section.turn >> nth=1")
        assert await page.evaluate(FOCUSED) == "Sessions"
        assert (await proxy.chat("alive", "hello", temperature="hot")).status_code == 400
        await page.focus(".notes-fold summary")
        words = await page.evaluate(FOCUSED)
        assert (await proxy.chat("alive", "hello", top_p="all")).status_code == 400
        await page.wait_for_selector(f".notes-fold summary:not(:has-text('{words}'))")
        assert await page.evaluate(FOCUSED) == await page.text_content(".notes-fold summary")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".notes-fold[open] li >> text=top_p")
        await page.click(".turn-line >> nth=0")
        await ask()
        await page.wait_for_selector(".turn-line >> nth=2")
        assert await page.text_content(".turn-line[aria-current] .number") == "0" and looker.troubles == []


async def test_what_becomes_of_a_turn_is_shown_and_its_folds_stay_open(browser: Any) -> None:
    """Its answer ends; its client, that was away, gets it from the record when it asks again."""
    store, began = MemoryStore(), time.time() - 30
    begun = made_turn(7, 0, None, began, partial=True, finish_reason="open")
    whole, length = made_turn(7, 0, None, began), begun.completion_tokens
    whole.turn_id = begun.turn_id
    after = made_turn(7, 1, whole, began)
    await record(store, Session(trial_id="told", created_at=began, updated_at=began), [begun])
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        turn = f"#turn-{begun.turn_id}"
        await looker.go("sessions/told", turn)
        await page.click(f"{turn} .fold.thinking summary")
        await page.wait_for_selector(f"{turn} .fold.thinking[open] .said")
        await store.commit("told", whole, row(whole, parent=-1), now=began + 20)
        await store.mark_delivered("told", whole.turn_id, 0)
        await page.wait_for_selector(f"{turn} footer >> text=0 of {length} delivered")
        await page.wait_for_selector(f"{turn} .fold.thinking[open] .said")
        assert await page.locator(f"{turn} .fold.thinking > summary:focus").count() == 1
        await store.mark_delivered("told", whole.turn_id, length)
        await store.commit("told", after, row(after, parent=0), now=began + 25)
        await page.wait_for_selector(f"{turn} footer:not(:has-text('delivered'))")
        assert await page.locator(f"{turn} .fold.thinking[open]").count() == 1 and looker.troubles == []


async def test_the_ends_of_a_long_answer_are_reached_by_keyboard(browser: Any) -> None:
    """Only what is near the window is in the page."""
    store = MemoryStore()
    await long_session(store, "long", turns=1, tokens=20_000)
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions/long?tab=tokens", ".done .tok")
        await page.focus(".strip")
        for key, place in (("End", "19999"), ("ArrowLeft", "19998"), ("End", "19999"), ("Home", "0")):
            await page.keyboard.press(key)
            assert await page.get_attribute(".tok.here", "data-at") == place, key
        assert looker.troubles == []

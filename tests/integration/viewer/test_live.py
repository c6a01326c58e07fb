"""The page `/ui` while things change: after a session's end, and where the proxy does not answer."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from steno.contracts.records import Session
from steno.contracts.rest import Completion, GroupSpec
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.integration.viewer.conftest import asker, looking
from tests.support.records.recordings import row
from tests.support.records.shown_sessions import made_turn, record, straight
from tests.support.workers.parrot import ParrotEngine, Say

pytestmark = pytest.mark.viewer


async def test_a_reward_that_comes_after_the_end_is_shown_in_the_head_and_by_the_colours(
    proxy: Proxy, browser: Any
) -> None:
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await proxy.steno.create_group(GroupSpec(group_id="alive", size=1))
        await proxy.chat("alive.0", "hello")
        await looker.go("sessions/alive.0?tab=tokens", ".done .tok")
        await page.select_option("text=Colour", "reason")
        await page.wait_for_selector(".legend >> text=open")
        await proxy.http.post("/sessions/alive.0/complete", json={})
        await page.wait_for_selector(".pill.completed")
        await page.wait_for_selector(".legend >> text=unscored")
        await proxy.http.post("/sessions/alive.0/complete", json={"reward": 0.5})
        await page.wait_for_selector(".fact:has(dt:text('Reward')) b:text-is('0.5')")
        await page.wait_for_selector(".legend >> text=for training")
        assert looker.troubles == []


async def test_a_reward_that_came_while_the_page_was_in_the_background_is_shown(proxy: Proxy, browser: Any) -> None:
    """There it is not looked for. It came in time, and the page is seen again long after."""
    await proxy.chat("alive", "hello")
    await proxy.steno.complete("alive", Completion())
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await page.clock.install()
        await page.add_init_script(
            "window.away = true; Object.defineProperty(document, 'hidden', { get: () => window.away });"
        )
        await looker.go("sessions/alive", "section.turn")
        await page.clock.fast_forward(700_000)
        await proxy.steno.complete("alive", Completion(reward=0.5))
        await page.evaluate("window.away = false")
        await page.wait_for_selector(".fact:has(dt:text('Reward')) b:text-is('0.5')")
        assert looker.troubles == []


async def test_a_trial_that_is_scored_later_awaits_its_reward(proxy: Proxy, browser: Any) -> None:
    await proxy.steno.create_group(GroupSpec(group_id="later", size=2))
    for trial in ("later.0", "later.1"):
        await proxy.chat(trial, "hello")
        await proxy.steno.complete(trial, Completion(final=False))
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("groups/later", "th .pill.completed")
        assert await page.locator(".column-reward b").all_text_contents() == ["awaited"] * 2
        await looker.go("sessions/later.0?tab=tokens", ".done .tok")
        await page.wait_for_selector(".fact:has(dt:text('Reward')) b:text-is('awaited')")
        await page.select_option("text=Colour", "reason")
        await page.wait_for_selector(".legend >> text=for training")
        await proxy.steno.complete("later.0", Completion(reward=0.5))
        await page.wait_for_selector(".fact:has(dt:text('Reward')) b:text-is('0.5')")
        await looker.go("sessions/later.1", ".fact:has(dt:text('Reward')) b:text-is('awaited')")
        await proxy.steno.complete("later.1", Completion())
        await page.wait_for_selector(".fact:has(dt:text('Reward')) b:text-is('\N{EN DASH}')")
        assert looker.troubles == []


async def test_what_no_lease_brings_to_a_trainer_is_not_said_to_be_for_training(proxy: Proxy, browser: Any) -> None:
    await proxy.steno.create_group(GroupSpec(group_id="held-out", size=1, purpose="eval"))
    for trial in ("alone", "held-out.0"):
        await proxy.chat(trial, "hello")
        await proxy.steno.complete(trial, Completion(reward=1.0))
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        for trial, reason in (("alone", "ungrouped"), ("held-out.0", "evaluation")):
            await looker.go(f"sessions/{trial}?tab=tokens", ".done .tok")
            await page.select_option("text=Colour", "reason")
            await page.wait_for_selector(f".legend >> text={reason}")
            await page.locator(".done .tok").first.hover()
            assert f"ledger {reason}" in await page.text_content(".token-detail")
        assert await looker.faults() == [] and looker.troubles == []


async def test_a_turn_of_thinking_alone_is_not_said_to_show_nothing(browser: Any) -> None:
    said = Say(text="", reasoning="I think, so I am")
    async with running(ParrotEngine(lambda request: said)) as proxy, looking(browser, proxy.url) as looker:
        await proxy.chat("thinks", "hello")
        await looker.go("sessions/thinks", "section.turn .thinking >> text=I think, so I am")
        assert await looker.page.locator("text=Nothing that is shown.").count() == 0


async def test_a_scripted_session_has_no_token_that_may_be_trained(browser: Any) -> None:
    store, now = MemoryStore(), time.time()
    session = Session(trial_id="scripted", created_at=now, updated_at=now, marks=["synthetic"])
    await record(store, session, straight(1, 1, now))
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        await looker.go("sessions/scripted?tab=tokens", ".done .tok")
        await looker.page.select_option("text=Colour", "mask")
        await looker.page.wait_for_selector(".done .tok.m0")
        assert await looker.page.locator(".done .tok.m1").count() == 0


async def test_whoever_is_on_a_token_or_in_a_choice_stays_there_while_a_session_grows(
    proxy: Proxy, browser: Any
) -> None:
    ask = asker(proxy, "alive")
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        on = "document.activeElement"
        focused = f"{on}.closest('.strips, .token-controls') && ({on}.dataset.turn ?? {on}.name)"
        await ask()
        await looker.go("sessions/alive?tab=tokens", ".done .tok")
        await page.focus(".strip >> nth=0")
        await page.keyboard.press("End")
        turn, told = await page.evaluate(focused), await page.text_content(".token-detail")
        assert "sampled" in told and "ledger open" in told
        await ask()
        await page.wait_for_selector(".strip >> nth=1")
        assert (await page.evaluate(focused), await page.text_content(".token-detail")) == (turn, told)
        await page.focus("select[name=mode]")
        await ask()
        await page.wait_for_selector(".strip >> nth=2")
        assert (await page.evaluate(focused), await page.text_content(".token-detail")) == ("mode", told)
        await page.focus(".strip >> nth=0")
        await proxy.steno.complete("alive", Completion(reward=1.0))
        await page.wait_for_selector(".token-detail >> text=ungrouped")
        assert await page.evaluate(focused) == turn
        assert await page.text_content(".token-detail") == told.replace("ledger open", "ledger ungrouped")
        assert await page.locator(".tok.here").count() == 1 and looker.troubles == []


async def test_a_session_that_is_deleted_while_one_looks_is_said_to_be(browser: Any) -> None:
    """In the middle of an answer, too: nothing of it stays as if it went on, and nothing is asked for any more."""
    gates = {5: asyncio.Event()}
    said = [Say(text="hello"), Say(text="hello again", gates=gates)]
    async with running(ParrotEngine(lambda request: said.pop(0))) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await proxy.chat("alive", "hello")
        await looker.go("sessions/alive", "section.turn")
        asking = asyncio.create_task(proxy.chat("alive", "go on"))
        await page.wait_for_selector("section[data-live] >> text=5 tokens so far")
        assert (await proxy.http.delete("/sessions/alive")).status_code == 204
        await page.wait_for_selector(".pill.deleted")
        await page.wait_for_selector("text=This session has been deleted.")
        await page.wait_for_selector("section[data-live]", state="detached")
        assert await page.locator("section.turn").count() == 1 and await page.text_content("#away") == ""
        # By the page's own clock: the looks that were due have been asked for by then.
        await page.evaluate("new Promise((done) => setTimeout(done, 3000))")
        asked = len(looker.asked)
        await page.wait_for_timeout(2500)
        assert looker.asked[asked:] == [] and await looker.faults() == []
        gates[5].set()
        await asking


async def test_a_turn_whose_proxy_died_is_not_live_and_is_not_read_again_and_again(browser: Any) -> None:
    store, began = MemoryStore(), time.time() - 30
    first, last = straight(7, 2, began)
    cut = made_turn(8, 1, first, began, partial=True, finish_reason="open")
    lone = made_turn(9, 0, None, began, partial=True, finish_reason="open")
    last.retry_of = cut.turn_id
    await record(store, Session(trial_id="cut", created_at=began, updated_at=began), [first, cut, last, lone])
    await store.supersede("cut", cut.turn_id, last.turn_id)
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions/cut", f"[data-turn='{lone.turn_id}']")
        await page.click(f"[data-turn='{lone.turn_id}']")
        await page.wait_for_selector("section.turn >> text=partial")
        for _ in range(2):
            async with page.expect_response("**/ui/sessions/cut/live"):
                pass
        assert await page.locator(".live").count() == 0
        await proxy.steno.complete("cut", Completion(final=False))
        await page.wait_for_selector(".pill.completed")
        asked = len(looker.asked)
        for _ in range(2):
            async with page.expect_response("**/sessions/cut"):
                pass
        assert [url for url in looker.asked[asked:] if "/turns" in url] == [] and looker.troubles == []


async def test_an_open_turn_is_live_while_its_answer_is_under_way(browser: Any) -> None:
    """Text and a call are on record before the second call is there."""
    gates = {3: asyncio.Event()}
    said = Say("ab", calls=[("own-1", "f", "{}"), ("own-2", "g", "{}")], gates=gates)
    body = {"max_tokens": 100, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with running(ParrotEngine(lambda request: said)) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await proxy.http.post("/sessions/alive", json={})
        asking = asyncio.create_task(proxy.http.post("/alive/v1/messages", json=body))
        await proxy.turns("alive", at_least=1)
        await looker.go("sessions/alive", ".turn-line .live")
        recorded = page.locator("section.turn:not([data-live])")
        assert await recorded.locator(".live").count() == 1 and await recorded.locator("text=partial").count() == 0
        gates[3].set()
        assert (await asking).status_code == 200
        await page.wait_for_selector("section.turn:not([data-live]) .call:has-text('g')")
        await page.wait_for_selector("section[data-live]", state="detached")
        assert await page.locator(".live").count() == 0 and looker.troubles == []


async def test_of_turns_before_a_new_one_only_the_open_ones_are_read_again(browser: Any) -> None:
    """Its proxy died, and its client went on beside it; or its answer is long, and others come meanwhile."""
    store, began = MemoryStore(), time.time() - 2000
    turns = straight(7, 252, began)
    cut = made_turn(8, 1, turns[0], began, partial=True, finish_reason="open")
    *known, new = [turns[0], cut, *turns[1:]]
    await record(store, Session(trial_id="cut", created_at=began, updated_at=began), known)
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions/cut", f"[data-turn='{known[-1].turn_id}']")
        asked = len(looker.asked)
        await store.commit("cut", new, row(new, parent=len(known) - 1), now=time.time())
        await page.wait_for_selector(f"[data-turn='{new.turn_id}']")
        pages = [url.partition("/turns?")[2] for url in looker.asked[asked:] if "/turns" in url]
        assert sorted(pages) == ["start=1&limit=1", "start=252&limit=100"]
        whole = made_turn(8, 1, turns[0], began)
        whole.turn_id = cut.turn_id
        await store.commit("cut", whole, row(whole, parent=0), now=time.time())
        await page.click(f"[data-turn='{cut.turn_id}']")
        await page.wait_for_selector(f"#turn-{cut.turn_id} footer >> text=tool_calls")
        assert looker.troubles == []


async def test_of_very_many_answers_that_end_at_once_all_are_shown_whole(browser: Any) -> None:
    """Though of open turns that stay as they are only some are read again."""
    store, began = MemoryStore(), time.time() - 60
    turns = [made_turn(seed, 0, None, began, partial=True, finish_reason="open") for seed in range(12)]
    await record(store, Session(trial_id="many", created_at=began, updated_at=began), turns)
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        await looker.go("sessions/many", ".turn-line.bad >> nth=11")
        for seed, turn in enumerate(turns):
            whole = made_turn(seed, 0, None, began)
            whole.turn_id = turn.turn_id
            await store.commit("many", whole, row(whole, parent=-1), now=time.time())
        await looker.page.wait_for_selector(".turn-line.bad", state="detached")
        assert await looker.page.locator(".turn-line").count() == 12 and looker.troubles == []


async def test_of_many_answers_under_way_the_oldest_is_live_and_its_end_is_shown(browser: Any) -> None:
    """The texts of the newest are sent, and the ids of all."""
    store, began = MemoryStore(), time.time() - 60
    turns = [made_turn(seed, 0, None, began, partial=True, finish_reason="open") for seed in range(12)]
    await record(store, Session(trial_id="many", created_at=began, updated_at=began), turns)
    under_way = [turn.turn_id for turn in turns]
    said = {"queued": began, "tokens": 1, "reasoning": "", "content": "so far", "calls": [], "cut": False}

    def live() -> dict[str, Any]:
        return {"items": [{"turn_id": name, **said} for name in under_way[-8:]], "older": under_way[:-8]}

    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await page.route("**/ui/sessions/many/live", lambda route: route.fulfill(json=live()))
        await looker.go("sessions/many", ".turn-line .live >> nth=11")
        assert await page.locator("section[data-live]").count() == 8
        for _ in range(2):  # behind the second one, eight that go on are looked at first
            turn = turns[len(turns) - len(under_way)]
            whole = made_turn(turns.index(turn), 0, None, began)
            whole.turn_id = under_way.pop(0)
            await store.commit("many", whole, row(whole, parent=-1), now=time.time())
            await page.wait_for_selector(f".turn-line[data-turn='{whole.turn_id}'] .weight:not(:has(.live))")
            assert await page.locator(f".turn-line.bad[data-turn='{whole.turn_id}']").count() == 0
        assert await page.locator(".turn-line .live").count() == 10 and looker.troubles == []


async def test_a_request_that_is_refused_is_told_of_at_once_and_an_open_fold_stays_open(
    proxy: Proxy, browser: Any
) -> None:
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await proxy.chat("alive", "hello")
        await looker.go("sessions/alive", "section.turn")
        assert (await proxy.chat("alive", "hello", temperature="hot")).status_code == 400
        await page.click(".notes-fold summary")
        await page.wait_for_selector(".notes-fold[open] li >> text=temperature")
        assert (await proxy.chat("alive", "hello", top_p="all")).status_code == 400
        await page.wait_for_selector(".notes-fold[open] li >> text=top_p")
        assert looker.troubles == []


async def test_a_session_that_ended_long_ago_is_asked_for_once(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions/parser-00.0", "section.turn")
        asked = len(looker.asked)
        await looker.page.wait_for_timeout(2500)
        assert looker.asked[asked:] == [] and looker.troubles == []


@pytest.mark.parametrize(
    ("where", "shows", "asked"),
    [("sessions/by-hand", "section.turn", "**/sessions/by-hand"), ("workers", "article.worker", "**/workers")],
)
async def test_a_page_says_that_what_it_shows_is_old_while_the_proxy_does_not_answer(
    where: str, shows: str, asked: str, proxy: Proxy, browser: Any
) -> None:
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go(where, shows)
        assert await page.text_content("#away") == ""
        await page.route(asked, lambda route: route.abort())
        await page.wait_for_selector("#away >> text=not reachable")
        told = await page.text_content("#away[role=status]")
        assert re.fullmatch(r"The proxy is not reachable\. Shown as of \d\d:\d\d:\d\d\.", told)
        await looker.shot("away")
        assert await looker.faults() == [] and await page.locator(shows).count() > 0
        await page.unroute(asked)
        await page.route(asked, lambda route: route.fulfill(status=500, json={"error": {"message": "no \u202e store"}}))
        await page.wait_for_selector("#away >> text=The proxy answers: no U+202E store. Shown as of")
        await page.unroute(asked)
        await page.wait_for_selector("#away:empty", state="attached")
        await page.route(asked, lambda route: route.abort())
        await page.wait_for_selector("#away >> text=not reachable")
        await page.click("nav >> text=Runs")
        await page.wait_for_selector("table.rows")
        assert await page.text_content("#away") == "", "of a page that was left"


async def test_a_look_that_is_never_answered_is_told_of_too(proxy: Proxy, browser: Any) -> None:
    """As where a network is gone without a word."""
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await page.clock.install()
        await looker.go("workers", "article.worker")
        asked, silence = asyncio.Event(), asyncio.Event()

        async def silent(route: Any) -> None:
            asked.set()
            await silence.wait()
            await route.continue_()

        await page.route("**/workers", silent)
        await asked.wait()
        assert await page.text_content("#away") == ""
        await page.clock.fast_forward(15_000)
        await page.wait_for_selector("#away >> text=does not answer. Shown as of")
        silence.set()
        await page.wait_for_selector("#away:empty", state="attached")
        assert looker.troubles == []

"""The page `/ui` in a real browser: each view, by keyboard too, a session that grows, and nothing that axe calls serious."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steno.contracts.records import ForkOf, halves_to_bytes
from steno.contracts.rest import Completion, SessionSpec
from steno.contracts.runs.training_steps import PostedAnnotation, TrainingStep
from steno_cli.main import app
from steno_proxy.api.control import search
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.integration.viewer.conftest import looking
from tests.support.records.shown_sessions import long_session
from tests.support.workers.parrot import ParrotEngine, Say

pytestmark = pytest.mark.viewer

VIEWS = {
    "runs": ("runs", "table.rows tbody tr"),
    "run": ("runs/fix-the-parser", "figure.chart"),
    "groups": ("groups", "table.rows tbody tr"),
    "group": ("groups/parser-05", "tr.parting"),
    "sessions": ("sessions", "table.rows tbody tr"),
    "session": ("sessions/parser-05.0", "section.turn"),
    "tokens": ("sessions/parser-05.0?tab=tokens", ".done .tok"),
    "timeline": ("sessions/parser-05.0?tab=timeline", ".gantt-row"),
    "workers": ("workers", "article.worker"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_each_view_is_shown_without_a_serious_fault(proxy: Proxy, browser: Any, scheme: str) -> None:
    async with looking(browser, proxy.url, scheme) as looker:
        for name, (where, shows) in VIEWS.items():
            await looker.go(where, shows)
            await looker.shot(f"{name}-{scheme}")
            assert await looker.faults() == [], name
        assert looker.troubles == []
        assert all(asked.startswith(proxy.url) for asked in looker.asked)


async def test_a_session_is_read_from_its_list_to_a_token(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions", "table.rows tbody tr")
        await page.select_option("select[name=status]", "aborted")
        await page.wait_for_selector("table.rows tbody:not(:has(tr:nth-child(7))) tr:nth-child(6)")
        await page.click("text=Clear")
        await page.click("text=parser-05.0")
        await page.wait_for_selector("section.turn")
        assert await page.text_content(".fact:has(dt:text('Reward')) dd") == "1"
        steps = await page.locator(".turn-head .chip[title='step of its task']").all_text_contents()
        assert steps[:4] == ["find", "find", "find", "mend"]
        forks = await page.locator(".outline .chip").all_text_contents()
        assert sorted(forks) == ["history rewritten", "new conversation"]
        await page.click(".turn-line:has-text('Trailing commas')")
        await page.wait_for_selector("section.turn >> text=A title for this conversation, please.")
        assert await page.locator("section.turn").count() == 1
        await page.click("role=tab[name=Tokens]")
        await page.locator(".done .tok").first.hover()
        said = await page.text_content(".token-detail")
        turns = await proxy.store.turns("parser-05.0")
        title = next(turn for turn in turns if turn.fork_reason == "new_conversation")
        assert f"id {title.to_numpy().completion_ids[0]}" in said
        assert f"{title.to_numpy().sampling_logprobs[0]:.4f}" in said and "base/3" in said
        assert looker.troubles == []


async def test_sessions_are_found_by_reward_and_by_what_was_said(
    proxy: Proxy, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "LOOK_S", 60.0)  # or a slow machine finds a part, and goes on when it is told to
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions", "table.rows tbody tr")
        await page.keyboard.press("/")
        await page.keyboard.type("TITLE for this conversation")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=6 sessions, searched 25 of 25")
        await page.fill("input[name=min_reward]", "2")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=No session matches.")
        assert "min_reward=2" in page.url and "text=TITLE" in page.url
        assert await looker.faults() == [] and looker.troubles == []


async def test_filters_that_are_as_they_were_read_the_list_again(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions?run_id=new", "text=No session matches.")
        await proxy.steno.register("first", SessionSpec(run_id="new"))
        await page.click("role=button[name=Filter]")
        await page.wait_for_selector("table.rows a:text-is('first')")
        await proxy.steno.register("second", SessionSpec(run_id="new"))
        await page.press("input[name=run_id]", "Enter")
        await page.wait_for_selector("table.rows a:text-is('second')")
        await proxy.steno.register("third", SessionSpec(run_id="new"))
        await page.keyboard.press("Enter")  # who waits stays in the field
        await page.wait_for_selector("table.rows a:text-is('third')")
        assert await page.locator("table.rows tbody tr").count() == 3 and looker.troubles == []


async def test_what_the_trainer_saw_is_shown_of_its_run_and_in_the_tokens(proxy: Proxy, browser: Any) -> None:
    run, trial = "fix-the-parser", "parser-05.1"
    turn = (await proxy.store.turns(trial))[-1]
    differences = [0.2, -0.2, 0.0, math.nan] + [0.0] * (turn.completion_tokens - 4)
    for step in (1, 2, 3):
        values = {"reward/mean": step / 4, "staleness/mean": 1.5, "time/train_s": 6.0, "time/wait_s": 2.0}
        values |= {"trial/tests_passed": step * 2.0, "reward_by/easy": 1.0} | {f"trial/m{n:02}": 0.0 for n in range(24)}
        await proxy.steno.post_step(run, TrainingStep(step=step, values=values))
    post = PostedAnnotation(trial_id=trial, turn_id=turn.turn_id, step=3, differences=halves_to_bytes(differences))
    assert (await proxy.steno.annotate(run, [post])).kept == 1
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go(f"runs/{run}", "text=Steps: 3, the last is 3")
        assert "1.5 steps" in await page.text_content("figure.chart:has-text('Staleness')")
        assert await page.locator("figure.chart:has-text('reward_by/easy')").count() == 1
        assert await page.locator("figure.chart:has-text('trial/m')").count() == 23, (
            "24 names of the user's own at most"
        )
        await page.wait_for_selector("text=2 more names of trials' metrics")
        await page.wait_for_selector("text=Time of the last step")
        await looker.shot("run-with-steps")
        await looker.go(f"sessions/{trial}?tab=tokens", ".done .tok")
        await page.select_option("text=Colour", "difference")
        strip = page.locator(f"#tokens-{turn.turn_id} .done")
        await strip.scroll_into_view_if_needed()
        cells = strip.locator(".tok")
        await cells.first.wait_for()
        kinds = [await cells.nth(n).get_attribute("class") for n in range(4)]
        assert [kind.split()[2] for kind in kinds] == ["d5", "d1", "d3", "unknown"]
        await cells.first.hover()
        assert "trainer minus sampler 0.2000" in await page.text_content(".token-detail")
        assert await looker.faults() == [] and looker.troubles == []


async def test_a_run_that_scores_another_anew_shows_what_it_borrowed(
    proxy: Proxy, browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "score.py").write_text("def other_way(transcript):\n    return -transcript.session.reward\n")
    words = ["rescore", "--run", "fix-the-parser", "--reward", f"{tmp_path / 'score.py'}:other_way", "--as", "again"]
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("runs", "table.rows tbody tr")
        done = await asyncio.to_thread(CliRunner().invoke, app, [*words, "--proxy", proxy.url])
        assert done.exit_code == 0, done.output
        tokens = sum((await proxy.steno.run("again")).borrowed.values())
        shown = f"{tokens:,}" if tokens < 10_000 else f"{tokens / 1000:.1f}k"
        # The list is looked at again while it is shown; a look that draws it anew may take the row from under a click.
        await page.wait_for_selector("table.rows a:text-is('again')")
        await looker.go("runs/again", "text=tokens borrowed from the trials that this run scores anew.")
        said = await page.text_content(".card:has-text('tokens borrowed')")
        assert said.startswith(f"{shown} tokens borrowed") and "tokens sampled by trials" not in said
        assert f"for the trainer {shown} 100 %" in said and "base/3" in said and "base/4" in said
        assert await page.text_content(".fact:has(dt:text('Mean reward')) dd") == "-0.5"
        await looker.shot("run-rescored")
        assert await looker.faults() == [] and looker.troubles == []
        sessions = [session async for session in proxy.steno.sessions(run_id="again")]
        [trial] = [session.trial_id for session in sessions if session.rescore_of == "parser-05.0"]
        await looker.go(f"sessions/{trial}", ".fact:has(dt:text('Scores anew')) a:text('parser-05.0')")
        assert await page.text_content(".fact:has(dt:text('Reward')) dd") == "-1"


async def test_a_fork_says_where_it_comes_from_and_what_it_was_told(proxy: Proxy, browser: Any) -> None:
    assert (await proxy.chat("origin", "hello")).status_code == 200
    await proxy.steno.complete("origin", Completion(reward=1.0))
    [turn] = await proxy.store.turns("origin")
    await proxy.steno.register("fork", SessionSpec(fork_of=ForkOf(trial_id="origin", turn_id=turn.turn_id)))
    again = await proxy.chat("fork", "hello")
    assert again.status_code == 200
    await proxy.chat("fork", "hello", again.json()["choices"][0]["message"], "and you?")
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions/fork", f"section.turn .chip:text('told again, {turn.completion_tokens} tokens')")
        assert await looker.page.locator("section.turn .chip:text('told again')").count() == 1
        await looker.page.click(".fact:has(dt:text('Forked from')) a")
        await looker.page.wait_for_selector("h1:text-is('origin')")
        assert await looker.faults() == [] and looker.troubles == []


async def test_an_open_session_grows_as_it_is_recorded(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        await proxy.chat("alive", "hello")
        await looker.go("sessions/alive", "section.turn")
        await proxy.chat("alive", "hello", {"role": "assistant", "content": "hello"}, "and then?")
        await looker.page.wait_for_selector("section.turn >> text=and then?")
        assert await looker.page.locator("section.turn:not([data-live])").count() == 2
        await proxy.http.post("/sessions/alive/complete", json={"reward": 0.5})
        await looker.page.wait_for_selector(".pill.completed")
        assert await looker.page.text_content(".fact:has(dt:text('Reward')) dd") == "0.5"
        assert looker.troubles == []


async def test_an_answer_is_shown_as_it_is_sampled_token_by_token_whatever_it_says(browser: Any) -> None:
    """Inside a turn, before anything of it is on record; then the recorded turn takes its place, and nothing ran."""
    hostile = "<img src=x onerror=alert(1)>\u202e\x1b[31m"
    gates = {at: asyncio.Event() for at in (0, 10, 10 + len(hostile))}
    said = Say(text=hostile + " and the end", reasoning="I think, so", gates=gates)
    async with running(ParrotEngine(lambda request: said)) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await proxy.http.post("/sessions/alive", json={})
        await looker.go("sessions/alive", "text=No turns yet")
        asking = asyncio.create_task(proxy.chat("alive", "go on"))
        await page.wait_for_selector("section[data-live] >> text=waits for its first token")
        gates[0].set()
        await page.wait_for_selector("section[data-live] >> text=I think, s")
        await page.wait_for_selector("section[data-live] >> text=10 tokens so far")
        assert await proxy.store.turns("alive") == []
        gates[10].set()
        await page.wait_for_selector(f"section[data-live] >> text={10 + len(hostile)} tokens so far")
        shown = await page.text_content("section[data-live] .said.text >> nth=1")
        assert shown == "<img src=x onerror=alert(1)>U+202EU+001B[31"
        await looker.shot("under-way")
        assert await looker.faults() == []
        gates[10 + len(hostile)].set()
        assert (await asking).status_code == 200
        await page.wait_for_selector("section.turn:not([data-live]) >> text=and the end")
        await page.wait_for_selector("section[data-live]", state="detached")
        assert await page.locator("section.turn").count() == 1
        assert looker.troubles == []


async def test_all_of_it_can_be_done_by_keyboard(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions/parser-05.1", "section.turn")
        await page.focus(".turn-line >> nth=0")
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".turn-line[aria-current] .number:text('1')")
        await page.focus("role=tab[name=Conversation]")
        await page.keyboard.press("ArrowRight")
        await page.wait_for_selector(".done .tok")
        await page.focus(".strip >> nth=0")
        before = await page.text_content(".token-detail")
        await page.keyboard.press("ArrowRight")
        after = await page.text_content(".token-detail")
        assert "0 of" in before and "1 of" in after
        assert looker.troubles == []


async def test_three_hundred_turns_and_a_hundred_thousand_tokens_scroll(browser: Any) -> None:
    """What is in the page is bounded, wherever one is; the last token of the last turn is reached, and is the right one."""
    store = MemoryStore()
    await long_session(store, "long")
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("sessions/long?tab=tokens", ".done .tok")
        most = 0
        height = await page.evaluate("document.documentElement.scrollHeight")
        for step in range(1, 11):
            await page.evaluate(f"scrollTo(0, {height * step // 10})")
            await page.wait_for_timeout(300)
            most = max(most, await page.locator(".tok[data-at]").count())
        assert 256 < most < 20_000, most
        await page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        last = (await store.turns("long"))[-1]
        shown = page.locator(f"#tokens-{last.turn_id} .done .tok").last
        await shown.wait_for()
        assert await shown.text_content() == str(last.to_numpy().completion_ids[-1])
        assert looker.troubles == []


async def test_one_logs_in_and_out(browser: Any) -> None:
    async with (
        running(admin_key="admin", viewer_key="viewer", worker=False) as proxy,
        looking(browser, proxy.url) as looker,
    ):
        page = looker.page
        await proxy.http.post("/sessions/seen", json={})
        await looker.go("sessions", "form.login")
        await page.keyboard.type("wrong")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=neither the admin key nor a viewer key")
        assert await looker.faults() == []
        await page.fill("#key", "viewer")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=seen")
        assert await page.evaluate("document.cookie") == ""
        assert "viewer" not in await page.evaluate(
            "JSON.stringify({...localStorage, ...sessionStorage}) + location.href"
        )
        await page.click("text=Log out")
        await page.wait_for_selector("form.login")

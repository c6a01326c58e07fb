"""The page `/ui` where there is much: groups of a run, points of a chart, steps that stay as they are."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from steno.contracts.records import Session
from steno.contracts.rest import Completion, GroupSpec
from steno.contracts.runs.leases import LeaseRequest
from steno.contracts.runs.training_steps import TrainingStep
from steno_proxy.store.interface import SessionListPage
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.integration.viewer.conftest import looking
from tests.support.workers.parrot import ParrotEngine

pytestmark = pytest.mark.viewer

RUN = "fix-the-parser"


async def test_the_newest_groups_are_shown_and_older_ones_on_demand(browser: Any) -> None:
    async with running(ParrotEngine()) as proxy:
        for number in range(203):
            await proxy.steno.create_group(GroupSpec(run_id="long", size=1, group_id=f"g{number:03}"))
        async with looking(browser, proxy.url) as looker:
            page = looker.page
            await looker.go("groups?run_id=long", "table.rows tbody tr")
            assert await page.locator("table.rows tbody tr").count() == 200
            assert await page.text_content(".headline [role=status]") == "200 of 203, the newest"
            assert await page.locator("table.rows a:text-is('g002')").count() == 0
            await page.click("text=Show older ones")
            await page.wait_for_selector("table.rows tbody tr:nth-child(203) >> text=g000")
            assert await page.text_content(".headline [role=status]") == "203"
            assert not await page.is_visible("text=Show older ones")
            assert await looker.faults() == [] and looker.troubles == []


async def test_the_newest_runs_are_shown_and_older_ones_on_demand(browser: Any) -> None:
    """All of them would be read again at each look."""
    async with running(ParrotEngine()) as proxy:
        for number in range(103):
            await proxy.steno.create_group(GroupSpec(run_id=f"r{number:03}", size=1))
        async with looking(browser, proxy.url) as looker:
            page = looker.page
            await looker.go("runs", "table.rows tbody tr:nth-child(100) >> text=r003")
            assert await page.locator("table.rows tbody tr").count() == 100
            assert await page.text_content(".headline .small") == "the newest 100"
            await page.click("text=Show older ones")
            await page.wait_for_selector("table.rows tbody tr:nth-child(103) >> text=r000")
            assert await page.text_content(".headline .small") == ""
            assert not await page.is_visible("text=Show older ones")
            assert await looker.faults() == [] and looker.troubles == []


async def test_the_groups_without_a_run_are_a_link_away_from_the_runs(browser: Any) -> None:
    async with running(ParrotEngine()) as proxy:
        await proxy.steno.create_group(GroupSpec(size=1, group_id="alone"))
        await proxy.steno.create_group(GroupSpec(run_id="named", size=1, group_id="of-a-run"))
        async with looking(browser, proxy.url) as looker:
            page = looker.page
            await looker.go("runs", "table.rows tbody tr")
            await page.click("a:text-is('groups without a run')")
            await page.wait_for_selector("table.rows a:text-is('alone')")
            assert await page.locator("table.rows a:text-is('of-a-run')").count() == 0
            assert looker.troubles == []


async def test_a_chart_of_very_many_points_is_drawn(proxy: Proxy, browser: Any) -> None:
    """In a time that grows with their number. Their smallest was looked for anew for each of them, all as arguments of a call."""
    async with looking(browser, proxy.url) as looker:
        await looker.go("groups", "table.rows tbody tr")
        told = await looker.page.evaluate(
            """async () => {
              const { lineChart } = await import("./static/charts.js");
              const points = Array.from({ length: 300000 }, (_, x) => ({ x, y: x % 7, label: `step ${x}` }));
              return lineChart("Many", points).querySelector("svg").getAttribute("aria-label");
            }"""
        )
        assert told == "Many: 0 at step 299999, between 0 and 6"


@pytest.mark.parametrize(
    "served",
    [{"version": "b/4004", "workers": {}}, {"version": None, "workers": {"b/4004": ["w"]}}],
    ids=["pushed", "verl"],
)
async def test_a_runs_newest_versions_are_told_apart_and_stay_while_nothing_changes(
    served: dict[str, Any], proxy: Proxy, browser: Any
) -> None:
    """A trainer made a version each step, crashed, and a start of it goes on from an earlier step. The answer has no order."""
    run, policy = [(await proxy.http.get(path)).json() for path in (f"/runs/{RUN}", "/policy")]
    names = ["unknown", *(f"a/{step}" for step in range(4994)), *(f"b/{step}" for step in range(4000, 4005))]
    random.Random(1).shuffle(names)
    run["sampled"], run["borrowed"] = dict.fromkeys(names, 1), {"b/4004": 1}
    policy["items"] = [{"policy": "default", **served}]
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await page.route(f"**/runs/{RUN}", lambda route: route.fulfill(json=run))
        await page.route("**/policy", lambda route: route.fulfill(json=policy))
        await looker.go(f"runs/{RUN}", "[aria-label='Tokens by version']")
        keys = page.locator("[aria-label='Tokens by version'] .key")
        shown = [text.rsplit(" ", 3)[:2] for text in await keys.all_text_contents()]
        newest = [*(f"a/{step}" for step in range(4987, 4994)), *(f"b/{step}" for step in range(4000, 4005))]
        assert shown == [["4,988 earlier versions", "4,988"], *([name, "1"] for name in newest[:-1]), ["b/4004", "2"]]
        all_of_it = page.locator("[aria-label='Tokens by version'] *, [aria-label='Tokens by the ledger'] *, .charts *")
        await all_of_it.evaluate_all("nodes => { window.seen = nodes; }")
        await looks_at_run(page)
        assert await all_of_it.evaluate_all("nodes => nodes.length > 0 && nodes.every((one, n) => one === seen[n])")
        run["sampled"]["b/4004"] = 8
        await page.wait_for_selector("[aria-label='Tokens by version'] .key:has-text('b/4004') b:text-is('9')")
        assert looker.troubles == []


async def looks_at_run(page: Any) -> None:
    """Until it was looked at again, and that was shown: the look after it has begun."""
    for _ in range(2):
        async with page.expect_response(f"**/runs/{RUN}"):
            pass


async def test_charts_of_steps_are_drawn_anew_only_when_the_steps_have_changed(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await proxy.steno.post_step(RUN, TrainingStep(step=1, values={"reward/mean": 0.5}))
        await looker.go(f"runs/{RUN}", "text=Steps: 1, the last is 1")
        chart = "figure.chart:has-text('Reward of a step')"
        await page.eval_on_selector(chart, "node => { node.dataset.seen = 'yes'; }")
        for _ in range(2):  # the next looks
            async with page.expect_response(f"**/runs/{RUN}/steps*"):
                pass
        assert await page.get_attribute(chart, "data-seen") == "yes"
        await proxy.steno.post_step(RUN, TrainingStep(step=1, values={"reward/mean": 0.75}))
        await page.wait_for_selector(f"{chart} >> text=0.75")
        assert looker.troubles == []


async def test_an_evaluation_that_is_added_to_an_earlier_step_is_drawn(proxy: Proxy, browser: Any) -> None:
    """As `steno evaluate --follow` does, hours after the step."""
    for step in range(1, 4):
        await proxy.steno.post_step(RUN, TrainingStep(step=step, values={"reward/mean": 0.5}))
    async with looking(browser, proxy.url) as looker:
        await looker.go(f"runs/{RUN}", "text=Steps: 3, the last is 3")
        await proxy.steno.post_step(RUN, TrainingStep(step=1, values={"eval/reward": 0.25}))
        added = "figure.chart:has-text('Reward of the evaluation') circle >> text=step 1: 0.25"
        await looker.page.wait_for_selector(added, state="attached")
        assert looker.troubles == []


async def test_of_very_many_steps_a_thousand_are_read_again_each_minute(browser: Any) -> None:
    """All of them were, and held up the proxy. What is added to an old step is seen when its turn comes."""
    store = MemoryStore()
    for step in range(2500):
        await store.runs.keep_step("long", TrainingStep(step=step, values={"loss": 0.5}))
    look = """async (looks) => {
        const { Steps } = await import("./static/runs.js");
        window.steps ??= new Steps("long", new AbortController().signal);
        for (let n = 0; n < looks; n += 1) await steps.look(null);
        return [steps.items.map(({ step }) => step), steps.items[1500].values, steps.changes];
    }"""
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        await looker.go("runs", "text=No run yet")
        starts: list[int] = []
        looker.page.on("request", lambda sent: starts.append(int(sent.url.partition("start=")[2].partition("&")[0])))
        assert await looker.page.evaluate(look, 1) == [[*range(2500)], {"loss": 0.5}, 1]
        await store.runs.keep_step("long", TrainingStep(step=1500, values={"eval/reward": 1.0}))
        assert (await looker.page.evaluate(look, 38))[1:] == [{"loss": 0.5}, 1]
        assert await looker.page.evaluate(look, 41) == [[*range(2500)], {"loss": 0.5, "eval/reward": 1.0}, 2]
        assert [start for start in starts if start < 2450] == [0, 1000, 2000, 0, 1000, 2000, 0]
        assert looker.troubles == []


async def test_steps_that_a_resumed_trainer_takes_again_replace_the_lost_ones(proxy: Proxy, browser: Any) -> None:
    """Those that it has taken when the page hears of it, and those that it takes after that."""

    async def post(step: int, entropy: float) -> None:
        await proxy.steno.post_step(RUN, TrainingStep(step=step, values={"policy/entropy": entropy}))

    await proxy.steno.take_over(RUN, "crashes")
    for step in range(1, 6):
        await post(step, float(step))
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go(f"runs/{RUN}", "text=Steps: 5, the last is 5")
        dots = page.locator("figure.chart:has-text('Entropy') circle title")
        assert await dots.all_text_contents() == [f"step {n}: {n}" for n in range(1, 6)]
        await post(2, 20.0)
        await proxy.steno.take_over(RUN, "goes-on", force=True)
        await page.wait_for_selector("circle >> text=step 2: 20", state="attached")
        await post(3, 30.0)
        await page.wait_for_selector("circle >> text=step 3: 30", state="attached")
        assert (await dots.all_text_contents())[3:] == ["step 4: 4", "step 5: 5"]
        for step in range(4, 7):
            await post(step, 10.0 * step)
        await page.wait_for_selector("text=Steps: 6, the last is 6")
        await page.wait_for_selector("circle >> text=step 4: 40", state="attached")
        assert await dots.all_text_contents() == ["step 1: 1", *(f"step {n}: {10 * n}" for n in range(2, 7))]
        assert looker.troubles == []


async def test_later_looks_at_a_young_run_pass_over_the_sessions_before_it(
    browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may have a month of sessions. A list of fewer than were asked for has looked at all of them."""
    store, long_ago, looked = MemoryStore(), time.time() - 86_400, []
    for n in range(500):
        made_at = long_ago + n
        await store.register(Session(trial_id=f"old-{n}", run_id="old", created_at=made_at, updated_at=made_at))
    list_sessions = store.list_sessions

    async def noted(**asked: Any) -> SessionListPage:
        found = await list_sessions(**asked)
        looked.append(found.looked)
        return found

    monkeypatch.setattr(store, "list_sessions", noted)
    async with running(store=store, worker=False) as proxy, looking(browser, proxy.url) as looker:
        page = looker.page
        mean = ".fact:has(dt:text-is('Mean reward')) dd:text-is('{}')"

        async def score(reward: float) -> None:
            group = await proxy.steno.create_group(GroupSpec(run_id="young", size=1))
            await proxy.steno.complete(group.trials[0].session.trial_id, Completion(reward=reward))

        await score(1.0)
        await looker.go("runs/young", mean.format("1"))
        for reward in (0.0, 0.0, 0.0):
            await score(reward)
        await page.wait_for_selector(mean.format("0.25"))
        assert (looked[0], looked[-1]) == (501, 4) and looker.troubles == []


async def test_where_each_group_is_is_told(proxy: Proxy, browser: Any) -> None:
    [first, _] = await proxy.steno.lease(LeaseRequest(run_id=RUN, consumer="trainer", max_groups=2))
    await proxy.steno.extend(first.lease_id, used=True)
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await looker.go("runs", "table.rows tbody tr")
        row = await page.locator("table.rows tbody tr:has-text('fix-the-parser') td").all_text_contents()
        assert row[1:4] == ["5 0 running, 4 ready, 1 leased", "1", "0"]
        await looker.go(f"runs/{RUN}", "figure.chart")
        places = ("Ready", "Leased", "Used", "Acknowledged")
        told = [await page.text_content(f".fact:has(dt:text-is('{name}')) dd") for name in places]
        assert told == ["4", "1", "1", "0"] and looker.troubles == []

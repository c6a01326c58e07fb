"""The page `/ui` where a request fails, and where a run has held-out evaluations."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.rest import Completion, GroupSpec, SessionSpec
from tests.integration.http.conftest import Proxy, running
from tests.integration.viewer.conftest import looking
from tests.support.workers.parrot import ParrotEngine

pytestmark = pytest.mark.viewer


async def test_older_sessions_can_be_asked_for_again_after_a_failure(browser: Any) -> None:
    async with running(ParrotEngine()) as proxy:
        for number in range(60):
            await proxy.steno.register(f"t{number}", SessionSpec())
        async with looking(browser, proxy.url) as looker:
            page = looker.page
            await looker.go("sessions", "table.rows tbody tr:nth-child(50)")
            await page.route("**/sessions?*cursor=*", lambda route: route.abort())
            await page.click("text=Show older ones")
            await page.wait_for_selector("text=more could not be read")
            await page.unroute("**/sessions?*cursor=*")
            await page.click("text=Show older ones")
            await page.wait_for_selector("table.rows tbody tr:nth-child(60)")
            assert [trouble for trouble in looker.troubles if trouble.startswith("exception")] == []


async def test_a_groups_numbers_say_of_which_trials_they_are(proxy: Proxy, browser: Any) -> None:
    """One trial in the archive can't be read, one was deleted, one's turns are not given, and they come in two pages."""
    group = "parser-05"
    first, second, *_ = (await proxy.http.get("/sessions", params={"group_id": group})).json()["items"]

    async def in_two_pages(route: Any) -> None:
        more = "cursor=" in route.request.url
        body = {"items": [second if more else first], "next_cursor": None if more else "c", "unreadable": []}
        if more:
            body["unreadable"] = [f"{group}.2"]
        await route.fulfill(json=body)

    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await page.route("**/sessions?group_id=*", in_two_pages)
        broken = {"error": {"message": "no \u202e store", "code": "store_unavailable"}}
        await page.route(f"**/sessions/{group}.1/turns*", lambda route: route.fulfill(status=503, json=broken))
        await looker.go(f"groups/{group}", "table.beside .cell-text")
        told = await page.text_content("[role=note]")
        assert told == (
            f"Without 1 trial that can't be read in the archive now: {group}.2. "
            f"Without 1 trial that is not on record any more: {group}.3."
        )
        facts = {name: await page.text_content(f".fact:has(dt:text-is('{name}')) dd") for name in ("Trials", "Ended")}
        assert facts == {"Trials": "4", "Ended": "2 of 2"}
        assert (await page.text_content(".fact:has(dt:text-is('Lowest to highest')) dd")).endswith(" to 1 of 2")
        assert await page.locator("table.beside thead th").count() == 3
        await page.wait_for_selector("thead th:nth-child(3) >> text=Its turns can't be read: no U+202E store")
        assert [trouble for trouble in looker.troubles if trouble.startswith("exception")] == []


async def test_a_runs_averages_say_that_they_are_without_what_cant_be_read(proxy: Proxy, browser: Any) -> None:
    found = (await proxy.http.get("/sessions", params={"run_id": "fix-the-parser"})).json()
    found["unreadable"] = ["parser-00.0", "parser-00.1"]
    async with looking(browser, proxy.url) as looker:
        await looker.page.route("**/sessions?run_id=*", lambda route: route.fulfill(json=found))
        await looker.go("runs/fix-the-parser", "figure.chart")
        told = await looker.page.text_content(".fact:has(dt:text('Mean reward')) dd")
        assert told.endswith(" without 2 that can't be read now")


async def scored(proxy: Proxy, run: str, purpose: Any, reward: float, size: int) -> None:
    made = await proxy.steno.create_group(GroupSpec(run_id=run, size=size, purpose=purpose))
    for trial in made.trials:
        await proxy.steno.complete(trial.session.trial_id, Completion(reward=reward))


async def test_a_runs_averages_leave_out_its_evaluations(browser: Any) -> None:
    async with running(ParrotEngine()) as proxy:
        await scored(proxy, "mixed", "train", 0.25, 2)
        await scored(proxy, "mixed", "eval", 1.0, 6)
        await scored(proxy, "evaluated", "eval", 0.5, 2)
        await scored(proxy, "long", "train", 1.0, 405)
        async with looking(browser, proxy.url) as looker:
            for run, mean, newest in (("mixed", "0.25", False), ("evaluated", "0.5", False), ("long", "1", True)):
                await looker.go("runs", "table.rows tbody tr")
                await looker.go(f"runs/{run}", "figure.chart")
                told = await looker.page.text_content(".fact:has(dt:text('Mean reward')) dd")
                assert told == mean + (" of the newest 400" if newest else ""), run
                solved = await looker.page.text_content(".fact:has(dt:text('Solved')) dd")
                assert solved == "100 %" + (" of the newest 400" if newest else ""), run
            assert looker.troubles == []

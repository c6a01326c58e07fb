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
            await page.wait_for_selector("text=older ones could not be read")
            await page.unroute("**/sessions?*cursor=*")
            await page.click("text=Show older ones")
            await page.wait_for_selector("table.rows tbody tr:nth-child(60)")
            assert [trouble for trouble in looker.troubles if trouble.startswith("exception")] == []


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

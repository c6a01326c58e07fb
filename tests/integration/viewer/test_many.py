"""The page `/ui` where there is much: groups of a run, points of a chart, steps that stay as they are."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.rest import GroupSpec
from steno.contracts.runs.training_steps import TrainingStep
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

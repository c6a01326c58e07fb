"""The page `/ui` while things change: after a session's end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.http.conftest import Proxy
from tests.integration.viewer.conftest import looking

pytestmark = pytest.mark.viewer


async def test_a_reward_that_comes_after_the_end_is_shown_in_the_head_and_by_the_colours(
    proxy: Proxy, browser: Any
) -> None:
    async with looking(browser, proxy.url) as looker:
        page = looker.page
        await proxy.chat("alive", "hello")
        await looker.go("sessions/alive?tab=tokens", ".done .tok")
        await page.select_option("text=Colour", "reason")
        await page.wait_for_selector(".legend >> text=open")
        await proxy.http.post("/sessions/alive/complete", json={})
        await page.wait_for_selector(".pill.completed")
        await page.wait_for_selector(".legend >> text=unscored")
        await proxy.http.post("/sessions/alive/complete", json={"reward": 0.5})
        await page.wait_for_selector(".fact:has(dt:text('Reward')) b:text-is('0.5')")
        await page.wait_for_selector(".legend >> text=for training")
        assert looker.troubles == []


async def test_a_session_that_ended_long_ago_is_asked_for_once(proxy: Proxy, browser: Any) -> None:
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions/parser-00.0", "section.turn")
        asked = len(looker.asked)
        await looker.page.wait_for_timeout(2500)
        assert looker.asked[asked:] == [] and looker.troubles == []

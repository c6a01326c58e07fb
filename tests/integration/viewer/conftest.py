"""A proxy with sessions to look at, and Debian's Chromium that looks. Playwright is in a folder of its own (`.ci/run`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.support.records.shown_sessions import filled

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "steno"
PLAYWRIGHT = Path(os.environ.get("STENO_TEST_PLAYWRIGHT", CACHE / "playwright-1.65.2"))
AXE = Path(os.environ.get("STENO_TEST_AXE", CACHE / "axe-core-4.14.1")) / "node_modules/axe-core/axe.min.js"
SHOTS = os.environ.get("STENO_TEST_SHOTS")
SLOW_MS = 120_000


class Looker:
    """A page of a browser, with all that went wrong in it. asked: the addresses of all that it asked for."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.troubles: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self._noted(message.type, message.text))
        page.on("pageerror", lambda error: self.troubles.append(f"exception: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("dialog", lambda dialog: self.troubles.append(f"dialog: {dialog.message}"))

    def _noted(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.troubles.append(f"{kind}: {text}")

    async def go(self, where: str, shows: str) -> None:
        """To `#/where`, until the selector `shows` is there."""
        await self.page.goto(f"{self.url}/ui/#/{where}")
        await self.page.wait_for_selector(shows)

    async def shot(self, name: str) -> None:
        """Kept where STENO_TEST_SHOTS names a folder."""
        if SHOTS:
            await self.page.wait_for_timeout(300)
            await self.page.screenshot(path=f"{SHOTS}/{name}.png")

    async def faults(self) -> list[str]:
        """What axe finds that is serious or worse, in words."""
        await self.page.evaluate(AXE.read_text())
        found = await self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['impact']}: {one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
            for one in found["violations"] if one["impact"] in ("serious", "critical")
        ]  # fmt: skip


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    sys.path.append(str(PLAYWRIGHT))
    from playwright.async_api import async_playwright

    program = shutil.which("chromium")
    assert program, "chromium is not installed: apt-get install chromium"
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=SLOW_MS)
        yield found
        await found.close()


@contextlib.asynccontextmanager
async def looking(browser: Any, url: str, scheme: str = "light", **options: Any) -> AsyncIterator[Looker]:
    page = await browser.new_page(viewport={"width": 1360, "height": 850}, color_scheme=scheme, **options)
    page.set_default_timeout(SLOW_MS)
    try:
        yield Looker(page, url)
    finally:
        await page.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    store = MemoryStore()
    await filled(store)
    async with running(store=store) as found:
        yield found


def asker(proxy: Proxy, trial_id: str) -> Callable[[], Awaitable[None]]:
    """Each call makes one turn more of one conversation."""
    said: list[Any] = ["hello"]

    async def ask() -> None:
        answer = await proxy.chat(trial_id, *said)
        said.extend([answer.json()["choices"][0]["message"], "and then?"])

    return ask

"""The page `/ui` over many sessions: how long its list and each filter take, and what a search costs everybody else.

    python -m benchmarks.viewer --sessions 10000 --json build/viewer.json

The proxy has a process of its own, with the sessions in its memory. A filter is one that matches few sessions or none, so that
every record is looked at. `late_ms` is how much later than asked for a task of the proxy's event loop came on, which is what a
token on its way would wait: without a search, and while one reads all texts. With `--browser`, Chromium says when it had painted
the list (Playwright: see `.ci/run`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import describe_machine
from steno.contracts.records import Session
from steno_proxy.config import ProxySettings
from steno_proxy.server.app import create_app
from steno_proxy.store.memory.store import MemoryStore
from tests.support.server import serve
from tests.support.shown_sessions import record, straight

FILTERS: dict[str, dict[str, Any]] = {
    "newest": {},
    "run": {"run_id": "run-3"},
    "status": {"status": "aborted"},
    "end_reason": {"end_reason": "nothing"},
    "reward": {"min_reward": 2},
    "agent": {"agent": "nobody"},
    "mark": {"mark": "synthetic"},
}
TEXT = {"text": "nobody has said this"}
PROBE_S = 0.001
QUIET_S = 10.0


async def hold(sessions: int) -> None:
    """The proxy: says its address once it is full, and writes how late its loop was for each line that it reads."""
    store, now = MemoryStore(), time.time()
    for number in range(sessions):
        began = now - sessions + number
        session = Session(
            trial_id=f"trial-{number:05}",
            run_id=f"run-{number % 20}",
            created_at=began,
            updated_at=began,
            metadata={"agent": "pi"},
        )
        await record(store, session, straight(number % 50, 3, began))
        await store.complete(
            session.trial_id,
            status="completed",
            reward=float(number % 2),
            end_reason="completed",
            metrics={},
            now=began,
        )
    async with serve(create_app(ProxySettings(), store)) as port:
        print(f"http://127.0.0.1:{port}", flush=True)
        late: list[float] = []
        probing = asyncio.create_task(_probe(late))
        while await asyncio.to_thread(sys.stdin.readline):
            print(
                json.dumps({"late_ms": [1000 * value for value in _shares(late)], "cpu_s": time.process_time()}),
                flush=True,
            )
            late.clear()
        probing.cancel()


async def _probe(late: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(PROBE_S)
        late.append(time.perf_counter() - began - PROBE_S)


def _shares(values: list[float]) -> tuple[float, float, float]:
    """Median, 99th percentile, largest."""
    ordered = sorted(values) or [0.0]
    return ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--browser", action="store_true", help="also the time until Chromium has painted the list")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        asyncio.run(hold(options.sessions))
        return 0
    command = [sys.executable, "-m", "benchmarks.viewer", "--hold", "--sessions", str(options.sessions)]
    proxy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert proxy.stdin is not None and proxy.stdout is not None

    def looked() -> dict[str, Any]:
        assert proxy.stdin is not None and proxy.stdout is not None
        print("", file=proxy.stdin, flush=True)
        found: dict[str, Any] = json.loads(proxy.stdout.readline())
        return found

    try:
        url = proxy.stdout.readline().strip()
        found = {
            "machine": describe_machine(),
            "load": os.getloadavg(),
            "sessions": options.sessions,
            "took_s": {},
            "cpu_s": {},
        }
        with httpx.Client(base_url=url, timeout=120) as client:
            for name, query in FILTERS.items():
                before = looked()["cpu_s"]
                found["took_s"][name] = _all_pages(client, query)
                found["cpu_s"][name] = looked()["cpu_s"] - before
            time.sleep(QUIET_S)
            found["quiet"] = looked()
            began = time.monotonic()
            _all_pages(client, TEXT)
            found["search"] = looked() | {"took_s": time.monotonic() - began}
        if options.browser:
            found["painted_ms"] = _painted_ms(url)
    finally:
        proxy.stdin.close()
        proxy.wait()
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text)
    return 0


def _all_pages(client: httpx.Client, query: dict[str, Any]) -> float:
    """As the page does: the first page that has something, or the end. Returns seconds."""
    began, cursor = time.monotonic(), None
    while True:
        page = client.get("/ui/sessions", params=query | ({"cursor": cursor} if cursor else {}))
        page.raise_for_status()
        answer = page.json()
        cursor = answer["next_cursor"]
        if answer["items"] or cursor is None:
            return time.monotonic() - began


def _painted_ms(url: str) -> dict[str, float]:
    """First contentful paint, and the list's rows, since the navigation began."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"{url}/ui/#/sessions")
        page.wait_for_selector("table.rows tbody tr")
        rows = page.evaluate("performance.now()")
        first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        browser.close()
    return {"first": first, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())

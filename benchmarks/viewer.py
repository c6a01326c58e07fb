"""The page `/ui` over many sessions: how long its list and each filter take, and what a search costs everybody else.

    python -m benchmarks.viewer --browser --streams 1000 --json build/viewer.json      all of it: about five minutes
    python -m benchmarks.viewer --sessions 10000 --redis                               the sessions in a Redis

The proxy has a process of its own, with the sessions in its memory. A filter is one that matches few sessions or none, so that
everything is looked at. `late_ms` is how much later than asked for a task of the proxy's event loop came on, which is what a
token on its way would wait: without a search, and while one reads all texts. With `--streams`, so many agents stream meanwhile
(`worker.py`, `load.py`; a token each 0.1 s, or `--pace-s`): `gap_p99_ms` is between two tokens of a stream, in turns without a
search and with one all the time.
With `--browser`, Chromium says when it had painted the list and each filter (Playwright: see `.ci/run`), and how evenly 300 turns
of 100,000 tokens scroll. Say what the load was (`load`): above some 4 on two cores it measures others.
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
from urllib.parse import urlencode

import httpx
import uvloop

from benchmarks.report import describe_machine
from steno.contracts.records import Session
from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.app import create_app
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.store.redis.store import RedisStore
from tests.support.machine.redis_server import PATIENT, RedisServer
from tests.support.programs.server import serve
from tests.support.records.shown_sessions import long_session, record, straight

FILTERS: dict[str, dict[str, Any]] = {
    "newest": {},
    "run": {"run_id": "run-3"},
    "status": {"status": "aborted"},
    "end_reason": {"end_reason": "nothing"},
    "reward": {"min_reward": 2},
    "agent": {"agent": "nobody"},
    "mark": {"mark": "synthetic"},
}
LONG = "long"
TEXT = {"text": "nobody has said this"}
PROBE_S = 0.001
QUIET_S = 10.0


STREAM_S = 20.0
ROUNDS = 3
PACE_S = 0.1


async def hold(sessions: int, redis: bool) -> None:
    """The proxy: says its address once it is full, and writes how late its loop was for each line that it reads."""
    server = RedisServer() if redis else None
    try:
        await _hold(sessions, RedisStore(server.url, **PATIENT) if server else MemoryStore())
    finally:
        if server:
            server.close()


async def _hold(sessions: int, store: SessionStore) -> None:
    now = time.time()
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
    await long_session(store, LONG)
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
    parser.add_argument("--redis", action="store_true", help="the sessions in a Redis of the benchmark's own")
    parser.add_argument(
        "--streams", type=int, default=0, help="also the gaps between tokens of so many streams, beside a search"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of streams, without a search and with one")
    parser.add_argument("--pace-s", type=float, default=PACE_S, help="seconds from one token of a stream to its next")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        uvloop.run(hold(options.sessions, options.redis))
        return 0
    command = [sys.executable, "-m", "benchmarks.viewer", "--hold", "--sessions", str(options.sessions)]
    command += ["--redis"] if options.redis else []
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
            found |= _in_a_browser(url)
        if options.streams:
            found["streams"] = _beside_streams(url, options.streams, options.rounds, options.pace_s)
        found["load_at_end"] = os.getloadavg()
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


def _in_a_browser(url: str) -> dict[str, Any]:
    """First contentful paint and the rows of the list, and of each filter, since it was asked for; how a long session scrolls."""
    from playwright.sync_api import sync_playwright

    done = "document.querySelector('table.rows tbody tr')"
    painted: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 850})
        page.goto(f"{url}/ui/#/sessions")
        page.wait_for_selector("table.rows tbody tr")
        painted["rows"] = page.evaluate("performance.now()")
        painted["first"] = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        for name, query in FILTERS.items():
            page.goto(f"{url}/ui/#/workers")
            page.wait_for_selector("h1 >> text=Workers")
            where = f"#/sessions?{urlencode(query)}"
            painted[name] = page.evaluate(
                f"""async (where) => {{
                    const began = performance.now();
                    location.hash = where;
                    while (!({done})) await new Promise(requestAnimationFrame);
                    return performance.now() - began;
                }}""",
                where,
            )
        page.goto(f"{url}/ui/#/sessions/{LONG}")
        page.wait_for_selector("section.turn")
        page.wait_for_selector("section.turn >> nth=299", state="attached")
        scrolls = {"conversation": page.evaluate(SCROLL)}
        page.click("role=tab[name=Tokens]")
        page.wait_for_selector(".done .tok")
        scrolls["tokens"] = page.evaluate(SCROLL)
        browser.close()
    return {"painted_ms": painted, "scroll": scrolls}


SCROLL = """async () => {
    scrollTo(0, 0);
    const long = [];
    const seen = new PerformanceObserver((list) => long.push(...list.getEntries().map((one) => one.duration)));
    seen.observe({ type: "longtask" });
    const gaps = [];
    let last = await new Promise(requestAnimationFrame);
    while (gaps.length < 200) {
        scrollBy(0, 160);
        const now = await new Promise(requestAnimationFrame);
        gaps.push(now - last);
        last = now;
    }
    gaps.sort((a, b) => a - b);
    seen.disconnect();
    const at = (share) => gaps[Math.floor(share * (gaps.length - 1))];
    const longest_ms = Math.max(0, ...long);
    return { frames: gaps.length, p50_ms: at(0.5), p99_ms: at(0.99), most_ms: at(1), long_tasks: long.length, longest_ms };
}"""
"""Through the page at 160 pixels a frame: the gaps between frames, and tasks of more than 50 ms."""


def _beside_streams(url: str, streams: int, rounds: int, pace_s: float) -> dict[str, Any]:
    """Gaps between tokens, in turns without a search and with one that never ends."""
    worker = [sys.executable, "-m", "benchmarks.worker", "--proxy", url.replace("http", "ws"), "--pace-s", str(pace_s)]
    gaps: dict[str, list[float]] = {"quiet": [], "search": []}
    failed = 0
    with subprocess.Popen(worker) as engine:
        try:
            with httpx.Client(base_url=url, timeout=120) as client:
                while not client.get("/workers").json()["items"]:
                    time.sleep(0.1)
            for _ in range(rounds):
                for kind in gaps:
                    found = _streamed(url, streams, searching=kind == "search")
                    gaps[kind].append(1000 * found["gap_p99_s"])
                    failed += found["failed"]
        finally:
            engine.terminate()
    middle = {kind: sorted(values)[len(values) // 2] for kind, values in gaps.items()}
    moved = middle["search"] - middle["quiet"]
    return {
        "streams": streams,
        "pace_s": pace_s,
        "gap_p99_ms": gaps,
        "median_ms": middle,
        "search_moves_p99_by_ms": moved,
        "failed": failed,
    }


def _streamed(url: str, streams: int, *, searching: bool) -> dict[str, Any]:
    """One round of `load.py`, beside a search that begins again when it is through."""
    tokens = ["--clients", str(streams), "--tokens", "128", "--seconds", str(STREAM_S)]
    command = [sys.executable, "-m", "benchmarks.load", "streams", "--url", f"{url}/{{client}}/v1/chat/completions"]
    with subprocess.Popen([*command, *tokens], stdout=subprocess.PIPE, text=True) as load:
        with httpx.Client(base_url=url, timeout=120) as client:
            cursor = None
            while searching and load.poll() is None:
                page = client.get("/ui/sessions", params=TEXT | ({"cursor": cursor} if cursor else {})).json()
                cursor = page["next_cursor"]
        said, _ = load.communicate()
    result: dict[str, Any] = json.loads(said)
    return result


if __name__ == "__main__":
    sys.exit(main())

"""A proxy under steady load for as long as one likes: is its memory flat?

    python -m benchmarks.soak --minutes 60 --json docs/evidence/soak.json

2,000 streams stay open whose first token never comes; beside them round after round of short conversations, each a new session
in Redis, 10,000 of them at least. After every round the resident bytes of proxy and worker and the proxy's descriptors are noted.
Once the first half has filled what caches there are (the proxy's are kept small here), the rest must not grow. Exit code 1: it
grew, a request failed, or a stream was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from tests.support.machine import descriptors
from tests.support.machine.redis_server import RedisServer
from tests.support.programs.processes import process
from tests.support.programs.stack import ROOT, Stack, running

STREAMS = 2000
SESSIONS = 10_000
ROUND_SESSIONS = 500
TURNS = 2
CACHE_BYTES = 4 * 2**20
MOST_GROWTH = 0.05
"""Of the resident bytes, from the mean of the third quarter of the rounds to that of the last."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="at least; goes on until there are --sessions")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    descriptors.allow_many()
    with tempfile.TemporaryDirectory(prefix="steno-soak-") as folder, _redis() as redis:
        options = ["--redis-url", redis.url, "--archive", "off", "--tree-cache-bytes", str(CACHE_BYTES)]
        with running(Path(folder), None, proxy=options) as stack, _worker(stack) as worker:
            stack.wait_for_model()
            result = soak(stack, worker, Path(folder), args.minutes * 60, args.streams, args.sessions)
            with redis.client() as client:
                result["redis_bytes_per_session"] = round(client.info("memory")["used_memory"] / result["sessions"])
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    wrong = {
        f"{result['failed']} requests failed": result["failed"] > 0,
        f"{result['streams_open']} streams are open, not {args.streams}": result["streams_open"] != args.streams,
        f"grew by more than {MOST_GROWTH:.0%}: {result['growth']}": not result["flat"],
    }
    for message, applies in wrong.items():
        if applies:
            print(f"soak: {message}", file=sys.stderr)
    return 1 if any(wrong.values()) else 0


def soak(stack: Stack, worker: int, folder: Path, seconds: float, streams: int, sessions: int) -> dict[str, Any]:
    """Args: worker: its pid.  seconds, sessions: at least so long, and so many."""
    began = time.monotonic()
    proxy = psutil.Process(stack.proxy.pid)
    rounds: list[dict[str, float]] = []
    failed, done = 0, 0
    with _silent(stack, streams, folder):
        while done < sessions or time.monotonic() - began < seconds:
            url = f"{stack.url}/r{len(rounds)}-{{client}}/v1/chat/completions"
            said = _load("session", "--url", url, "--sessions", ROUND_SESSIONS, "--turns", TURNS, "--grow-bytes", 512)
            failed += json.loads(said)["failed"]
            done += ROUND_SESSIONS
            rounds.append(
                {
                    "at_s": round(time.monotonic() - began, 1),
                    "proxy_bytes": proxy.memory_info().rss,
                    "worker_bytes": psutil.Process(worker).memory_info().rss,
                    "proxy_fds": proxy.num_fds(),
                }
            )
        still_open = stack.get("/workers")["items"][0]["in_flight"]
    growth = {name: _growth([one[name] for one in rounds]) for name in ("proxy_bytes", "worker_bytes", "proxy_fds")}
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count(), "load": os.getloadavg(),
        "seconds": round(time.monotonic() - began), "sessions": done, "turns": done * TURNS, "failed": failed,
        "streams_open": still_open, "growth": growth, "flat": max(growth.values()) <= MOST_GROWTH, "last": rounds[-1],
        "rounds": rounds,
    }  # fmt: skip


def _growth(values: list[float]) -> float:
    """Of the last quarter's mean over the third's, as a share."""
    quarter = max(1, len(values) // 4)
    early, late = values[-2 * quarter : -quarter] or values[:1], values[-quarter:]
    return round((sum(late) / len(late)) / (sum(early) / len(early)) - 1, 4)


@contextlib.contextmanager
def _redis() -> Iterator[RedisServer]:
    server = RedisServer()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def _worker(stack: Stack) -> Iterator[int]:
    command = [sys.executable, "-m", "benchmarks.worker", "--proxy", f"ws://127.0.0.1:{stack.port}"]
    with process(command, stack.folder / "bench-worker.log") as child:
        yield child.pid


@contextlib.contextmanager
def _silent(stack: Stack, streams: int, folder: Path) -> Iterator[None]:
    """So many open streams, until the block is left."""
    ready = folder / "ready"
    command = [
        sys.executable, "-m", "benchmarks.load", "silent", "--url", stack.url + "/{client}/v1/chat/completions",
        "--clients", str(streams), "--hold-s", "100000", "--ready", str(ready),
    ]  # fmt: skip
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while stack.get("/workers")["items"][0]["in_flight"] < streams:
            if child.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{streams} streams did not open\n{stack.logs()}")
            time.sleep(0.2)
        yield
    finally:
        child.kill()
        child.wait()


def _load(*words: object) -> str:
    command = [sys.executable, "-m", "benchmarks.load", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())

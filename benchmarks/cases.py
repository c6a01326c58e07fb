"""The cases: what is asked of a started target, and what is counted meanwhile. Each returns one flat JSON object.

`SIZES` are those of the table in docs/performance.md; `QUICK` asks the same in seconds, to see that every case works.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis

from benchmarks.targets import LOAD_CORE, ROOT, Running, process_cpu_s

Result = dict[str, Any]
CASE_TIMEOUT_S = 400
TOKEN_KEYS = ("ids", "logprobs")
"""Suffixes of the keys that hold tokens; the others are counted per turn."""


@dataclass(frozen=True)
class Sizes:
    seconds: float = 10.0
    tiny_clients: int = 64
    few_streams: int = 64
    many_streams: int = 512
    tokens: int = 128
    sessions: int = 200
    turns: int = 20
    silent: int = 2000
    hold_s: float = 12.0
    warm_s: float = 1.0


SIZES = Sizes()
QUICK = Sizes(0.3, 8, 8, 32, 16, 8, 4, 40, 1.0, 0.1)


def load(running: Running, *args: object) -> Result:
    """Run the load generator to its end. Raises: RuntimeError with the end of its stderr."""
    return _json(["-m", "benchmarks.load", args[0], "--url", running.url, *args[1:]])


def _json(command: list[object]) -> Result:
    done = subprocess.run(
        ["taskset", "-c", LOAD_CORE, sys.executable, *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=CASE_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def _warm(running: Running, sizes: Sizes) -> None:
    load(running, "tiny", "--clients", 4, "--seconds", sizes.warm_s)


def tiny(running: Running, sizes: Sizes) -> Result:
    """Not streamed, one token each, back to back."""
    load(running, "tiny", "--seconds", sizes.warm_s)
    before = running.cpu_s()
    result = load(running, "tiny", "--clients", sizes.tiny_clients, "--seconds", sizes.seconds)
    result["cpu_us_per_request"] = 1e6 * (running.cpu_s() - before) / max(1, result["requests"])
    return result


def _streams(running: Running, sizes: Sizes, clients: int) -> Result:
    _warm(running, sizes)
    before = running.cpu_s()
    result = load(running, "streams", "--clients", clients, "--tokens", sizes.tokens, "--seconds", sizes.seconds)
    result["cpu_us_per_token"] = 1e6 * (running.cpu_s() - before) / max(1, result["tokens"])
    return result


def stream64(running: Running, sizes: Sizes) -> Result:
    """64 streams of 128 tokens at 20 ms."""
    return _streams(running, sizes, sizes.few_streams)


def stream512(running: Running, sizes: Sizes) -> Result:
    """512 of them: 25,000 tokens/s are offered."""
    return _streams(running, sizes, sizes.many_streams)


def sessions(running: Running, sizes: Sizes) -> Result:
    """200 sessions of 20 turns, 2 KB more each: CPU and memory; with a Redis, what rests there."""
    _warm(running, sizes)
    redis_before = process_cpu_s(running.redis_pid) if running.redis_pid else 0.0
    rss, before = running.rss_bytes(), running.cpu_s()
    result = load(running, "session", "--sessions", sizes.sessions, "--turns", sizes.turns)
    time.sleep(sizes.warm_s)
    if running.redis_pid:
        result["redis_cpu_ms_per_request"] = (
            1e3 * (process_cpu_s(running.redis_pid) - redis_before) / max(1, result["requests"])
        )
    result["cpu_ms_per_request"] = 1e3 * (running.cpu_s() - before) / max(1, result["requests"])
    result["grown_mb"] = (running.rss_bytes() - rss) / 1e6
    if running.redis_port is not None:
        result |= at_rest(running.redis_port, sizes)
    return result


def at_rest(port: int, sizes: Sizes) -> Result:
    """What the sessions take in Redis, as Redis accounts for it, beside the compressed text itself."""
    client = redis.Redis(port=port)
    tokens_bytes = turns_bytes = text_bytes = prompt = completion = 0
    for number in range(sizes.sessions):
        trial = f"steno:{{conv{number}}}:"
        for key in client.scan_iter(match=trial + "*", count=10_000):
            used = client.memory_usage(key, samples=0) or 0
            suffix = key.decode().removeprefix(trial)
            if suffix in TOKEN_KEYS:
                tokens_bytes += used
            else:
                turns_bytes += used
            if suffix == "texts":
                text_bytes += sum(map(len, client.lrange(key, 0, -1)))
        head = client.hgetall(trial + "session")
        prompt += int(head[b"prompt"])
        completion += int(head[b"completion"])
    client.close()
    turns = sizes.sessions * sizes.turns
    return {
        "tokens_at_rest": prompt + completion,
        "bytes_per_token": tokens_bytes / (prompt + completion),
        "bytes_per_turn": (turns_bytes - text_bytes) / turns,
        "text_bytes_per_turn": text_bytes / turns,
    }


def flat(running: Running, sizes: Sizes) -> Result:
    """The same sessions, all at the same turn: CPU per request by turn."""
    _warm(running, sizes)
    result = load(
        running,
        "session",
        "--sessions",
        sizes.sessions,
        "--turns",
        sizes.turns,
        "--in-step",
        "--cpu-of",
        running.pids[0],
    )
    result["cpu_ms_at_turn_2"] = result["cpu_ms_by_turn"][1]
    result["cpu_ms_at_last_turn"] = result["cpu_ms_by_turn"][-1]
    return result


def silent2000(running: Running, sizes: Sizes) -> Result:
    """2,000 streams whose first token never comes: memory."""
    _warm(running, sizes)
    before = running.rss_bytes()
    with tempfile.TemporaryDirectory(prefix="steno-bench-") as folder:
        ready = Path(folder) / "ready"
        child = subprocess.Popen(
            [
                "taskset",
                "-c",
                LOAD_CORE,
                sys.executable,
                "-m",
                "benchmarks.load",
                "silent",
                "--url",
                running.url,
                "--clients",
                str(sizes.silent),
                "--hold-s",
                str(sizes.hold_s),
                "--ready",
                str(ready),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            until = time.monotonic() + 120
            while not ready.exists() and time.monotonic() < until and child.poll() is None:
                time.sleep(0.1)
            rss = running.rss_bytes()
            out, errors = child.communicate(timeout=120)
        finally:
            child.kill()
            child.wait()
    if child.returncode:
        raise RuntimeError(errors.decode(errors="replace")[-2000:])
    return {**json.loads(out), "rss_mb": rss / 1e6, "kb_per_stream": (rss - before) / 1e3 / sizes.silent}


def worker(running: Running, sizes: Sizes) -> Result:
    """64 streams through a whole `steno worker`: CPU of its process per token, and what of it is engine, turn and relay."""
    _warm(running, sizes)
    spent, sampled = process_cpu_s(running.worker_pid), _sampled(running)
    load(running, "streams", "--clients", sizes.few_streams, "--tokens", sizes.tokens, "--seconds", sizes.seconds)
    tokens = _sampled(running) - sampled
    whole = 1e6 * (process_cpu_s(running.worker_pid) - spent) / max(1, tokens)
    parts = {
        what: _json(
            [
                "-m",
                "benchmarks.bare",
                "--what",
                what,
                "--streams",
                sizes.few_streams,
                "--tokens",
                sizes.tokens,
                "--seconds",
                sizes.seconds,
            ]
        )["cpu_us_per_token"]
        for what in ("engine", "turn")
    }
    return {
        "tokens": tokens,
        "cpu_us_per_token": whole,
        "engine_us_per_token": parts["engine"],
        "turn_us_per_token": parts["turn"] - parts["engine"],
        "relay_us_per_token": whole - parts["turn"],
        "beside_engine_us_per_token": whole - parts["engine"],
    }


def _sampled(running: Running) -> float:
    """Tokens on record so far, as the proxy counts them."""
    address = running.url.partition("/{client}")[0]
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("steno_proxy_completion_tokens_total "):
                return float(line.split()[1])
    raise RuntimeError("the proxy does not say how many tokens it has recorded")


Case = Callable[[Running, Sizes], Result]
CASES: dict[str, Case] = {
    "tiny": tiny, "stream64": stream64, "stream512": stream512, "sessions": sessions, "silent2000": silent2000,
    "flat": flat, "worker": worker,
}  # fmt: skip


def worked(result: Result) -> bool:
    """Whether a case did what it says, however slowly."""
    if "error" in result or result.get("failed"):
        return False
    if "asked" in result:
        return bool(result["open_at_end"] == result["asked"])
    return bool(result.get("requests") or result.get("tokens"))


def sized(seconds: float | None, quick: bool) -> Sizes:
    sizes = QUICK if quick else SIZES
    return sizes if seconds is None else replace(sizes, seconds=seconds)

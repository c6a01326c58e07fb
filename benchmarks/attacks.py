"""What one hostile client costs everybody else: a table of attacks, each against a proxy of its own.

    python -m benchmarks.attacks --json build/attacks.json
    python -m benchmarks.attacks --proxy-python OTHER/.venv/bin/python --attacks n64,tools     another release of the proxy

While an attack runs, one client asks `/healthz` and another asks for two tokens of its own trial, each again and again. The table
says how long each waited at most, which statuses the other trial and the attacker got, and the proxy's resident bytes before, at
the peak and a minute after. The proxy has the first core, everything else shares the last one. Redis is real, and so are the two
workers' clients, over an engine that costs nothing. Every attack is bounded in bytes and requests and ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import websockets

from benchmarks.report import describe_machine
from benchmarks.targets import LOAD_CORE, PROXY_CORE
from tests.support.machine.redis_server import RedisServer
from tests.support.programs.ports import free_port
from tests.support.programs.processes import process, until

MIB = 2**20
ATTACK_TIMEOUT_S = 180.0
"""Longest that one request of an attack is waited for; a wait that reaches it is reported as this."""
CHAT, RESPONSES, GEMINI = "v1/chat/completions", "v1/responses", "v1beta/models/bench:generateContent"


def _chat(**fields: Any) -> bytes:
    return json.dumps({"model": "bench", "max_tokens": 2, **fields}).encode()


def _repeat(head: str, item: str, count: int, tail: str) -> bytes:
    return (head + ",".join([item] * count) + tail).encode()


def _gemini(parts: str) -> bytes:
    return ('{"contents": [{"role": "user", "parts": [' + parts + "]}]}").encode()


def _declared(count: int) -> bytes:
    names = [f"f{i}" for i in range(count)]
    tools = [{"functionDeclarations": [{"name": name} for name in names]}]
    config = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": names}}
    contents = [{"role": "user", "parts": [{"text": "go"}]}]
    return json.dumps({"contents": contents, "tools": tools, "toolConfig": config}).encode()


def _unanswered(count: int) -> bytes:
    """As many calls, and responses that answer none of them."""
    calls = ",".join(['{"functionCall": {"name": "f", "args": {}}}'] * count)
    responses = ",".join(['{"functionResponse": {"id": "other", "name": "f", "response": {}}}'] * count)
    go = '{"role": "user", "parts": [{"text": "go"}]}'
    model, user = '{"role": "model", "parts": [' + calls + "]}", '{"role": "user", "parts": [' + responses + "]}"
    return ('{"contents": [' + ", ".join((go, model, user)) + "]}").encode()


def _different(count: int) -> bytes:
    """A history that nobody has sent before, of as many short messages."""
    return _chat(
        messages=[{"role": ("user", "assistant")[i % 2], "content": f"message {i}"} for i in range(count)] + _USER
    )


def _items(count: int) -> bytes:
    """A request of Responses with `count` items: calls, each with its result."""
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "go"}]
    for i in range(count // 2):
        items.append({"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": '{"a": 1}'})
        items.append({"type": "function_call_output", "call_id": f"c{i}", "output": f"result {i}"})
    return json.dumps({"model": "bench", "max_output_tokens": 16, "input": items}).encode()


_USER = [{"role": "user", "content": "x"}]
BODIES: dict[str, tuple[str, int, Callable[[], bytes]]] = {
    # name: (path after the trial, how many at once, body)
    "n64": (CHAT, 1, lambda: _chat(n=64, messages=[{"role": "user", "content": "x" * (5 * MIB)}])),
    "billing": (
        CHAT,
        1,
        lambda: _chat(messages=[{"role": "system", "content": "x-anthropic-billing-header: a\n" * (8 * MIB // 30)}, *_USER]),
    ),
    "gemini_responses": (GEMINI, 1, lambda: _unanswered(16_000)),
    "gemini_texts": (GEMINI, 1, lambda: _gemini(",".join(['{"text": "abcd"}'] * 250_000))),
    "gemini_names": (GEMINI, 1, lambda: _declared(20_000)),
    "messages": (
        CHAT,
        8,
        lambda: _repeat('{"model": "bench", "messages": [', '{"role":"user","content":""}', 900_000, "]}"),
    ),
    "tools": (
        CHAT,
        1,
        lambda: _repeat(
            '{"model": "bench", "messages": [{"role":"user","content":"x"}], "tools": [',
            '{"type":"function","function":{"name":"f"}}', 500_000, "]}",
        ),
    ),
    "long_text": (CHAT, 4, lambda: _chat(messages=[{"role": "user", "content": "word " * (6 * MIB)}])),  # 400: past any context
    "long_prompt": (CHAT, 4, lambda: _chat(messages=[{"role": "user", "content": "word " * (8 * MIB // 10)}])),  # 1M tokens
    "history": (CHAT, 4, lambda: _different(38_000)),
    "items": (RESPONSES, 4, lambda: _items(30_000)),
}  # fmt: skip
SOCKETS, SOCKET_BYTES = 15, 60 * MIB
NOTHING_S = 8.0
"""Of `nothing`: what the machine and the bystander's own clients cost, when nobody attacks."""
GROUPS = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["nothing", *BODIES, "sockets", "groups"]
    parser.add_argument("--attacks", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--proxy-python", default=sys.executable, help="an environment whose `steno proxy` is attacked")
    parser.add_argument("--after-s", type=float, default=60.0, help="seconds until memory is read the last time")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    if unknown := set(args.attacks.split(",")) - set(names):
        parser.error(f"unknown attacks {sorted(unknown)}; there are {names}")
    psutil.Process().cpu_affinity([int(LOAD_CORE)])
    rows = []
    for name in args.attacks.split(","):
        rows.append(row := {"attack": name, **one(name, args.proxy_python, args.after_s)})
        print(json.dumps(row), flush=True)
    print("\n" + table(rows))
    if args.json is not None:
        said = {"when": datetime.now(UTC).isoformat(timespec="seconds"), "load": os.getloadavg(), **describe_machine()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**said, "attacks": rows}, indent=1) + "\n")
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in markdown: seconds, and MiB before / peak / after."""
    heads = ("attack", "/healthz, longest s", "first token of another trial, longest s", "its statuses", "the attacker's",
             "MiB before / peak / after")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        sizes = " / ".join(f"{row[key] / MIB:.0f}" for key in ("rss_before", "rss_peak", "rss_after"))
        waits = (f"{row['healthz_s']:.2f}", f"{row['first_token_s']:.2f}")
        lines.append(f"| {' | '.join((row['attack'], *waits, str(row['victim']), str(row['attacker']), sizes))} |")
    return "\n".join(lines)


def one(name: str, python: str, after_s: float) -> dict[str, Any]:
    """One attack on a fresh proxy."""
    path, times, body = BODIES.get(name, ("", 0, bytes))
    data = body()
    with _deployment(python) as (url, pid, admin):
        proxy = psutil.Process(pid)
        headers, bystander = _agent(url, admin, "attacker"), _Bystander(url, _agent(url, admin, "bystander"))
        sizes = _Sizes(proxy)
        with sizes, bystander:
            time.sleep(2)  # what it costs when nobody attacks is in the same figures
            before = sizes.peak
            if name == "nothing":
                answers = Counter[str]()
                time.sleep(NOTHING_S)
            elif name == "sockets":
                answers = asyncio.run(_sockets(url))
            elif name == "groups":
                spec = {"group_id": "g", "run_id": "r", "size": GROUPS}
                answers = _posts(url + "/groups", admin, json.dumps(spec).encode(), 1)
            else:
                answers = _posts(f"{url}/attacker/{path}", headers, data, times)
            time.sleep(1)
        time.sleep(after_s)
        return {
            "healthz_s": round(bystander.healthz_s, 3), "first_token_s": round(bystander.first_token_s, 3),
            "victim": dict(bystander.statuses), "attacker": dict(answers),
            "rss_before": before, "rss_peak": sizes.peak, "rss_after": proxy.memory_info().rss,
        }  # fmt: skip


def _agent(url: str, admin: dict[str, str], trial: str) -> dict[str, str]:
    """Register a trial; the headers that its agent sends."""
    answer = httpx.post(f"{url}/sessions/{trial}", headers=admin, timeout=60).raise_for_status()
    return {"authorization": f"Bearer {answer.json()['api_key']}"}


@contextlib.contextmanager
def _deployment(python: str) -> Iterator[tuple[str, int, dict[str, str]]]:
    """A proxy with Redis and two workers: its URL, its pid, the admin's headers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    keys = {"STENO_ADMIN_KEY": "admin-key-of-the-benchmark", "STENO_WORKER_KEY": "worker-key-of-the-benchmark"}
    redis = RedisServer()
    try:
        with tempfile.TemporaryDirectory(prefix="steno-attacks-") as folder:
            root = Path(python).parents[2] if python != sys.executable else Path.cwd()
            command = [python, "-m", "steno", "proxy", "--port", str(port), "--redis-url", redis.url]
            log = Path(folder) / "proxy.log"
            given = keys | {"XDG_DATA_HOME": folder}  # for its archive; older releases have none
            headers = {"authorization": f"Bearer {keys['STENO_ADMIN_KEY']}"}
            worker = [
                sys.executable,
                "-m",
                "benchmarks.worker",
                "--proxy",
                f"ws://127.0.0.1:{port}",
                "--pace-s",
                "0.02",
            ]
            with contextlib.ExitStack() as stack:
                child = stack.enter_context(process(command, log, given, cwd=root))
                psutil.Process(child.pid).cpu_affinity([int(PROXY_CORE)])
                until(
                    lambda: httpx.get(url + "/healthz", timeout=60).status_code == 200, lambda: log.read_text()[-2000:]
                )
                for i in range(2):
                    worker_key = {"STENO_WORKER_KEY": keys["STENO_WORKER_KEY"], "STENO_WORKER_WORKER_ID": f"bench-{i}"}
                    stack.enter_context(process(worker, Path(folder) / f"worker-{i}.log", worker_key))
                until(
                    lambda: len(httpx.get(url + "/workers", headers=headers, timeout=60).json()["items"]) == 2,
                    "no workers",
                )
                yield url, child.pid, headers
    finally:
        redis.close()


class _Sizes:
    """The most resident bytes of a process seen while the block runs."""

    def __init__(self, child: psutil.Process) -> None:
        self.peak = child.memory_info().rss
        self._child = child
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.peak = max(self.peak, self._child.memory_info().rss)


class _Bystander:
    """Two clients in a process of their own: `/healthz`, and another trial's two tokens, back to back with a short pause."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._command = [sys.executable, "-m", "benchmarks.attacks_bystander", url, headers["authorization"]]
        self.healthz_s = self.first_token_s = 0.0
        self.statuses: Counter[str] = Counter()

    def __enter__(self) -> None:
        self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self._child.stdout.readline()  # it has asked once

    def __exit__(self, *exc: object) -> None:
        said, _ = self._child.communicate("stop\n", timeout=2 * ATTACK_TIMEOUT_S)
        found = json.loads(said)
        self.healthz_s, self.first_token_s = found["healthz_s"], found["first_token_s"]
        self.statuses = Counter(found["statuses"])


def _posts(url: str, headers: dict[str, str], data: bytes, times: int) -> Counter[str]:
    """The same request so many times at once; statuses, `timeout` and `closed` among them."""
    answers: Counter[str] = Counter()

    def post() -> None:
        try:
            with httpx.Client(timeout=ATTACK_TIMEOUT_S) as client:
                answer = client.post(url, content=data, headers={**headers, "content-type": "application/json"})
                answers[str(answer.status_code)] += 1
        except httpx.TimeoutException:
            answers["timeout"] += 1
        except httpx.TransportError:
            answers["closed"] += 1

    threads = [threading.Thread(target=post) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


async def _sockets(url: str) -> Counter[str]:
    """Strangers at the workers' socket, each with one large message; how their sockets ended."""
    ends: Counter[str] = Counter()
    message = b"\x00" * SOCKET_BYTES

    async def stranger() -> None:
        try:
            async with websockets.connect(url.replace("http", "ws") + "/workers/connect", max_size=None) as socket:
                await socket.send(message)
                await asyncio.wait_for(socket.recv(), 30)
                await asyncio.wait_for(socket.wait_closed(), 30)
                ends[str(socket.close_code)] += 1
        except websockets.ConnectionClosed as closed:
            ends[str(closed.rcvd.code if closed.rcvd else "closed")] += 1
        except (OSError, TimeoutError, websockets.InvalidHandshake) as error:
            ends[type(error).__name__] += 1

    await asyncio.gather(*(stranger() for _ in range(SOCKETS)))
    return ends


if __name__ == "__main__":
    sys.exit(main())

"""The load generator: many agents in one process, cheap enough to share a core with the engine it is fed by.

Owns raw asyncio protocols over uvloop that speak just enough HTTP/1.1 to send a request and read an answer. It counts
tokens by a marker (`MARK`) that every benchmark engine puts into each token's text, so that coalesced and separate
events are counted alike, and it never parses JSON. Prints one JSON object; times in seconds, on this process's clock.

    python -m benchmarks.load tiny    --url http://127.0.0.1:8080/{client}/v1/chat/completions --clients 64 --seconds 8
    python -m benchmarks.load streams --url … --clients 512 --tokens 128 --seconds 10
    python -m benchmarks.load session --url … --sessions 200 --turns 20 --concurrency 16 [--in-step --cpu-of PID]
    python -m benchmarks.load silent  --url … --clients 2000 --hold-pid-file PATH
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

MARK = b" tok"
RAMP_S = 0.5
_now = time.perf_counter


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time. `exchange` returns (status, body) when the answer is whole."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[tuple[int, bytes]] | None = None
        self.on_tokens: Callable[[int, float], None] | None = None
        self.keep_body = False
        self._reset()

    def _reset(self) -> None:
        self._head = b""
        self._in_head = True
        self._status = 0
        self._left = -1
        self._chunked = False
        self._tail = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_exception(exc or ConnectionError("closed before the answer was whole"))
        self.transport = None

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            self._in_head = False
            self._status = int(head[9:12])
            at = head.find(b"content-length:")
            if at >= 0:
                self._left = int(head[at + 15 :].split(b"\r\n", 1)[0])
            else:
                self._chunked = True
            if not data and self._left != 0:
                return
        if self.on_tokens is not None:
            seen = self._tail + data
            count = seen.count(MARK)
            if count:
                self.on_tokens(count, _now())
            # the marker may be split over two reads: keep what could be its beginning, which is too short to be counted
            self._tail = seen[-(len(MARK) - 1) :] if not seen.endswith(MARK) else b""
        if self.keep_body:
            self._body.append(data)
        if self._chunked:
            if data.endswith(b"0\r\n\r\n") and (len(data) == 5 or data[-7:-5] == b"\r\n"):
                self._finish()
        else:
            self._left -= len(data)
            if self._left <= 0:
                self._finish()

    def _finish(self) -> None:
        waiter, self._waiter = self._waiter, None
        status, body = self._status, b"".join(self._body)
        self._reset()
        if waiter and not waiter.done():
            waiter.set_result((status, body))

    async def exchange(self, raw: bytes) -> tuple[int, bytes]:
        assert self.transport is not None
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(raw)
        return await self._waiter


class Target:
    """A URL whose `{client}` is filled in per client, and how to open connections to it."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self.host, self.port, self.path, self.model = parts.hostname or "", parts.port or 80, parts.path, model

    async def connect(self) -> Connection:
        _, protocol = await asyncio.get_running_loop().create_connection(Connection, self.host, self.port)
        return protocol

    def request(self, client: str, body: dict[str, Any]) -> bytes:
        payload = json.dumps({"model": self.model, **body}).encode()
        path = self.path.replace("{client}", client)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer bench\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload


def percentile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0


async def tiny(target: Target, clients: int, seconds: float) -> dict[str, Any]:
    """Not streamed, one token each, back to back; one of each client at least."""
    done, failed, latencies = 0, 0, []
    until = _now() + seconds

    async def client(number: int) -> None:
        nonlocal done, failed
        raw = target.request(f"tiny{number}", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
        connection = await target.connect()
        first = True
        while (begun := _now()) < until or first:
            first = False
            try:
                status, _ = await connection.exchange(raw)
            except ConnectionError:
                failed += 1
                connection = await target.connect()
                continue
            if status == 200:
                done += 1
                latencies.append(_now() - begun)
            else:
                failed += 1
                await asyncio.sleep(0.05)

    begun = _now()
    await asyncio.gather(*(client(number) for number in range(clients)))
    elapsed = _now() - begun
    return {
        "requests": done,
        "failed": failed,
        "elapsed_s": elapsed,
        "requests_per_s": done / elapsed,
        "p50_s": percentile(latencies, 0.5),
        "p99_s": percentile(latencies, 0.99),
    }


async def streams(target: Target, clients: int, tokens: int, seconds: float) -> dict[str, Any]:
    """`clients` streams open at any time; each asks again when it has ended. Starts are spread over 0.2 s a hundred.

    The rate is taken while all of them run: from RAMP_S after the last start until no more are asked for. What happens before and
    after counts as well in everything else.
    """
    received, steady, failed, finished = 0, 0, 0, 0
    ttft, gaps = [], []
    begun = _now()
    until = begun + seconds
    since = min(begun + 0.002 * clients + RAMP_S, (begun + until) / 2)

    async def client(number: int) -> None:
        nonlocal received, failed, finished
        await asyncio.sleep(number * 0.002)
        connection: Connection | None = None
        turn = 0
        while _now() < until or turn == 0:  # one of each at least, however late this process gets to run
            if connection is None or connection.transport is None:
                connection = await target.connect()
            asked, last = _now(), 0.0

            def on_tokens(count: int, now: float) -> None:
                nonlocal received, steady, last
                received += count
                if since <= now < until:
                    steady += count
                if last:
                    gaps.append(now - last)
                else:
                    ttft.append(now - asked)  # noqa: B023 - called only while this request runs
                last = now

            connection.on_tokens = on_tokens
            turn += 1
            raw = target.request(
                f"s{number}-{turn}",
                {
                    "messages": [{"role": "user", "content": f"go {number} {turn}"}],
                    "max_tokens": tokens,
                    "stream": True,
                },
            )
            try:
                status, _ = await connection.exchange(raw)
                if status == 200:
                    finished += 1
                else:
                    failed += 1
                    await asyncio.sleep(0.05)
            except ConnectionError:
                failed += 1
                connection = None

    async def until_end() -> None:
        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        await asyncio.wait(tasks, timeout=seconds + 15)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    await until_end()
    elapsed = _now() - begun
    return {
        "tokens": received,
        "finished": finished,
        "failed": failed,
        "elapsed_s": elapsed,
        "tokens_per_s": steady / (until - since),
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p99_s": percentile(ttft, 0.99),
        "gap_p50_s": percentile(gaps, 0.5),
        "gap_p99_s": percentile(gaps, 0.99),
        "gap_max_s": max(gaps, default=0.0),
    }


async def session(
    target: Target, sessions: int, turns: int, concurrency: int, grow_bytes: int, in_step: bool, cpu_of: int
) -> dict[str, Any]:
    """Conversations that grow by `grow_bytes` a turn, every turn sending the whole history, as agents do.

    `in_step`: all take their first turn before one takes its second, so that the CPU of process `cpu_of` can be told by turn.
    """
    failed = 0
    by_turn: list[list[float]] = [[] for _ in range(turns)]
    histories: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": "You are a helpful agent."}] for _ in range(sessions)
    ]

    async def some(connection: Connection, number: int, first: int, last: int) -> None:
        nonlocal failed
        messages = histories[number]
        for turn in range(first, last):
            word = f"w{number}-{turn} "
            messages.append({"role": "user", "content": (word * (grow_bytes // len(word) + 1))[:grow_bytes]})
            raw = target.request(f"conv{number}", {"messages": messages, "max_tokens": 8})
            begun = _now()
            status, body = await connection.exchange(raw)
            by_turn[turn].append(_now() - begun)
            if status != 200:
                failed += 1
                return
            answer = json.loads(body[body.find(b"{") : body.rfind(b"}") + 1])
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    async def client(numbers: Iterator[int], first: int, last: int) -> None:
        connection = await target.connect()
        connection.keep_body = True
        for number in numbers:
            await some(connection, number, first, last)
        if connection.transport:
            connection.transport.close()

    begun = _now()
    cpu_ms: list[float] = []
    for first, last in [(turn, turn + 1) for turn in range(turns)] if in_step else [(0, turns)]:
        before = _thread_cpu_s(cpu_of)
        numbers = iter(range(sessions))
        await asyncio.gather(*(client(numbers, first, last) for _ in range(concurrency)))
        cpu_ms.append(1e3 * (_thread_cpu_s(cpu_of) - before) / (sessions * (last - first)))
    elapsed = _now() - begun
    return {
        "requests": sum(map(len, by_turn)),
        "failed": failed,
        "elapsed_s": elapsed,
        "p50_s_by_turn": [percentile(values, 0.5) for values in by_turn],
        "cpu_ms_by_turn": cpu_ms if in_step else [],
    }


def _thread_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, in nanosecond steps where /proc/PID/stat has ticks; 0.0 for process 0."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat") if pid else ()
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def silent(target: Target, clients: int, hold_s: float, ready: Path) -> dict[str, Any]:
    """Open streams whose first token never comes; says when all are open, holds them, closes."""
    raw_opened = 0
    connections: list[Connection] = []
    for number in range(clients):
        connection = await target.connect()
        assert connection.transport is not None
        connection.transport.write(
            target.request(
                f"idle{number}",
                {"messages": [{"role": "user", "content": "wait silently"}], "max_tokens": 8, "stream": True},
            )
        )
        connections.append(connection)
        if number % 50 == 49:
            await asyncio.sleep(0.1)
    await asyncio.sleep(hold_s / 2)
    raw_opened = sum(1 for connection in connections if connection.transport is not None)
    ready.write_text(str(raw_opened))  # noqa: ASYNC240 - nothing else has to run meanwhile
    await asyncio.sleep(hold_s / 2)
    alive = sum(1 for connection in connections if connection.transport is not None)
    for connection in connections:
        if connection.transport:
            connection.transport.abort()
    return {"asked": clients, "open": raw_opened, "open_at_end": alive}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["tiny", "streams", "session", "silent"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="bench")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--grow-bytes", type=int, default=2048)
    parser.add_argument("--in-step", action="store_true")
    parser.add_argument("--cpu-of", type=int, default=0)
    parser.add_argument("--hold-s", type=float, default=10.0)
    parser.add_argument("--ready", type=Path, default=Path("ready"))
    args = parser.parse_args()
    target = Target(args.url, args.model)
    cases = {
        "tiny": lambda: tiny(target, args.clients, args.seconds),
        "streams": lambda: streams(target, args.clients, args.tokens, args.seconds),
        "session": lambda: session(
            target, args.sessions, args.turns, args.concurrency, args.grow_bytes, args.in_step, args.cpu_of
        ),
        "silent": lambda: silent(target, args.clients, args.hold_s, args.ready),
    }
    print(json.dumps(uvloop.run(cases[args.case]())))


if __name__ == "__main__":
    main()

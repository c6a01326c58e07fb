"""Large bodies, each of them legal by its length, from one trial: refused by what they hold, and by what is in flight. Nobody
else waits for them, and their memory is given back. The proxy is a process of its own, with Redis and a scripted worker."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.contracts.chat import CanonicalRequest
from steno.contracts.errors import ContextOverflow
from steno_proxy.store.redis.store import RedisStore
from tests.integration.http.conftest import running as running_here
from tests.support.machine.redis_server import PATIENT
from tests.support.programs.processes import SLOW_S, until
from tests.support.programs.stack import ROOT, Stack, running
from tests.support.waiting import until as wait_until
from tests.support.workers.parrot import ParrotEngine, Say

CHAT = "/v1/chat/completions"
MB = 2**20
SCRIPT = 'def say(request):\n    return {"content": "one two three"}\n'
ATTACKERS, ROUNDS = 4, 3
ROOM_MB = 64
"""What the proxy may have grown by once everything is answered."""


def chat(messages: list[Any], **more: Any) -> bytes:
    return json.dumps({"messages": messages} | more).encode()


EMPTY = chat([{"role": "user", "content": ""}] * 700_000)
TOOLS = chat([{"role": "user", "content": "x"}], tools=[{"type": "function", "function": {"name": "f"}}] * 400_000)
LONG = chat([{"role": "user", "content": "alpha beta gamma, " * 1_000_000}])
MANY = chat([{"role": "user", "content": f"m{i}"} for i in range(30_000)])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("large")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    worker = ["--engine", "scripted", "--script", f"{script}:say", "--model", str(ROOT / "steno/models/tiny")]
    proxy = ["--redis-url", redis_url, "--trial-inflight-bytes", str(24 * MB), "--log-level", "warning"]
    with running(folder / "run", worker, proxy=proxy) as found:
        yield found


def memory_mb(stack: Stack, what: str = "VmRSS") -> int:
    status = Path(f"/proc/{stack.proxy.pid}/status").read_text()
    return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith(what))


def post(stack: Stack, trial_id: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}/{trial_id}{CHAT}", content=body, timeout=SLOW_S, **options)


def test_others_are_served_during_the_attack_and_memory_comes_back_after_it(stack: Stack) -> None:
    assert post(stack, "other", chat([{"role": "user", "content": "before"}])).status_code == 200
    before_mb = memory_mb(stack)
    answers: list[tuple[int, str]] = []

    def attack(name: str, body: bytes) -> None:
        for _ in range(ROUNDS):
            answer = post(
                stack, name, body
            )  # each as a trial of its own, or some are refused for the others' bytes alone
            answers.append((answer.status_code, answer.text))

    attackers = [
        threading.Thread(target=attack, args=(f"attacker-{i}", body))
        for i, body in enumerate((EMPTY, TOOLS, LONG, MANY))
    ]
    assert len(attackers) == ATTACKERS
    for attacker in attackers:
        attacker.start()
    served = []
    while any(attacker.is_alive() for attacker in attackers):
        served.append(post(stack, "other", chat([{"role": "user", "content": f"hi {len(served)}"}])).status_code)
        assert httpx.get(stack.url + "/healthz", timeout=SLOW_S).status_code == 200
        if len(served) == 1:
            first_after = len(answers)
    assert served and set(served) == {200}
    assert first_after < ATTACKERS * ROUNDS  # answered while the attack went on, and not after it
    assert {status for status, _ in answers} <= {200, 400, 413, 429}, answers
    for words in ("max_request_nodes is 40000", "maximum context length"):
        assert any(words in text for _, text in answers), words
    assert memory_mb(stack, "VmHWM") < before_mb + 700
    until(lambda: memory_mb(stack) < before_mb + ROOM_MB, lambda: f"{before_mb} MB became {memory_mb(stack)} MB")


def head(trial_id: str, framing: str) -> bytes:
    return f"POST /{trial_id}{CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{framing}\r\n\r\n".encode()


def test_bytes_in_flight_are_bounded_for_each_trial(stack: Stack) -> None:
    """A body that never fits is 413; one that does not fit beside another waits for its turn with 429; others don't."""
    never = post(stack, "a", b" " * (25 * MB))
    assert never.status_code == 413 and f"trial_inflight_bytes is {24 * MB}" in never.text
    with socket.create_connection(("127.0.0.1", stack.port), timeout=SLOW_S) as slow:
        slow.sendall(head("a", f"content-length: {20 * MB}") + b"{")  # counted by its declared length
        refused = until(
            lambda: _refused(post(stack, "a", b" " * (8 * MB))), "a second body was let in beside the first"
        )
        assert refused.headers["retry-after"] and "trial_inflight_bytes" in refused.text
        in_pieces = post(stack, "a", (b" " * MB for _ in range(8)))  # of no declared length: counted as it comes
        assert in_pieces.status_code == 429
        assert post(stack, "a", chat([{"role": "user", "content": "small"}])).status_code == 200
        assert post(stack, "b", b" " * (8 * MB)).status_code == 400  # another trial's is read, and is no JSON
    until(lambda: post(stack, "a", b" " * (8 * MB)).status_code == 400, "the first one's bytes were not given back")


def _refused(answer: httpx.Response) -> httpx.Response | None:
    return answer if answer.status_code == 429 else None


class Brief(ParrotEngine):
    """Says so little of its prompts that their length does not matter."""

    def prompt(self, request: Any) -> list[int]:
        return [1, 2, 3]


@pytest.mark.parametrize("how", ["answered", "refused"])
async def test_a_conversation_goes_with_its_request_and_waits_for_no_collector(how: str) -> None:
    gate = asyncio.Event()

    def say(request: Any) -> Say:
        asyncio.get_running_loop().call_later(0.3, gate.set)  # long enough for its client to be watched
        return Say("ok", gates={0: gate}, refuse=ContextOverflow("too long") if how == "refused" else None)

    async with running_here(ParrotEngine(say)) as proxy:
        gc.collect()
        gc.disable()
        try:
            size = 400_000 if how == "refused" else 300_000  # tells this request from those that failed tests hold
            answer = await proxy.chat("t", "x" * size)
            assert answer.status_code == (400 if how == "refused" else 200)
            await wait_until(lambda: not _held(size))
        finally:
            gc.enable()


def _held(size: int) -> list[CanonicalRequest]:
    found = (each for each in gc.get_objects() if isinstance(each, CanonicalRequest))
    return [each for each in found if size <= each.body_bytes < size + 10_000]


async def test_a_history_of_2000_messages_and_30_mb_of_images_passes_and_goes_on(redis_url: str) -> None:
    pixels = base64.b64encode(os.urandom(7_300_000)).decode()
    images = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixels[:-8]}AAAAAAA{letter}"}}
        for letter in "ABC"
    ]
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look"}, *images]}]
    for i in range(1_000):
        call = {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": "run", "arguments": json.dumps({"line": f"ls {i}"})},
        }
        history.append({"role": "assistant", "content": f"step {i}", "tool_calls": [call]})
        history.append({"role": "tool", "tool_call_id": f"c{i}", "content": f"[{i}], {{}}\n" * 20})
    engine = Brief(context_tokens=10**6, capabilities=["images"])
    async with running_here(engine, store=RedisStore(redis_url, **PATIENT)) as proxy:
        proxy.http.timeout = httpx.Timeout(SLOW_S)
        first = await proxy.chat("history", *history)
        assert first.status_code == 200, first.text
        history += [first.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]
        second = await proxy.chat("history", *history)
        assert second.status_code == 200, second.text
        one, other = await proxy.turns("history", 2)
    assert other.parent_id == one.turn_id and other.fork_reason is None
    assert one.messages == history[:2001] and len(other.messages) == 1

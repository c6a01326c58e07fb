"""What waits for a vLLM server's tokenizer waits neither for ever nor after its turn is over, and what a server is known by."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from steno.contracts.errors import EngineFailed
from steno_worker.engines.vllm_server import format as format_module
from steno_worker.engines.vllm_server.format import ServerFormat


class Server:
    """Tokenises by letters, after a header with the date; never answers for what begins with `slow`."""

    def __init__(self, date: str = "27 Nov 2026", closer: str = "<end>") -> None:
        self.date = date
        self.closer = closer
        self.asked: list[str] = []
        self.broken_off: list[str] = []

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        if "messages" in body:
            said = "".join(f"<user>{message['content']}{self.closer}" for message in body["messages"])
            text = f"Today is {self.date}.{said}<assistant>"
        else:
            text = body["prompt"]
        self.asked.append(text)
        if text.startswith("slow"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.broken_off.append(text)
                raise
        return {"tokens": [ord(letter) for letter in text], "token_strs": list(text)}


async def test_a_cancelled_turn_leaves_the_line_of_prompts_to_the_others() -> None:
    server, thread = Server(), ThreadPoolExecutor(1)
    format = ServerFormat(server, "m", asyncio.get_running_loop())  # type: ignore[arg-type]
    slow = asyncio.create_task(format.waits.run(thread, format.encode, "slow"))
    while not server.asked:
        await asyncio.sleep(0.001)
    waiting = asyncio.create_task(format.waits.run(thread, format.encode, "slow too"))
    other = asyncio.create_task(format.waits.run(thread, format.encode, "ab"))
    await asyncio.sleep(0.01)
    assert not other.done()
    waiting.cancel()
    slow.cancel()
    assert await asyncio.wait_for(other, 30) == [97, 98]
    assert server.asked == ["slow", "ab"] and server.broken_off == ["slow"]
    assert slow.cancelled() and waiting.cancelled()
    thread.shutdown()


async def test_a_tokenizer_that_does_not_answer_fails_the_turn_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_module, "TOKENIZE_S", 0.05)
    server, thread = Server(), ThreadPoolExecutor(1)
    format = ServerFormat(server, "m", asyncio.get_running_loop())  # type: ignore[arg-type]
    slow = format.waits.run(thread, format.encode, "slow")
    other = format.waits.run(thread, format.encode, "ab")
    failed, ids = await asyncio.wait_for(asyncio.gather(slow, other, return_exceptions=True), 30)
    assert isinstance(failed, EngineFailed) and "did not answer /tokenize within 0.05 s" in failed.message
    assert ids == [97, 98] and server.broken_off == ["slow"]
    thread.shutdown()


async def digest_of(server: Server, stop_ids: frozenset[int] = frozenset()) -> str:
    format = ServerFormat(server, "m", asyncio.get_running_loop())  # type: ignore[arg-type]
    format.stop_ids = stop_ids
    return await asyncio.to_thread(format.digest)


async def test_a_template_that_writes_the_date_is_the_same_tomorrow() -> None:
    assert await digest_of(Server()) == await digest_of(Server(date="28 Nov 2026, ok?"))


FLAT = '{"a": ' + "[" * 700 + "]" * 700 + ', "b": "\\"' + "[{" * 1000 + '"}'


async def test_what_continuing_depends_on_makes_another_digest() -> None:
    same = await digest_of(Server())
    assert same != await digest_of(Server(closer="<eot>"))
    assert same != await digest_of(Server(), frozenset({7}))


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ('{"a": ' + "[" * 1200, "{}"),
        ('{"a": ' + "[" * 750 + "]" * 750 + "}", "{}"),
        (FLAT, FLAT),
        ('{"n": ' + "1" * 5000 + "}", "{}"),
        ('{"a": [', '{"a": ['),
        ('{"a": [1]}', '{"a": [1]}'),
    ],
)
def test_a_call_that_the_server_can_t_read_has_no_arguments(arguments: str, sent: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    said = format_module.in_vllm_words(message)
    assert said["tool_calls"] == [{**call, "function": {"name": "f", "arguments": sent}}]
    assert said["reasoning"] == "hm" and "reasoning_content" not in said
    assert call["function"] == {"name": "f", "arguments": arguments}

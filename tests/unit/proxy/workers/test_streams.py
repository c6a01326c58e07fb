"""A stream's mailbox: what has arrived is taken in order, and credit for it given back, whatever it holds."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.chat import Sampling
from steno.contracts.errors import EngineFailed, ProtocolError
from steno.contracts.records import floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Cancel, Credit, Delta, ModelCard, Started
from steno_proxy.workers.stream import Stream


def stream(window_tokens: int) -> tuple[Stream, list[Any]]:
    """One that has begun, and what it has sent."""
    sent: list[Any] = []
    found = Stream(1, "w", ModelCard("m", 1000), window_tokens, 0, sent.append, lambda number: None)
    found.deliver(Started(1, 0, ids_to_bytes([1]), 1, b"", Sampling()))
    return found, sent


def delta(tokens: int = 0, content: str = "x") -> Delta:
    return Delta(1, ids_to_bytes([7] * tokens), floats_to_bytes([-0.5] * tokens), "run/1", content)


async def test_text_without_a_token_takes_credit_and_gives_it_back() -> None:
    """As text does that was held back, at the end of a window: its worker would wait for ever."""
    mine, sent = stream(4)
    for event in (delta(), delta(), delta(2)):
        mine.deliver(event)
    with pytest.raises(ProtocolError, match="more tokens than the stream's credit"):
        mine.deliver(delta())
    assert len(await mine.next()) == 4
    assert sent == [Credit(1, 4)]
    mine.deliver(delta(4))


async def test_what_had_arrived_comes_before_the_failure() -> None:
    """I4: it was sampled, and is of the turn."""
    mine, _ = stream(100)
    mine.deliver(delta(1))
    mine.fail(EngineFailed("gone"))
    assert [type(event) for event in await mine.next()] == [Started, Delta]
    with pytest.raises(EngineFailed):
        await mine.next()


async def test_what_was_put_back_comes_first_again() -> None:
    mine, sent = stream(100)
    mine.deliver(delta(1, "a"))
    first, *others = await mine.next()
    assert type(first) is Started
    mine.put_back(others)
    mine.deliver(delta(1, "b"))
    mine.cancel("the client left")
    assert [event.content for event in mine.leftover() if type(event) is Delta] == ["a", "b"]
    assert sent == [Cancel(1, "the client left")]

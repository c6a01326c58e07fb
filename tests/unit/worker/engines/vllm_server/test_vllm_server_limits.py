"""What ends the engine of a vLLM server, or is changed there in silence, is refused by field and never sent (I1, I8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest, EngineFailed
from steno.contracts.records import ids_to_bytes
from steno.contracts.wire.frames import Generate
from steno_worker.chat.check import FormatReport
from steno_worker.chat.fold import MessageFolding
from steno_worker.chat.prompt import PromptRenderer
from steno_worker.engines.vllm_server.engine import VllmServerEngine
from steno_worker.engines.vllm_server.format import ServerFormat
from steno_worker.engines.vllm_server.limits import check_law

STOPS = frozenset({900, 901})
WORDS = [f"w{number:03}" for number in range(129)]


class Server:
    """Tokenises each word of four letters as four tokens, another one with a space in front; keeps what it is asked to sample."""

    def __init__(self) -> None:
        self.sampled: list[dict[str, Any]] = []

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        text = body["prompt"]
        return {"tokens": [ord(letter) for letter in (text[0] + text[2:] if text[0] == " " else text)]}

    async def stream(self, path: str, body: dict[str, Any], trial_id: str) -> AsyncIterator[dict[str, Any]]:
        self.sampled.append(body)
        for event in ():
            yield event


async def asked(law: Sampling) -> Server:
    """Raises: BadRequest; EngineFailed: it was sent, and this server answers nothing."""
    server = Server()
    engine = VllmServerEngine(server, "m", policy="p", context_tokens=None, max_streams=2)  # type: ignore[arg-type]
    format = ServerFormat(server, "m", asyncio.get_running_loop())  # type: ignore[arg-type]
    format.stop_ids = STOPS
    engine._format, engine._prompter = format, PromptRenderer(format, FormatReport(MessageFolding()))
    engine._card.context_tokens = 1000
    job = Job(prompt_ids=ids_to_bytes([1, 2]), sampling=law)
    try:
        async for _ in engine.generate(Generate(stream=1, turn_id="t", attempt=1, trial_id="x", job=job)):
            pass
    except BadRequest:
        assert not server.sampled
        raise
    except EngineFailed:
        pass
    return server


@pytest.mark.parametrize(
    ("law", "field", "said"),
    [
        (Sampling(temperature=0.005), "temperature", "got 0.005, must be 0 or at least 0.01"),
        (Sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias", "got 1025 ids, must be at most 1024"),
        (Sampling(allowed_token_ids=list(range(1025))), "allowed_token_ids", "got 1025 ids, must be at most 1024"),
        (
            Sampling(stop_token_ids=list(range(111)), min_tokens=1),
            "stop_token_ids",
            "got 111 ids, 113 with the model's own; must be at most 112 in all",
        ),
        (Sampling(bad_words=WORDS), "bad_words", "got 1032 tokens in all, must be at most 1024"),
    ],
)
async def test_what_a_vllm_servers_engine_dies_of_or_changes_is_refused_before_it_is_sent(
    law: Sampling, field: str, said: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        await asked(law)
    assert refused.value.field == field and said in refused.value.message


@pytest.mark.parametrize(
    "law",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.01),
        Sampling(logit_bias=dict.fromkeys(range(1024), 1.0)),
        Sampling(allowed_token_ids=list(range(1024))),
        Sampling(stop_token_ids=list(range(128))),
        Sampling(stop_token_ids=[*range(110), *STOPS], min_tokens=1),
        Sampling(bad_words=[*WORDS[:128], WORDS[0]]),
    ],
)
async def test_what_a_vllm_servers_engine_takes_is_sent(law: Sampling) -> None:
    assert len((await asked(law)).sampled) == 1


def test_an_engine_of_ones_own_is_known_to_the_last_stop_id() -> None:
    check_law(Sampling(stop_token_ids=list(range(126)), min_tokens=1), STOPS)
    with pytest.raises(BadRequest, match="got 127 ids, 129 with the model's own; must be at most 128"):
        check_law(Sampling(stop_token_ids=list(range(127)), min_tokens=1), STOPS)

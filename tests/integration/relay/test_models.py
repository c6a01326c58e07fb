"""Which of a worker's models a turn goes to: said with each Generate."""

from __future__ import annotations

import pytest

from steno.contracts.records import tokenizer_key
from steno.contracts.wire.frames import Generate, ModelCard
from steno_proxy.workers.placement import Order, PromptPrefix
from steno_proxy.workers.routing import NoTokenizer
from tests.integration.relay.conftest import drain, relay
from tests.support.workers.counting import CountingEngine, job


class TwoModels(CountingEngine):
    """Announces two models, and keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.before = lambda request: self.note(request)

    def note(self, request: Generate) -> None:
        self.asked.append(request.model)

    def cards(self) -> list[ModelCard]:
        return [
            ModelCard("judge", 99, policy="frozen", tokenizer_digest="j"),
            ModelCard("actor", 99, tokenizer_digest="a"),
        ]


async def test_a_worker_with_several_models_is_told_which() -> None:
    engine = TwoModels()
    async with relay() as running:
        await running.worker(engine)
        for number, name in enumerate(["judge", "actor", "gpt-5", ""]):
            stream = running.hub.open(Order("t", f"{number:012x}", job(1), model=name))
            await drain(stream)
            assert stream.card.name == engine.asked[-1]
    assert engine.asked == ["judge", "actor", "actor", "actor"]


async def test_recorded_ids_go_to_their_tokenizer_or_nowhere() -> None:
    async with relay() as running:
        await running.worker(TwoModels())
        stream = running.hub.open(
            Order("t", "0" * 12, job(1), model="judge", prefix=PromptPrefix(tokenizer=tokenizer_key("j")))
        )
        assert stream.card.name == "judge"
        await drain(stream)
        with pytest.raises(NoTokenizer):
            running.hub.open(
                Order("t", "1" * 12, job(1), model="gpt-5", prefix=PromptPrefix(tokenizer=tokenizer_key("j")))
            )

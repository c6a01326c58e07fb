"""A choice of the proxy that runs without a proxy: it is told what a worker says, and its record is looked at."""

from __future__ import annotations

from steno.contracts.chat import CanonicalRequest, Job, Sampling
from steno.contracts.errors import StenoError
from steno.contracts.records import Turn, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish, ModelCard, Started
from steno_proxy.pace import Pace
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.turns.choice import OpenChoice
from steno_proxy.turns.continuation import plan
from steno_proxy.turns.transcript import ChoiceTranscript
from steno_proxy.turns.turn_record import TurnFacts
from steno_proxy.workers.placement import Order
from steno_proxy.workers.stream import Stream

CARD = ModelCard("m", 1000)
TURN = "0123456789ab"


class Said:
    """A choice, and the store that it goes to. Each attempt has a stream of its own."""

    def __init__(self, choice: OpenChoice, store: MemoryStore) -> None:
        self.choice, self.store = choice, store

    @classmethod
    async def begin(cls, store: MemoryStore | None = None) -> Said:
        store = store or MemoryStore()
        recorder = Recorder(store, cache_bytes=2**20, implicit=True)
        recording = await recorder.enter("trial")
        asked = CanonicalRequest("chat", "m", Job(messages=[{"role": "user", "content": "hi"}]))
        found = await plan(recorder, recording, asked.job, Pace())
        transcript, facts = ChoiceTranscript(TURN, "call", CARD), TurnFacts(asked, {}, 1.0)
        order = Order("trial", TURN, asked.job)
        return cls(OpenChoice(recorder, recording, 0, order, stream(), transcript, facts, found), store)

    def hear(self, *events: Delta | Finish) -> None:
        started = Started(1, 0, ids_to_bytes([1]), 1, b"", Sampling())
        for event in (started, *events):
            self.choice.stream.deliver(event)
            self.choice.transcript.take(event)

    async def turns(self, error: StenoError | None = None) -> list[Turn]:
        await self.choice.committed(error)
        return list(await self.store.turns("trial"))


def stream() -> Stream:
    return Stream(1, "w", CARD, 100, 0, lambda frame: None, lambda number: None)

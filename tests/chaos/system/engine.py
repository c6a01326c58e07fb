"""A worker as a process whose engine says what `chaos/predict.py` says, with weights that are nothing but their version.

python -m tests.chaos.system.engine --proxy ws://127.0.0.1:8000 --proxy ws://127.0.0.1:8001 --worker-id w0 --pace-s 0.005
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import uvloop

from steno.contracts.chat import Job, ToolCallPiece
from steno.contracts.errors import EngineFailed
from steno.contracts.records import bytes_to_ids, floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import TAKEOVER, Delta, Finish, Generate, ModelCard, Started, StreamEvent
from steno_worker import main as worker
from steno_worker.config import WorkerSettings
from steno_worker.interfaces import StagedUpdate, TokenTally
from tests.chaos.journal import Journal
from tests.chaos.mutants import WORKER_MUTANTS
from tests.chaos.predict import BASE_VERSION, Token, answer, logprob, prompt_digest, render, resumable, slowness
from tests.chaos.schedule import MODELS

POLICIES = {MODELS[0]: "default", MODELS[1]: "other"}
PAUSE_S = 0.02
"""An update stands still for so long."""


class PredictableEngine:
    """An `Engine`. Args: pace_s: between two tokens of a stream that is not slow. journal: of what it samples. model: of
    MODELS."""

    def __init__(self, pace_s: float, journal: Journal | None = None, model: str = MODELS[0]) -> None:
        self._journal = journal
        self.tally = TokenTally()
        self._pace_s = pace_s
        self._running = 0
        self._going = asyncio.Event()
        self._going.set()
        self._card = ModelCard(
            model, 1_000_000, policy_version=BASE_VERSION, tokenizer_digest=f"characters of {model}", policy=POLICIES[model],
            capabilities=["tools", "logprobs", "reasoning", "cancel", TAKEOVER],
        )  # fmt: skip

    def cards(self) -> list[ModelCard]:
        return [self._card]

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def load(self) -> tuple[int, int, float]:
        return self._running, 0, 0.0

    async def count(self, job: Job) -> int:
        return len(render(job.messages, self._card.name))

    def checkpoint(self) -> Path | None:
        return None

    async def load_weights(self, update: StagedUpdate) -> float:
        self._going.clear()
        await asyncio.sleep(PAUSE_S)
        self._card = msgspec.structs.replace(self._card, policy_version=update.version)
        self._going.set()
        return PAUSE_S

    async def score(self, token_ids: list[int]) -> list[float]:
        return [
            logprob(prompt_digest(token_ids[:end]), 0, self._card.policy_version) for end in range(1, len(token_ids))
        ]

    async def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        before = bytes_to_ids(request.sampled_ids).tolist()
        new = [] if before else render(request.job.messages[request.prefix_messages :], self._card.name)
        digest = prompt_digest(request.prefix_ids, new)
        kept = len(request.prefix_ids) // 4
        law = request.job.sampling
        yield Started(
            request.stream, kept, ids_to_bytes(new), kept + len(new), digest, law, resumable=resumable(digest)
        )
        tokens = answer(digest)
        if [token.id for token in tokens[: len(before)]] != before:
            raise EngineFailed("asked to go on after ids that it never sampled")
        if before and not resumable(digest):
            raise EngineFailed("asked to go on with what can't be gone on with")
        self._running += 1
        try:
            sampled, index = 0, sum(bool(token.call) for token in tokens[: len(before)]) - 1
            for position in range(len(before), len(tokens)):
                await asyncio.sleep(self._pace_s * slowness(digest))
                await self._going.wait()
                token = tokens[position]
                index += bool(token.call)
                self.tally.sampled += 1
                if self._journal is not None:
                    version = self._card.policy_version
                    self._journal.note(request.trial_id, request.turn_id, request.attempt, position, token.id, version)
                yield self._delta(request.stream, token, digest, position, index)
                sampled += 1
            reason = "tool_calls" if any(token.call for token in tokens) else "stop"
            yield Finish(request.stream, reason, sampled)  # type: ignore[arg-type]
        finally:
            self._running -= 1

    def _delta(self, stream: int, token: Token, digest: bytes, position: int, index: int) -> Delta:
        version = self._card.policy_version
        pieces = []
        if token.call or token.arguments:
            pieces = [ToolCallPiece(index, token.arguments, "", token.call)]
        return Delta(
            stream, ids_to_bytes([token.id]), floats_to_bytes([logprob(digest, position, version)]), version,
            content=token.content, reasoning=token.reasoning, tool_calls=pieces,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proxy", action="append", required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--pace-s", type=float, default=0.005)
    parser.add_argument("--drain-s", type=float, default=1.0)
    parser.add_argument("--journal", type=Path, help="file for what is sampled")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--mutant", default="-", help="one of `chaos/mutants.py`")
    args = parser.parse_args()
    WORKER_MUTANTS.get(args.mutant, lambda: None)()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    given = {
        "proxy": args.proxy, "worker_id": args.worker_id, "max_streams": 8, "drain_s": args.drain_s, "max_backoff_s": 0.5,
    }  # fmt: skip
    journal = Journal(args.journal, args.worker_id) if args.journal else None
    return uvloop.run(worker.run(WorkerSettings.load(given, None), PredictableEngine(args.pace_s, journal, args.model)))


if __name__ == "__main__":
    sys.exit(main())

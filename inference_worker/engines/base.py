"""Two seams of the worker.

`Engine` is what the relay client runs: a job in, stream events out. `TokenEngine` is what samples ids; `inference_worker/job.py`
makes an `Engine` of a `TokenEngine` and a `ChatFormat`, so that rendering, continuation, stop strings and parsing are
written once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from proxy.contracts.canonical import Job, Sampling
from proxy.contracts.frames import Generate, ModelCard, StreamEvent


@dataclass(slots=True)
class TokenStep:
    """Ids sampled since the last step, all by the same policy version.

    logprobs: per id, float; None only from synthetic engines. top: per id, alternatives [(id, logprob)] best first, or None.
    finish: "stop" (the last id is a stop id), "length", or None while it goes on.
    constrained: a grammar was active for these ids.
    """

    ids: list[int]
    logprobs: list[float] | None
    version: str
    finish: Literal["stop", "length"] | None = None
    top: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0
    constrained: bool = False
    timings: dict[str, float] = field(default_factory=dict)


class TokenEngine(Protocol):
    """Samples tokens. Ids in, ids out; batches concurrent requests itself."""

    def card(self) -> ModelCard: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def load(self) -> tuple[int, int, float]:
        """(running, waiting, fraction of KV cache used). Raises: EngineFailed: once the engine is dead."""
        ...

    def constrains(self, job: Job) -> bool:
        """Whether a grammar will be active for this job."""
        ...

    def sample(self, request_id: str, prompt_ids: list[int], law: Sampling, job: Job) -> AsyncIterator[TokenStep]:
        """Closing the iterator cancels. `law.max_tokens` is set and already clamped to the context; `law.stop` is not this
        seam's business (job.py matches stop strings); stop ids are the format's and the law's.

        Raises: StenoError (BadRequest for what can't be honoured, EngineFailed when the engine dies).
        """
        ...


class Engine(Protocol):
    """What the relay client runs."""

    def cards(self) -> list[ModelCard]: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def load(self) -> tuple[int, int, float]:
        """As TokenEngine.load. Asked with every heartbeat and after a failed generation: how the worker learns of a death."""
        ...

    async def count(self, job: Job) -> int:
        """Tokens of the prompt, rendered whole: what `generate` would give to the engine with nothing to continue.

        Raises: BadRequest: the template refuses.
        """
        ...

    def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        """One Started, then Deltas, one Finish. Closing the iterator cancels. Raises StenoError."""
        ...


__all__ = ["Any", "Engine", "TokenEngine", "TokenStep"]

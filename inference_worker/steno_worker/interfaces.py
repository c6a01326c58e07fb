"""Two seams of the worker.

`Engine` is what the relay client runs: a job in, stream events out. `TokenEngine` is what samples ids;
`steno_worker/chat/chat_engine.py` makes an `Engine` of a `TokenEngine` and a `ChatFormat`, so that rendering, continuation, stop
strings and parsing are written once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest, EngineFailed, StenoError
from steno.contracts.policy import UpdateSpec
from steno.contracts.wire.frames import Count, Counted, Generate, ModelCard, StreamEvent

MAX_STREAMS = 64
"""Generations at once, where neither the settings nor the engine say."""


@dataclass(slots=True)
class TokenStep:
    """Ids sampled since the last step, all by the same policy version.

    logprobs: per id, float; None only from synthetic engines. top: per id, alternatives [(id, logprob)] best first, or None.
    finish: "stop" (the last id is a stop id), "length", or None while it goes on.
    constrained: a grammar was active for these ids.
    mixed_kv: some of the cache that these ids were sampled with may be of older weights than `version` (`kv: keep`).
    """

    ids: list[int]
    logprobs: list[float] | None
    version: str
    finish: Literal["stop", "length"] | None = None
    top: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0
    constrained: bool = False
    mixed_kv: bool = False
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class TokenTally:
    """Ids since the engine's start (I4): sampled = sent by the worker + unsent + what is on its way between the two.

    sampled: counted where the engine hands ids out, also those of generations that it has dropped.
    unsent: by reason. "cancelled": the generation was, before the ids were taken; "after_end": the completion ended within the
        step, as at a stop string; "withheld": the weights were not proved when the generation ended; "failed": can't be read.
    """

    sampled: int = 0
    unsent: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """Weights that lie where this machine can read them, complete and verified against the manifest's digests.

    folder: of the safetensors shards that `spec.manifest` names (`nccl`: of no meaning).
    """

    update_id: str
    spec: UpdateSpec
    folder: Path

    @property
    def version(self) -> str:
        return self.spec.version


def ended_by_engine(reason: str, *, grammar: bool) -> StenoError:
    """The error of a completion that the engine ended by itself, for a reason other than `stop` and `length`.

    Under a grammar the request is to blame: vLLM ends a request whose tokens its grammar refuses, as every other engine would.
    The error is then not a 503, after which clients would send the request again.
    """
    if grammar:
        return BadRequest(
            f"the engine ended this request with {reason!r}: it can't continue under the grammar of the response format or the "
            "tools"
        )
    return EngineFailed(f"the engine ended this request with {reason!r}")


class TokenEngine(Protocol):
    """Samples tokens. Ids in, ids out; batches concurrent requests itself."""

    @property
    def tally(self) -> TokenTally: ...
    def card(self) -> ModelCard: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def load(self) -> tuple[int, int, float]:
        """(running, waiting, fraction of KV cache used). Raises: EngineFailed: once the engine is dead."""
        ...

    def constrains(self, job: Job) -> bool:
        """Whether a grammar will be active for this job."""
        ...

    def checkpoint(self) -> Path | None:
        """The folder of safetensors files that it was started from, which `load_weights` takes too; None: there is none."""
        ...

    async def load_weights(self, update: StagedUpdate) -> float:
        """Take on weights whose shards have been checked; generations in flight stand still meanwhile and go on under the
        new version. Ids sampled after it carry `update.version`. All or nothing: refused weights leave the old ones serving.

        Returns: seconds for which nothing was sampled. Raises: WeightsRefused: they are not this model's; EngineFailed.
        """
        ...

    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of token_ids[1:], each given those before it, at temperature 1, by the weights now loaded.

        Waits for a full engine without a limit: the caller sets a timeout.
        """
        ...

    async def check(self, prompt_ids: list[int], law: Sampling, job: Job) -> None:
        """Refuse what `sample` would refuse, before `Started` is sent. `law` is the one that `sample` will get.

        Raises: BadRequest, ContextOverflow.
        """
        ...

    def sample(
        self, request_id: str, prompt_ids: list[int], law: Sampling, job: Job, *, trial_id: str = ""
    ) -> AsyncIterator[TokenStep]:
        """Sample a completion of the prompt. Closing the iterator cancels it. trial_id: an engine with several caches keeps a
        trial's turns at one of them; "": no trial. `law.max_tokens` is set and already clamped to the context. The engine ignores
        `law.stop` (`chat/reader.py` matches stop strings), and stops at the stop ids of the format and of the law.

        Raises: StenoError (BadRequest for what can't be honoured, EngineFailed when the engine dies).
        """
        ...


class Engine(Protocol):
    """What the relay client runs."""

    @property
    def tally(self) -> TokenTally: ...
    def cards(self) -> list[ModelCard]: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def load(self) -> tuple[int, int, float]:
        """As TokenEngine.load. Called at each heartbeat and after a failed generation: so the worker learns of a dead engine."""
        ...

    async def count(self, job: Job) -> int:
        """Tokens of the prompt, rendered whole: what `generate` would give to the engine with nothing to continue.

        Raises: BadRequest: the template refuses. ContextOverflow: the prompt is known to be too long before it is counted.
        """
        ...

    async def tokenize(self, asked: Count) -> Counted:
        """Answer what `asked.wants` about the prompt, or about the given ids. Called only if the card has TOKENIZES.

        Raises: BadRequest: also from an engine without token ids. BodyTooLarge: the answer would be too large. Else as `count`.
        """
        ...

    def checkpoint(self) -> Path | None:
        """As TokenEngine.checkpoint."""
        ...

    async def load_weights(self, update: StagedUpdate) -> float:
        """As TokenEngine.load_weights. Raises WeightsRefused from engines that have no weights of their own."""
        ...

    async def score(self, token_ids: list[int]) -> list[float]:
        """As TokenEngine.score."""
        ...

    def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        """One Started, then Deltas, one Finish. Closing the iterator cancels. Raises StenoError."""
        ...

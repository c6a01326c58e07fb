"""Whether an engine's log-probabilities of a probe are the trainer's (I10)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import NamedTuple

from steno.contracts.errors import EngineFailed, WeightsRefused
from steno.contracts.policy import Probe
from steno.contracts.wire.frames import ModelCard
from steno_worker.interfaces import Engine

QUANTILE = 0.9


async def score_in_time(engine: Engine, token_ids: list[int], timeout_s: float) -> list[float]:
    """`Engine.score`. An engine that is full lets the probe wait behind all that agents have asked for.

    Raises: EngineFailed: no answer by then, and whatever `score` raises.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await engine.score(token_ids)
    except TimeoutError as error:
        raise EngineFailed(f"probe: the engine did not score it within {timeout_s:g} s; is it full?") from error


class LogprobDistance(NamedTuple):
    """Absolute differences of log-probabilities, in nats. p90: the smallest that nine tenths of them do not exceed."""

    mean: float
    p90: float
    largest: float

    @classmethod
    def between(cls, ours: Sequence[float], theirs: Sequence[float]) -> LogprobDistance:
        """Args: as many of each, at least one, all finite."""
        off = sorted(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        return cls(math.fsum(off) / len(off), off[math.ceil(QUANTILE * len(off)) - 1], off[-1])


def check_ids(probe: Probe, card: ModelCard) -> None:
    """Check that the model can score the probe, with one token of room, which vLLM samples. Raises: WeightsRefused."""
    ids = probe.token_ids
    if len(ids) >= card.context_tokens:
        raise WeightsRefused(
            f"probe.token_ids: got {len(ids)} tokens, this worker's context is {card.context_tokens}, one of them for an answer "
            "(the trainer's setting is probe_tokens)",
            field="probe.token_ids",
        )
    wrong = next((id_ for id_ in ids if not 0 <= id_ < (card.vocabulary_size or math.inf)), None)
    if wrong is not None:
        raise WeightsRefused(
            f"probe.token_ids: got token id {wrong}, this worker's vocabulary has {card.vocabulary_size} tokens",
            field="probe.token_ids",
        )


def check_numbers(logprobs: Sequence[float]) -> None:
    """Check that log-probabilities are finite. Raises: WeightsRefused: some are NaN or infinite, as broken weights give."""
    if not all(map(math.isfinite, logprobs)):
        raise WeightsRefused(
            "probe: with these weights the engine's log-probabilities are NaN or infinite", field="probe"
        )


def compare(probe: Probe, logprobs: Sequence[float]) -> LogprobDistance:
    """Compare an engine's log-probabilities with the probe's. Args: logprobs: as the engine scored `probe.token_ids[1:]`.

    Raises: EngineFailed: not one per token. WeightsRefused: further away than the probe lets pass, or no numbers; says how far,
    and names the trainer's setting.
    """
    if len(logprobs) != len(probe.logprobs):
        raise EngineFailed(f"probe: the engine scored {len(logprobs)} tokens of {len(probe.logprobs)}")
    check_numbers(logprobs)
    distance = LogprobDistance.between(logprobs, probe.logprobs)
    limits = LogprobDistance(probe.mean_tolerance or math.inf, probe.p90_tolerance or math.inf, probe.tolerance)
    if any(off > limit for off, limit in zip(distance, limits, strict=True)):
        places = ("on average", "at the 90th percentile", "at most")
        said = ", ".join(
            f"by {off:.4g} {where} ({limit:.4g} allowed)" if limit < math.inf else f"by {off:.4g} {where}"
            for off, limit, where in zip(distance, limits, places, strict=True)
        )
        raise WeightsRefused(
            f"probe: log-probabilities differ {said}; the trainer's setting is probe_tolerance, and its default is for engines "
            "that compute in the trainer's precision",
            field="probe",
        )
    return distance

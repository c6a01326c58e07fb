"""vLLM's outputs as the worker's steps: every id with its log-probability (I1) and the version that sampled it (I10).

Knows the shape of vLLM's output and nothing of when it comes. An output that leaves one of the two out is an error.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from steno.contracts.errors import EngineFailed
from steno_worker.interfaces import TokenStep, ended_by_engine


class VersionSpans:
    """Which version sampled which token of one request, known as the tokens come.

    vLLM reports spans with the final output only. The starts of them are kept in the request's state, a list that
    only grows; a request whose first output is also its last has no state any more, but has its spans.
    """

    def __init__(self, llm: AsyncLLM, request_id: str) -> None:
        self._processor = llm.output_processor
        self._request_id = request_id
        self._starts: list[tuple[str, int]] | None = None
        self._state: Any = None  # vLLM's of this request
        self._sent = 0

    def take(self, output: CompletionOutput) -> list[tuple[str, int]]:
        """(version, tokens) of the next `len(output.token_ids)` tokens, in order; a token without a version is an error."""
        if self._starts is None:
            self._starts = self._find(output)
        start, end = self._sent, self._sent + len(output.token_ids)
        self._sent = end
        taken: list[tuple[str, int]] = []
        ends = [first for _, first in self._starts[1:]] + [end]
        for (version, first), last in zip(self._starts, ends, strict=True):
            count = min(last, end) - max(first, start)
            if count > 0:
                taken.append((version, count))
        if sum(count for _, count in taken) != end - start:
            raise EngineFailed("the engine gave no weight version for a token")
        return taken

    def _find(self, output: CompletionOutput) -> list[tuple[str, int]]:
        if output.weight_versions is not None:
            return [(span.version, span.start) for span in output.weight_versions]
        for internal in self._processor.external_req_ids.get(self._request_id, ()):
            self._state = self._processor.request_states[internal]
            starts: list[tuple[str, int]] = self._state.weight_version_starts
            return starts
        return []

    def sampled(self) -> int:
        """Tokens that have come from the engine, those that wait to be taken among them."""
        return self._sent if self._state is None else self._state.detokenizer.num_output_tokens()


def steps_of(
    output: RequestOutput, spans: VersionSpans, top: int | None, *, constrained: bool, kept: Collection[str] = ()
) -> list[TokenStep]:
    """One output of the engine as steps, one per policy version in it; the last bears the finish.

    Args: kept: versions that were loaded while this request ran, and left it its cache.
    """
    completion = output.outputs[0]
    reason = completion.finish_reason
    if reason not in (None, "stop", "length"):
        raise ended_by_engine(str(reason), grammar=constrained)
    ids = list(completion.token_ids)
    logprobs, tops = _logprobs(ids, completion.logprobs, top)
    steps: list[TokenStep] = []
    at = 0
    for version, count in spans.take(completion):
        part = slice(at, at + count)
        at += count
        steps.append(
            TokenStep(
                ids[part],
                logprobs[part],
                version,
                top=tops[part] if tops is not None else None,
                cached_tokens=output.num_cached_tokens or 0,
                constrained=constrained,
                mixed_kv=version in kept,
            )
        )
    if reason is not None:
        if not steps:
            steps.append(TokenStep([], [], "", cached_tokens=output.num_cached_tokens or 0, constrained=constrained))
        steps[-1].finish = reason
        steps[-1].timings = _timings(output)
    return steps


def _logprobs(ids: list[int], given: Any, top: int | None) -> tuple[list[float], list[list[tuple[int, float]]] | None]:
    """The sampled ids' log-probabilities, and their alternatives when asked for.

    vLLM puts the sampled token first at each position, then the `top` best by rank; the sampled one may be among them.
    Raises: EngineFailed: one is missing, not a number, or of another token (I1).
    """
    if not ids:
        return [], [] if top is not None else None
    if not isinstance(given, FlatLogprobs) or len(given.start_indices) != len(ids):
        raise EngineFailed("the engine gave tokens without log-probabilities")
    sampled = [given.logprobs[start] for start in given.start_indices]
    if [given.token_ids[start] for start in given.start_indices] != ids or any(value != value for value in sampled):
        raise EngineFailed("the engine gave log-probabilities of other tokens than the sampled ones")
    if top is None:
        return sampled, None
    tops = []
    for start, end in zip(given.start_indices, given.end_indices, strict=True):
        best = {given.token_ids[i]: given.logprobs[i] for i in range(start, end) if (given.ranks[i] or 0) <= top}
        tops.append(sorted(best.items(), key=lambda item: -item[1])[:top])
    return sampled, tops


def _timings(output: RequestOutput) -> dict[str, float]:
    """Seconds spent waiting in the engine and from being scheduled to the first token; nothing where vLLM keeps no stats."""
    stats = output.metrics
    if stats is None or not stats.scheduled_ts:
        return {}
    return {"queued_s": stats.scheduled_ts - stats.queued_ts, "prefill_s": stats.first_token_ts - stats.scheduled_ts}

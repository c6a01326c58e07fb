"""Which recorded turns can be read by a trainer. Pure.

The proxy checks what workers send as it comes (`steno_proxy/workers/soundness.py`); older records may hold data that were not
checked. A turn that does not add up is named with what is wrong; so are the turns that go on from it, since it is in their
context. All other turns are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from steno.contracts.chat import Sampling
from steno.contracts.records import MOST_LOGPROB, Turn, bytes_to_floats
from steno.contracts.rest import UnreadableTurn


def sort_out(turns: Sequence[Turn], *, synthetic: bool) -> tuple[list[Turn], list[UnreadableTurn]]:
    """The turns that can be read, in the order of commit, and the others, with why.

    Args: turns: all of a session, whole. synthetic: its words are scripted and need no log-probabilities.
    """
    good: list[Turn] = []
    bad: list[UnreadableTurn] = []
    ends: dict[str, tuple[Turn, Any]] = {}  # of each good turn, the digest of its path and completion
    for turn in sorted(turns, key=lambda turn: turn.index):
        digest, position = blake2b(digest_size=16), 0
        reason = fault(turn, synthetic=synthetic)
        if turn.parent_id is not None and reason is None:
            known = ends.get(turn.parent_id)
            if known is None:
                reason = _why_no_parent(turn, bad)
            else:
                parent, before = known
                digest, position = before.copy(), parent.prompt_tokens + parent.completion_tokens
        if reason is None:
            digest.update(turn.new_prompt_ids)
            position += len(turn.new_prompt_ids) // 4
            if turn.prompt_digest and digest.digest() != turn.prompt_digest:
                reason = "its prompt differs from the ids recorded along its path"
            elif turn.prompt_tokens != position:
                reason = f"{turn.prompt_tokens} prompt tokens, but {position} recorded along its path"
        if reason is None:
            digest.update(turn.completion_ids)
            ends[turn.turn_id] = (turn, digest)
            good.append(turn)
        else:
            bad.append(UnreadableTurn(turn_id=turn.turn_id, reason=reason, completion_tokens=turn.completion_tokens))
    return good, bad


def fault(turn: Turn, *, synthetic: bool) -> str | None:
    """What is wrong with a turn, as far as it shows by itself; None: nothing. Not for text-only turns, which have no ids."""
    if len(turn.new_prompt_ids) % 4 or len(turn.completion_ids) % 4:
        return "its ids are not a whole number of int32 values"
    n = turn.completion_tokens
    if len(turn.sampling_logprobs) != 4 * n and not (synthetic and not turn.sampling_logprobs):
        return f"{len(turn.sampling_logprobs) / 4:g} log-probabilities for {n} completion tokens"
    logprobs = bytes_to_floats(turn.sampling_logprobs)
    if not math.isfinite(sum(logprobs)):
        return "a log-probability is missing or not a finite number"
    if logprobs and max(logprobs) > MOST_LOGPROB:
        return f"a log-probability of {max(logprobs)}: more than {MOST_LOGPROB}"
    end = 0
    for span in turn.versions:
        if span.start != end or span.end < span.start:
            return f"its version spans leave a gap or overlap at token {end}"
        end = span.end
    if end != n and not (synthetic and not turn.versions):
        return f"versions are known for {end} of {n} completion tokens"
    for start, stop in turn.constrained:
        if not 0 <= start <= stop <= n:
            return f"constrained range {start}..{stop} of {n} completion tokens"
    return _fault_of_law(turn)


def law_of(turn: Turn) -> Sampling:
    """Raises: msgspec.ValidationError."""
    return msgspec.convert(turn.law, Sampling, strict=False)


def _fault_of_law(turn: Turn) -> str | None:
    try:
        law = law_of(turn)
    except msgspec.ValidationError as error:
        return f"its sampling law can't be read: {error}"
    return None if math.isfinite(law.temperature) else f"its sampling law can't be read: temperature {law.temperature}"


def _why_no_parent(turn: Turn, bad: Sequence[UnreadableTurn]) -> str:
    if any(found.turn_id == turn.parent_id for found in bad):
        return f"it goes on from turn {turn.parent_id}, which can't be read"
    return f"its parent {turn.parent_id} is not on record before it"

"""Samples: the token view of a session's conversation tree, one per path from a root to a leaf.

Token arrays are concatenations of what was recorded along the path and of nothing else (I1): prompt and completion ids of each
turn in order. What does not add up is an error that names the turn, never padded or guessed. A sampled token that
several paths share is trained in the first of them in commit order of their leaves, so the masks of all samples together
count each trainable token once (I4).

Turns without a single sampled token at the end of a path (failed before the first) are left out: they add nothing to train. So
are superseded ones, whose place another attempt took; where one was gone on from all the same, its tokens stand there untrained.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from proxy.contracts.canonical import Sampling
from proxy.contracts.errors import Conflict, StenoError
from proxy.contracts.records import Sample, SampledRange, Session, TokenSpan, Turn, bytes_to_floats, floats_to_bytes

_NAN = floats_to_bytes(array("f", [math.nan]))


def samples(session: Session, turns: Sequence[Turn]) -> list[Sample]:
    """All samples of a session, in commit order of their leaves.

    loss_mask is 1 for tokens that the policy sampled under a plain law, in the first sample that has them; 0 for prompt tokens,
    constrained ranges, turns whose law is not plain, superseded turns, and everything in a session marked `synthetic`.

    Args: turns: all turns of the session, whole.
    Raises: Conflict: the session is `text_only`. StenoError: naming the turn: a parent that is missing, lengths that disagree, a
        log-probability that is missing or not a number, tokens without a version, a prompt that is not the recorded one.
    """
    if "text_only" in session.marks:
        raise Conflict(
            f"session {session.trial_id} is text_only: an upstream gave text and no token ids, so there is nothing to train on; "
            "its turns hold the messages"
        )
    by_id = {turn.turn_id: turn for turn in turns}
    synthetic = "synthetic" in session.marks
    for turn in turns:
        _check(turn, by_id, synthetic)
    taught: set[str] = set()
    return [_sample(session, path, taught) for path in _paths(turns, by_id)]


def _paths(turns: Sequence[Turn], by_id: dict[str, Turn]) -> list[list[Turn]]:
    ordered = sorted(turns, key=lambda turn: turn.index)
    gone_on_from: set[str] = set()
    leaves: list[Turn] = []
    # Children come after their parents in commit order, so from the end every turn knows whether it is a leaf.
    for turn in reversed(ordered):
        if turn.turn_id in gone_on_from or (turn.completion_ids and turn.superseded_by is None):
            if turn.turn_id not in gone_on_from:
                leaves.append(turn)
            if turn.parent_id is not None:
                gone_on_from.add(turn.parent_id)
    paths = []
    for leaf in reversed(leaves):
        path = [leaf]
        while path[-1].parent_id is not None:
            path.append(by_id[path[-1].parent_id])
        path.reverse()
        paths.append(path)
    return paths


def _sample(session: Session, path: list[Turn], taught: set[str]) -> Sample:
    tokens: list[bytes] = []
    masks: list[bytes] = []
    logprobs: list[bytes] = []
    spans: list[TokenSpan] = []
    completions: list[SampledRange] = []
    digest = blake2b(digest_size=16)
    position = 0
    for turn in path:
        new, sampled = turn.new_prompt_ids, turn.completion_ids
        n_new, n_sampled = len(new) // 4, len(sampled) // 4
        digest.update(new)
        if turn.prompt_digest and digest.digest() != turn.prompt_digest:
            raise StenoError(f"turn {turn.turn_id}: its prompt is not what is recorded along its path")
        digest.update(sampled)
        position += n_new
        if turn.prompt_tokens != position:
            raise StenoError(
                f"turn {turn.turn_id}: {turn.prompt_tokens} prompt tokens, but {position} recorded along its path"
            )
        tokens += (new, sampled)
        masks += (bytes(n_new), bytes(n_sampled) if turn.turn_id in taught else _mask(session, turn, n_sampled))
        logprobs += (_NAN * n_new, turn.sampling_logprobs or _NAN * n_sampled)
        for span in turn.versions:
            start, end = position + span.start, position + span.end
            if spans and spans[-1].end == start and spans[-1].version == span.version:
                spans[-1] = TokenSpan(version=span.version, start=spans[-1].start, end=end)
            elif end > start:
                spans.append(TokenSpan(version=span.version, start=start, end=end))
        completions.append(
            SampledRange(
                start=position,
                end=position + n_sampled,
                temperature=_law(turn).temperature,
                policy=turn.policy,
                shared=turn.turn_id in taught,
                superseded=turn.superseded_by is not None,
                mixed_kv=turn.mixed_kv,
                finish_reason=turn.finish_reason,
                partial=turn.partial,
            )
        )
        taught.add(turn.turn_id)
        position += n_sampled
    return Sample(
        trial_id=session.trial_id,
        group_id=session.group_id,
        leaf_id=path[-1].turn_id,
        turn_ids=[turn.turn_id for turn in path],
        token_ids=b"".join(tokens),
        loss_mask=b"".join(masks),
        sampling_logprobs=b"".join(logprobs),
        spans=spans,
        completions=completions,
        reward=session.reward,
    )


def _mask(session: Session, turn: Turn, n: int) -> bytes:
    # The law is looked at again here, though the recorder marks bent turns as constrained: this is the last gate before a
    # trainer, and a wrong token trained is worse than a token lost.
    if "synthetic" in session.marks or turn.superseded_by is not None or not _law(turn).is_plain():
        return bytes(n)
    mask = bytearray(b"\x01" * n)
    for start, end in turn.constrained:
        mask[start:end] = bytes(end - start)
    return bytes(mask)


def _law(turn: Turn) -> Sampling:
    try:
        return msgspec.convert(turn.law, Sampling, strict=False)
    except msgspec.ValidationError as error:
        raise StenoError(f"turn {turn.turn_id}: its sampling law can't be read: {error}") from error


def _check(turn: Turn, by_id: dict[str, Turn], synthetic: bool) -> None:
    """What can be seen to be wrong with a turn by itself and its parent."""

    def wrong(what: str) -> StenoError:
        return StenoError(f"turn {turn.turn_id}: {what}")

    if turn.parent_id is not None:
        parent = by_id.get(turn.parent_id)
        if parent is None:
            raise wrong(f"its parent {turn.parent_id} is not on record")
        if parent.index >= turn.index:
            raise wrong(f"its parent {turn.parent_id} was committed after it")
    if len(turn.new_prompt_ids) % 4 or len(turn.completion_ids) % 4:
        raise wrong("its ids are no whole int32s")
    n = turn.completion_tokens
    if len(turn.sampling_logprobs) != 4 * n and not (synthetic and not turn.sampling_logprobs):
        raise wrong(f"{len(turn.sampling_logprobs) / 4:g} log-probabilities for {n} completion tokens")
    if not math.isfinite(sum(bytes_to_floats(turn.sampling_logprobs))):
        raise wrong("a log-probability is missing or not a finite number")
    end = 0
    for span in turn.versions:
        if span.start != end or span.end < span.start:
            raise wrong(f"its version spans leave a gap or overlap at token {end}")
        end = span.end
    if end != n and not (synthetic and not turn.versions):
        raise wrong(f"versions are known for {end} of {n} completion tokens")
    for start, stop in turn.constrained:
        if not 0 <= start <= stop <= n:
            raise wrong(f"constrained range {start}..{stop} of {n} completion tokens")

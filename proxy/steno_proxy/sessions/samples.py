"""Samples: the token view of a session's conversation tree, one per path from a root to a leaf.

Token arrays are concatenations of what was recorded along the path and of nothing else (I1): prompt and completion ids of each
turn in order. A turn that does not add up is in no sample, and named; nothing is padded or guessed. A sampled token that
several paths share is trained in the first of them in commit order of their leaves, so the masks of all samples together
count each trainable token once (I4).

Turns without a single sampled token at the end of a path (failed before the first) are left out: they add nothing to train. So
are superseded ones, whose place another attempt took; where one was gone on from all the same, its tokens stand there untrained.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from steno.contracts.errors import Conflict
from steno.contracts.records import Sample, SampledRange, Session, TokenSpan, Turn, floats_to_bytes
from steno.contracts.rest import SampleList
from steno_proxy.sessions.readable import law_of, sort_out

_NAN = floats_to_bytes(array("f", [math.nan]))


def samples(session: Session, turns: Sequence[Turn]) -> SampleList:
    """All samples of a session, in commit order of their leaves, and the turns that no sample can hold (`readable.py`).

    loss_mask is 1 for tokens that the policy sampled under a plain law, in the first sample that has them; 0 for prompt tokens,
    constrained ranges, turns whose law is not plain, superseded turns, and everything in a session marked `synthetic`.

    Args: turns: all turns of the session, whole.
    Raises: Conflict: the session is `text_only`.
    """
    if "text_only" in session.marks:
        raise Conflict(
            f"session {session.trial_id} is text_only: an upstream gave text and no token ids, so there is nothing to train on; "
            "its turns hold the messages"
        )
    good, unreadable = sort_out(turns, synthetic="synthetic" in session.marks)
    by_id = {turn.turn_id: turn for turn in good}
    earlier: set[str] = set()
    items = [_sample(session, path, earlier) for path in _paths(good, by_id)]
    return SampleList(items=items, unreadable=unreadable)


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


def _sample(session: Session, path: list[Turn], earlier: set[str]) -> Sample:
    tokens: list[bytes] = []
    masks: list[bytes] = []
    logprobs: list[bytes] = []
    spans: list[TokenSpan] = []
    completions: list[SampledRange] = []
    position = 0
    for turn in path:
        new, sampled = turn.new_prompt_ids, turn.completion_ids
        n_new, n_sampled = len(new) // 4, len(sampled) // 4
        position += n_new
        tokens += (new, sampled)
        masks += (bytes(n_new), bytes(n_sampled) if turn.turn_id in earlier else _mask(session, turn, n_sampled))
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
                temperature=law_of(turn).temperature,
                policy=turn.policy,
                model=turn.model,
                shared=turn.turn_id in earlier,
                superseded=turn.superseded_by is not None,
                mixed_kv=turn.mixed_kv,
                finish_reason=turn.finish_reason,
                partial=turn.partial,
            )
        )
        earlier.add(turn.turn_id)
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
    if "synthetic" in session.marks or turn.superseded_by is not None or not law_of(turn).is_plain():
        return bytes(n)
    mask = bytearray(b"\x01" * n)
    for start, end in turn.constrained:
        mask[start:end] = bytes(end - start)
    return bytes(mask)

"""What a trial that has ended comes to: its outcome for its group and its sampled tokens by version (I4). Pure.

Tokens are counted from the turns' own elements, which name the versions of each; nothing is counted while a session runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from steno.contracts.records import OPEN, Turn
from steno.contracts.runs.leases import NotTrained
from steno_proxy.store.encoding.codec import decode_entry, decode_row
from steno_proxy.store.encoding.head import Head

TRAIN = "train"
"""The outcome of a trial that is to be trained; any other is a word of `NotTrained`."""
UNKNOWN_VERSION = "unknown"
"""Where tokens are booked whose version the record does not tell: the trainer's ledger has the same word."""

SEALED, BOOKED = 1, 2
"""Of `Head.sealed`: the record takes no turn any more; and its run has counted its tokens."""

Tokens = dict[str, int]
"""Policy version -> sampled tokens."""


class EndedTrial(msgspec.Struct, frozen=True):
    """A trial that has ended, as its group and its run are told of it.

    life: tells trials apart that had one id after each other. final: nothing that may still come (a reward, where the trial
    awaits it) changes the outcome. booked: its run has counted its tokens already. borrowed: they were sampled in another
    run's trial.
    """

    trial_id: str
    group_id: str | None
    life: str
    outcome: str
    final: bool
    tokens: Tokens
    booked: bool = False
    borrowed: bool = False


def accountable(group_id: str | None, run_id: str | None) -> bool:
    """Whether anybody asks what became of a session. Of one that is in no group and no run nobody can."""
    return group_id is not None or run_id is not None


def ended(trial_id: str, head: Head, turns: Iterable[bytes], *, borrowed: bool) -> EndedTrial:
    """What an ended session's group and run are told of it.

    Args: turns: all elements of turns, none of which can change any more. borrowed: they are another trial's.
    """
    word, final = outcome(head)
    tokens = tokens_of(turns, text_only="text_only" in head.marks)
    return EndedTrial(trial_id, head.group, repr(head.created), word, final, tokens, head.sealed == BOOKED, borrowed)


def outcome(head: Head) -> tuple[str, bool]:
    """The outcome of an ended session (`train`, or a word of `NotTrained`), and whether it is final."""
    if head.status == "deleted":
        return NotTrained.DELETED, True
    if head.status == "aborted":
        return NotTrained.ABORTED, True
    for mark in (NotTrained.TEXT_ONLY, NotTrained.SYNTHETIC):
        if mark in head.marks:
            return mark, True
    if head.reward is None:
        return NotTrained.UNSCORED, bool(head.final)
    return TRAIN, True


def tokens_of(turns: Iterable[bytes], *, text_only: bool = False) -> Tokens:
    """Sampled tokens of a session, by policy version. A text-only turn has no tokens, only an upstream's count of them."""
    tokens: Tokens = {}
    for raw in turns:
        entry = decode_entry(raw)
        versions, sampled = entry.meta.versions, entry.completion_tokens
        spans = [(versions, 0, sampled)] if isinstance(versions, str) else versions
        _count(tokens, spans, 0 if text_only else sampled)
    return tokens


def open_turns(turns: Iterable[bytes]) -> dict[str, Tokens]:
    """Turn id -> tokens, of those that are still open: what has been counted of them."""
    return {row.turn_id: tokens_of([raw]) for raw in turns if (row := decode_row(raw)).finish == OPEN}


def late_tokens(turn: Turn, counted: Tokens) -> Tokens:
    """Sampled tokens of a turn that its trial's record does not take any more, less what is counted of it: while it was open, or
    as it ended there."""
    tokens: Tokens = {}
    _count(tokens, [(span.version, span.start, span.end) for span in turn.versions], len(turn.completion_ids) // 4)
    return {version: more for version, count in tokens.items() if (more := count - counted.get(version, 0)) > 0}


def _count(tokens: Tokens, spans: Iterable[tuple[str, int, int] | Any], sampled: int) -> None:
    known = 0
    for version, start, end in spans:
        if end > start:
            tokens[version] = tokens.get(version, 0) + end - start
            known += end - start
    if sampled > known:
        tokens[UNKNOWN_VERSION] = tokens.get(UNKNOWN_VERSION, 0) + sampled - known

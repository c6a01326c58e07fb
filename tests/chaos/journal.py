"""Each token that a worker's engine sampled, written down before it is sent: records are checked against this journal (I4).

One line per token, appended by one write, so that a killed worker has noted all that it sent. A kill can cut a write at the end
of a page, and a reader may see a part of it: so a newline also precedes each line, and its last word is `end`. Fates of a token:

    recorded         it stands in its turn, with this worker and this version; of a superseded turn as well
    sampled again    it was lost with its worker, and a later attempt of the turn sampled it on another worker
    after the end    its turn broke, or was cancelled, before the token was on record
    unrecorded       nothing is on record of its turn: its replica was killed, or its client left before the token came
    with its trial   the trial was deleted
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from steno.contracts.records import Turn, bytes_to_ids

END = "end"


class Sampled(NamedTuple):
    worker: str
    trial_id: str
    turn_id: str
    attempt: int
    position: int
    token_id: int
    version: str


class Journal:
    """Written by one worker, also by those that come after it under its name."""

    def __init__(self, path: Path, worker: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._worker = worker

    def note(self, trial_id: str, turn_id: str, attempt: int, position: int, token_id: int, version: str) -> None:
        words = (self._worker, trial_id, turn_id, attempt, position, token_id, version)
        os.write(self._file, f"\n{' '.join(map(str, words))} {END}\n".encode())


def read(paths: Iterable[Path], run_id: str) -> Iterator[Sampled]:
    """What was sampled for the trials of a run, which are named after it."""
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            words = line.split(" ")
            if words[-1] == END and words[1].startswith(run_id + "-"):
                worker, trial_id, turn_id, attempt, position, token_id, version, _ = words
                yield Sampled(worker, trial_id, turn_id, int(attempt), int(position), int(token_id), version)


def check_sampled(
    sampled: Iterable[Sampled], records: Mapping[str, Sequence[Turn]], calm: Mapping[str, bool]
) -> tuple[list[str], Counter[str]]:
    """I4, I10: what is on record was sampled there, and what was sampled is on record, or why not is known.

    Args: records: turns of the trials that are left. calm: trial -> no request of it was ever repeated or cut off, so that
        nothing of it may be unrecorded.
    Returns: (what is wrong, tokens by what became of them)
    """
    wrong: list[str] = []
    fates: Counter[str] = Counter()
    by_turn: dict[str, list[Sampled]] = defaultdict(list)
    for one in sampled:
        by_turn[one.turn_id].append(one)
    turns = {turn.turn_id: (trial_id, turn) for trial_id, found in records.items() for turn in found}
    recorded: set[Sampled] = set()
    for turn_id, (trial_id, turn) in turns.items():
        asked = by_turn.get(turn_id, [])
        if turn.partial:
            # When a completion that can't be resumed begins again, its first part is recorded as a turn with a new id. Its
            # worker sampled it under the id of the turn that superseded it in the end. If that one was left too, no turn on
            # record has this id.
            later = set(_later(turn, turns))
            others = (name for name in by_turn if name in later or name not in turns)
            asked = [*asked, *(one for name in others for one in by_turn[name] if one.trial_id == trial_id)]
        known = {(one.position, one.token_id, one.version, one.worker): one for one in asked}
        for token in _tokens(turn):
            if token not in known:
                wrong.append(f"I4: turn {turn_id} has on record what no engine sampled: {token}")
                break
            recorded.add(known[token])
    for turn_id, ones in by_turn.items():
        trial_id, turn_on_record = turns.get(turn_id, (ones[0].trial_id, None))
        fate = Counter(_fate(one, turn_on_record, recorded, trial_id in records) for one in ones)
        fates += fate
        if calm.get(trial_id) and fate["unrecorded"] + fate["after the end"]:
            wrong.append(f"I4: nobody cut {trial_id} off, and of turn {turn_id} was sampled {dict(fate)}")
    return wrong, fates


def _later(turn: Turn, turns: Mapping[str, tuple[str, Turn]]) -> Iterator[str]:
    """The turns that took its place, one after the other."""
    while turn.superseded_by is not None:
        yield turn.superseded_by
        if turn.superseded_by not in turns:
            return
        turn = turns[turn.superseded_by][1]


def _tokens(turn: Turn) -> Iterator[tuple[int, int, str, str]]:
    """(position, id, version, worker)"""
    ids = bytes_to_ids(turn.completion_ids).tolist()
    versions = [span.version for span in turn.versions for _ in range(span.start, span.end)]
    workers = [span.worker_id for span in turn.workers for _ in range(span.start, span.end)] or [turn.worker_id] * len(
        ids
    )
    for position, (token_id, version, worker) in enumerate(zip(ids, versions, workers, strict=False)):
        yield position, token_id, version, worker


def _fate(one: Sampled, turn: Turn | None, recorded: set[Sampled], alive: bool) -> str:
    if not alive:
        return "with its trial"
    if one in recorded:
        return "recorded"
    if turn is None:
        return "unrecorded"
    return "sampled again" if one.attempt < turn.attempt else "after the end"

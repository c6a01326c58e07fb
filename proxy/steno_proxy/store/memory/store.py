"""Sessions in the memory of one process: the embedded default, and what tests of everything else run on.

Keeps what the Redis store keeps, the same encoded bytes, so that a session costs what its tokens cost. Nothing outlives the
process (I3 holds only as long as it does). Every method but `list_sessions` and the generators `due` and `events` runs without
awaiting: atomic in one event loop, and bound to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any

from steno.contracts.chat import Message
from steno.contracts.errors import Gone, NotFound
from steno.contracts.notes import Note, Notes, merged
from steno.contracts.records import OPEN, Group, IndexRow, Session, Turn, TurnAnnotation
from steno.contracts.rest import END
from steno.contracts.runs.leases import NotTrained
from steno_proxy.store.claims import Claimed, check_claim
from steno_proxy.store.encoding.annotations import encode_annotation
from steno_proxy.store.encoding.codec import FIRST_MESSAGE, decode_entry, decode_row, path_ids
from steno_proxy.store.encoding.head import borrows, doc_of, head_of, run_of, session_of
from steno_proxy.store.encoding.images import together
from steno_proxy.store.encoding.texts import unpack
from steno_proxy.store.facets import EVERY_SESSION, SessionFilter, agent_of
from steno_proxy.store.groups import check_member, same_group, there, with_recorded_ids
from steno_proxy.store.interface import (
    EndedOtherwise,
    RecordedOtherwise,
    RetryKey,
    SessionListPage,
    SessionTail,
    TokenPath,
    ends_alike,
)
from steno_proxy.store.memory.lists import MemoryLists
from steno_proxy.store.memory.recording import MemoryRecording, stays
from steno_proxy.store.memory.runs import MemoryRuns
from steno_proxy.store.policies import MemoryPolicies
from steno_proxy.store.runs.settlement import BOOKED, Tokens, accountable, ended, late_tokens, open_turns, tokens_of
from steno_proxy.store.timed import look_at
from steno_proxy.store.token_texts import MemoryTokenTexts
from steno_proxy.store.views import Event, ListPosition, end_event, position, turn_events, turns_seen


class MemoryStore:
    """Keeps the `SessionStore` protocol, in this process only."""

    def __init__(self) -> None:
        self._recordings: dict[str, MemoryRecording] = {}
        self._groups: dict[str, Group] = {}
        self._lists = MemoryLists()
        self._tombstones: dict[str, float] = {}
        self._buried_of: dict[str, tuple[str | None, dict[str, Tokens]]] = {}  # deleted trials: run, open turns
        self._timed: dict[str, float] = {}  # open trials -> when a limit of their time may be spent
        self._now = 0.0
        self._kept: dict[str, bytes] = {}
        self.runs = MemoryRuns(self._living)
        self.policies = MemoryPolicies()
        self.token_texts = MemoryTokenTexts()
        self.waited_replicas = 0

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close: what was recorded goes with the process."""

    async def ping(self) -> None:
        """Always there."""

    async def now(self) -> float:
        return self.clock()

    def clock(self) -> float:
        return time.time()

    async def earliest(self) -> float:
        return await self.now()

    async def keep(self, name: str, value: bytes) -> bytes:
        return self._kept.setdefault(name, value)

    async def kept(self, name: str) -> bytes | None:
        return self._kept.get(name)

    def _get(self, trial_id: str) -> MemoryRecording:
        recording = self._recordings.get(trial_id)
        if recording is not None:
            return recording
        if self._buried(trial_id):
            raise Gone(f"session {trial_id} is closed")
        raise NotFound(f"no session {trial_id}")

    def _buried(self, trial_id: str) -> bool:
        until = self._tombstones.get(trial_id)
        if until is None or until > self._now:
            return until is not None
        del self._tombstones[trial_id]
        self._buried_of.pop(trial_id, None)
        return False

    def _living(self, trial_id: str, life: str) -> Session | None:
        recording = self._recordings.get(trial_id)
        if recording is None or repr(recording.head.created) != life:
            return None
        return self._session(trial_id, recording)

    def _session(self, trial_id: str, recording: MemoryRecording) -> Session:
        return session_of(trial_id, recording.head, recording.doc)

    # -- groups and sessions

    async def create_group(self, group: Group, sessions: Sequence[Session]) -> Group:
        known = group.group_id in self._groups
        self._check_free(group, sessions)
        recorded = self._groups.setdefault(group.group_id, group.model_copy(deep=True))
        same_group(recorded, group)
        self.runs.open_group(recorded)
        made = [await there(self.register(session)) for session in with_recorded_ids(recorded, sessions)]
        gone = [error for error in made if error is not None]
        if gone and (not known or len(gone) == len(made)):
            raise gone[0]
        return recorded.model_copy(deep=True)

    def _check_free(self, group: Group, sessions: Sequence[Session]) -> None:
        """Before a group is counted. Raises: Conflict: a session that is not the group's has one of its trial ids; Gone: a new
        group's trial was deleted not long ago."""
        recorded = self._groups.get(group.group_id)
        for session in with_recorded_ids(recorded or group, sessions):
            found = self._recordings.get(session.trial_id)
            if found is not None:
                check_member(group.group_id, session.trial_id, found.head.group)
            elif recorded is None and self._buried(session.trial_id):
                raise Gone(f"session {session.trial_id} is closed")

    async def group(self, group_id: str) -> Group:
        if group_id not in self._groups:
            raise NotFound(f"no group {group_id}")
        return self._groups[group_id].model_copy(deep=True)

    async def register(self, session: Session) -> Session:
        trial_id = session.trial_id
        if trial_id not in self._recordings:
            if self._buried(trial_id):
                raise Gone(f"session {trial_id} is closed")
            self._recordings[trial_id] = MemoryRecording(
                head_of(session), doc_of(session), session.run_id, agent_of(session.metadata)
            )
            self._timed[trial_id] = look_at(session, session.created_at)
            self._lists.add(ListPosition(session.created_at, trial_id), session.group_id)
        return self._session(trial_id, self._recordings[trial_id])

    async def session(self, trial_id: str) -> Session:
        return self._session(trial_id, self._get(trial_id))

    async def list_sessions(
        self, *, status: str | None, group_id: str | None, since: float | None, until: float | None,
        cursor: str | None, limit: int, wanted: SessionFilter = EVERY_SESSION, newest_first: bool = False,
        most_looked: int | None = None,
    ) -> SessionListPage:  # fmt: skip
        def take(trial_id: str) -> Session | None:
            recording = self._recordings[trial_id]
            if status not in (None, recording.head.status) or not wanted.takes_facets(recording.facets):
                return None
            return self._session(trial_id, recording)

        return await self._lists.page(
            take, group_id=group_id, since=since, until=until, after=position(cursor), limit=limit,
            newest_first=newest_first, most_looked=most_looked,
        )  # fmt: skip

    async def due(self, *, now: float) -> AsyncGenerator[Session, None]:
        for trial_id, at in list(self._timed.items()):
            recording = self._recordings.get(trial_id)
            if recording is None or recording.head.status != "open":
                del self._timed[trial_id]
            elif at <= now:
                session = self._session(trial_id, recording)
                self._timed[trial_id] = look_at(session, now)
                if self._timed[trial_id] <= now:
                    yield session

    async def complete(
        self,
        trial_id: str,
        *,
        status: str,
        reward: float | None,
        end_reason: str,
        metrics: dict[str, float],
        now: float,
        final: bool = True,
        claim: int | None = None,
    ) -> Session:
        recording = self._get(trial_id)
        head = recording.head
        check_claim(trial_id, head.claimed, claim)
        if head.status == "open":
            head.status, head.end_reason, head.ended, head.updated = status, end_reason or None, now, now
        elif status == "aborted" and final and not head.final and head.reward is None:
            head.status, head.updated = status, now
        elif head.status != status or (head.reward is not None and head.reward != reward):
            raise EndedOtherwise(trial_id, head.status, head.reward)
        if head.reward is None and reward is not None:
            head.reward, head.updated = float(reward), now
        if not final and claim is not None and head.awaits_reward:
            head.claim_until = None
        if final and not head.final:
            head.updated = now
            head.metrics = {**head.metrics, **metrics}
        else:
            head.metrics = head.metrics or dict(metrics)
        head.final = head.final or int(final)
        recording.wake()
        return self._session(trial_id, recording)

    async def settle(self, trial_id: str, *, now: float) -> None:
        recording = self._recordings.get(trial_id)
        if recording is not None and recording.head.status != "open":
            self._settle(trial_id, recording, now)

    def _settle(self, trial_id: str, recording: MemoryRecording, now: float) -> None:
        head, run_id = recording.head, run_of(recording.doc)
        if accountable(head.group, run_id):
            trial = ended(trial_id, head, recording.turns, borrowed=borrows(recording.doc))
            self.runs.ended(run_id, trial, now)
            head.sealed = BOOKED

    async def delete(self, trial_id: str, *, now: float, tombstone_s: float) -> None:
        self._now = max(self._now, now)
        if trial_id not in self._recordings and self._buried(trial_id):
            return
        recording = self._get(trial_id)
        recording.head.status = "deleted"
        self._settle(trial_id, recording, now)
        if recording.head.sealed == BOOKED:
            self._buried_of[trial_id] = (run_of(recording.doc), open_turns(recording.turns))
        self._remove(trial_id, now)
        self._tombstones[trial_id] = now + tombstone_s

    def _remove(self, trial_id: str, now: float) -> None:
        recording = self._get(trial_id)
        head = recording.head
        del self._recordings[trial_id]
        last = self._lists.remove(ListPosition(head.created, trial_id), head.group)
        if last and head.group is not None and (group := self._groups.pop(head.group, None)) is not None:
            self.runs.forget(group, now)
        head.status = "deleted"
        recording.wake()

    async def expire(self, *, now: float, retention_s: float) -> int:
        self._now = max(self._now, now)
        for trial_id in list(self._tombstones):
            self._buried(trial_id)
        cutoff = now - retention_s
        times = ((trial_id, recording.head.ended) for trial_id, recording in self._recordings.items())
        old = [trial_id for trial_id, at in times if at is not None and at <= cutoff]
        return sum(self._drop(trial_id, now) for trial_id in old)

    def _drop(self, trial_id: str, now: float) -> bool:
        """Past its retention. False: its group is not done with it."""
        recording = self._recordings[trial_id]
        self._settle(trial_id, recording, now)
        group = recording.head.group
        if group is not None and not self.runs.lets_go(run_of(recording.doc), group, now):
            return False
        self._remove(trial_id, now)
        return True

    # -- the recording

    async def tail(self, trial_id: str, start: int, *, known: int = 0) -> SessionTail:
        recording = self._get(trial_id)
        return SessionTail(self._session(trial_id, recording), [decode_row(raw) for raw in recording.turns[start:]])

    async def path(self, trial_id: str, numbers: Sequence[int]) -> TokenPath:
        recording = self._get(trial_id)
        if not numbers:
            return TokenPath(b"", {})
        if not all(0 <= number < len(recording.turns) for number in numbers):
            raise NotFound(f"session {trial_id} has no turns {list(numbers)}")
        reply_at = decode_entry(recording.turns[numbers[-1]]).refs[-1]
        return TokenPath(path_ids([recording.ids[number] for number in numbers]), unpack(recording.texts[reply_at]))

    async def commit(
        self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, retry_key: RetryKey | None = None
    ) -> int:
        recording = self._recordings.get(trial_id)
        if recording is None:
            self._came_late(trial_id, turn, now)
            recording = self._get(trial_id)
        number = recording.numbers.get(turn.turn_id, len(recording.turns))
        before = decode_entry(recording.turns[number]) if turn.turn_id in recording.numbers else None
        if before is not None and stays(before, turn):
            if not ends_alike(before.row, row):
                self._came_late(trial_id, turn, now, tokens_of([recording.turns[number]]))
                raise RecordedOtherwise(turn.turn_id, before.completion_tokens)
        else:
            if recording.head.sealed:
                self._came_late(trial_id, turn, now)
                raise Gone(f"session {trial_id} is closed")
            if recording.head.status != "open" and not turn.partial:
                raise Gone(f"session {trial_id} is closed")
            recording.commit(number, turn, row, before, now, retry_key)
        turn.index = number
        return number

    def _came_late(self, trial_id: str, turn: Turn, now: float, recorded: Tokens | None = None) -> None:
        """A turn for a record that takes none any more, or that has something else of it for good: `recorded`."""
        if turn.finish_reason == OPEN or (recorded is None and not turn.partial):
            return
        recording = self._recordings.get(trial_id)
        if recording is not None:
            counted = open_turns(recording.turns).get(turn.turn_id, {}) if recorded is None else recorded
            run_id, reason = run_of(recording.doc), NotTrained.LATE
            if not accountable(recording.head.group, run_id):
                return
        elif self._buried(trial_id) and trial_id in self._buried_of:
            run_id, still_open = self._buried_of[trial_id]
            counted, reason = still_open.get(turn.turn_id, {}), NotTrained.DELETED
        else:
            return
        if tokens := late_tokens(turn, counted):
            self.runs.came_late(run_id, trial_id, turn.turn_id, tokens, reason, now)

    async def mark_delivered(self, trial_id: str, turn_id: str, delivered: int) -> None:
        recording = self._recordings.get(trial_id)
        if recording is not None and turn_id in recording.numbers:
            recording.delivered[recording.numbers[turn_id]] = delivered

    async def conversation(self, trial_id: str, numbers: Sequence[int]) -> list[list[Message]]:
        recording = self._get(trial_id)
        if not all(0 <= number < len(recording.turns) for number in numbers):
            raise NotFound(f"session {trial_id} has no turns {list(numbers)}")
        entries = [decode_entry(recording.turns[number]) for number in numbers]
        return [together(unpack(recording.texts[ref]) for ref in entry.refs[FIRST_MESSAGE:]) for entry in entries]

    async def hide(self, trial_id: str, turn_id: str) -> None:
        recording = self._recordings.get(trial_id)
        if recording is not None and turn_id in recording.numbers:
            recording.hidden.add(turn_id)

    async def hidden(self, trial_id: str, turn_id: str) -> bool:
        return turn_id in self._get(trial_id).hidden

    async def supersede(self, trial_id: str, earlier: str, later: str) -> None:
        recording = self._recordings.get(trial_id)
        if recording is not None and earlier in recording.numbers:
            recording.superseded.setdefault(earlier, later)
            recording.retries.setdefault(later, earlier)

    async def refused(self, trial_id: str, key: bytes, *, began: float, now: float) -> None:
        if (recording := self._recordings.get(trial_id)) is not None:
            recording.again.refused(key, began=began, now=now)

    async def asked_again(self, trial_id: str, key: bytes, *, began: float, count: int, n: int, now: float) -> bool:
        return self._get(trial_id).again.came(key, began=began, count=count, n=n, now=now)

    async def note(self, trial_id: str, seen: Sequence[Note]) -> None:
        recording = self._get(trial_id)
        recording.notes = merged(recording.notes or Notes(), seen)

    async def notes(self, trial_id: str) -> Notes | None:
        recording = self._recordings.get(trial_id)
        return recording.notes if recording is not None else None

    async def annotate(self, trial_id: str, annotations: Mapping[str, TurnAnnotation]) -> None:
        recording = self._get(trial_id)
        recording.annotations |= {turn_id: encode_annotation(each) for turn_id, each in annotations.items()}

    async def add_marks(self, trial_id: str, marks: Sequence[str]) -> None:
        head = self._get(trial_id).head
        head.marks = list(dict.fromkeys([*head.marks, *marks]))

    async def rotate_key(self, trial_id: str, generation: int | None) -> int:
        head = self._get(trial_id).head
        head.rotations = max(head.rotations, generation - 1 if generation else head.rotations + 1)
        return head.rotations + 1

    async def claim(
        self, trial_id: str, launcher: str, ttl_s: float, *, now: float, gone: Collection[str] = ()
    ) -> tuple[Session, Claimed]:
        recording = self._get(trial_id)
        found = recording.claim(launcher, ttl_s, now, gone)
        return self._session(trial_id, recording), found

    async def begin_task_step(self, trial_id: str, name: str | None) -> None:
        head = self._get(trial_id).head
        if head.status != "open":
            raise Gone(f"session {trial_id} is closed")
        head.task_step = name

    async def turns(self, trial_id: str, *, start: int = 0, limit: int | None = None) -> list[Turn]:
        recording = self._get(trial_id)
        stop = len(recording.turns) if limit is None else min(start + limit, len(recording.turns))
        return [recording.turn(number) for number in range(start, stop)]

    # -- what watchers see

    async def events(self, trial_id: str, *, after: str | None = None) -> AsyncGenerator[Event, None]:
        recording = self._get(trial_id)
        if after == END:
            return
        seen = turns_seen(after)
        awake = asyncio.Event()
        recording.watchers.add(awake)
        try:
            while True:
                awake.clear()
                ended = recording.head.status != "open"
                events = turn_events(seen, recording.turns[seen:], ended=ended)
                for event in events:
                    yield event
                seen += len(events)
                if ended and seen >= len(recording.turns):
                    yield end_event(recording.head)
                    return
                await awake.wait()
        finally:
            recording.watchers.discard(awake)

    async def fullness(self) -> float | None:
        return None

    async def stats(self) -> dict[str, Any]:
        counts = dict.fromkeys(("open", "completed", "aborted"), 0)
        for recording in self._recordings.values():
            counts[recording.head.status] += 1
        return {"backend": "memory", "sessions": counts, "used_bytes": None}

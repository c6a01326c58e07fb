"""One trial's recording in the memory of one process: the same encoded bytes as in Redis, and what came after them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from steno.contracts.notes import Notes
from steno.contracts.records import OPEN, IndexRow, Turn
from steno_proxy.store.claims import Claimed, claimed
from steno_proxy.store.encoding.annotations import decode_annotation
from steno_proxy.store.encoding.codec import (
    DecodedTurn,
    EncodedTurn,
    decode_entry,
    decode_turn,
    encode_turn,
    join_entry,
)
from steno_proxy.store.encoding.head import Head
from steno_proxy.store.encoding.texts import StoredText, pack, unpack
from steno_proxy.store.facets import SessionFacets
from steno_proxy.store.interface import ParentLost, RetryKey
from steno_proxy.store.retries import TrialRetries


class MemoryRecording:
    """One trial. `run_id`, `agent`: it is found by them. `numbers`: turn_id -> number in commit order. `delivered`: counts that
    came after the commit. `superseded`: turn_id -> that of the turn which took its place; `retries`: the other way round, where
    that was found out later."""

    __slots__ = (
        "again", "agent", "annotations", "delivered", "digests", "doc", "head", "hidden", "ids", "logprobs", "notes", "numbers",
        "retries", "run_id", "superseded", "texts", "turns", "watchers",
    )  # fmt: skip

    def __init__(self, head: Head, doc: bytes, run_id: str | None, agent: str | None) -> None:
        self.head = head
        self.doc = doc
        self.run_id = run_id
        self.agent = agent
        self.turns: list[bytes] = []
        self.ids: list[bytes] = []
        self.logprobs: list[bytes] = []
        self.texts: list[bytes] = []
        self.digests: dict[bytes, int] = {}
        self.numbers: dict[str, int] = {}
        self.delivered: dict[int, int] = {}
        self.hidden: set[str] = set()
        self.superseded: dict[str, str] = {}
        self.retries: dict[str, str] = {}
        self.again = TrialRetries()
        self.notes: Notes | None = None
        self.annotations: dict[str, bytes] = {}
        self.watchers: set[asyncio.Event] = set()

    @property
    def facets(self) -> SessionFacets:
        """What it is found by, now. known: not counted, there is no earlier one."""
        head = self.head
        return SessionFacets(
            0, self.run_id, self.agent, head.status != "open", head.end_reason, head.reward, tuple(head.marks)
        )

    def commit(
        self, number: int, turn: Turn, row: IndexRow, before: DecodedTurn | None, now: float, retry_key: RetryKey | None
    ) -> None:
        """Take a turn. before: what is on record of it, open, which it takes the place of. Raises: ParentLost."""
        encoded, head = encode_turn(turn, row), self.head
        if before is None and encoded.parent is not None and self.numbers.get(turn.parent_id or "") != row.parent:
            raise ParentLost(turn.parent_id, row.parent)
        if before is None:
            self.numbers[turn.turn_id] = number
            self._append_turn()
        self._put(number, encoded, before)
        if turn.retry_of is not None:
            self.superseded[turn.retry_of] = turn.turn_id
        head.updated = now
        head.first_turn = encoded.began_at if head.first_turn is None else head.first_turn
        head.completion += encoded.completion_tokens - (before.completion_tokens if before else 0)
        head.constrained += encoded.constrained_tokens - (before.constrained_tokens if before else 0)
        if before is None:
            head.turns += 1
            head.prompt += encoded.new_prompt_tokens
            head.forks += encoded.fork
            if retry_key is not None:
                self._pair(retry_key, turn, encoded.began_at)
        self.wake()

    def _append_turn(self) -> None:
        """Room for one more turn."""
        self.turns.append(b"")
        self.ids.append(b"")
        self.logprobs.append(b"")

    def _pair(self, retry_key: RetryKey, turn: Turn, began: float) -> None:
        """A turn has come on record: note which turns of equal requests supersede it, and which it supersedes."""
        superseded = self.superseded
        for earlier, later in self.again.recorded(
            retry_key, turn.choice, turn.turn_id, began, partial=turn.partial, superseded=superseded
        ):
            superseded[earlier], self.retries[later] = later, earlier

    def _put(self, number: int, encoded: EncodedTurn, before: DecodedTurn | None) -> None:
        """A turn in its place, or in that of what was on record of it while it was open."""
        self.turns[number] = join_entry(encoded, self._place(encoded.texts, before.refs[-1] if before else None))
        self.ids[number] = _exact(encoded.ids)
        self.logprobs[number] = encoded.logprobs

    def _place(self, texts: Sequence[StoredText], reply_at: int | None) -> list[int]:
        """Positions of a turn's texts, after storing those that are not here yet. The last, the reply, is its own."""
        refs = []
        for text in texts[:-1]:
            position = self.digests.get(text.digest)
            if position is None:
                position = self.digests[text.digest] = self._append(text)
            refs.append(position)
        if reply_at is None:
            reply_at = self._append(texts[-1])
        else:
            self.texts[reply_at] = _exact(pack(texts[-1].raw))
        refs.append(reply_at)
        return refs

    def _append(self, text: StoredText) -> int:
        self.texts.append(_exact(pack(text.raw)))
        return len(self.texts) - 1

    def claim(self, launcher: str, ttl_s: float, now: float, gone: Collection[str]) -> Claimed:
        head = self.head
        is_open, waits = head.status == "open", head.awaits_reward
        found = claimed(head.claimed, launcher, ttl_s, now, is_open=is_open, awaits_reward=waits, gone=gone)
        if found.granted:
            head.claim, head.claim_by, head.claim_until = found.claim
            head.rotations += found.taken_over
        return found

    def wake(self) -> None:
        for watcher in self.watchers:
            watcher.set()

    def turn(self, number: int) -> Turn:
        entry = decode_entry(self.turns[number])
        turn = decode_turn(
            number, entry, self.ids[number], self.logprobs[number], lambda at: unpack(self.texts[at]),
            self.delivered.get(number), self.superseded.get(entry.row.turn_id), self.retries.get(entry.row.turn_id),
        )  # fmt: skip
        turn.annotation = decode_annotation(self.annotations.get(turn.turn_id))
        return turn


def stays(before: DecodedTurn, turn: Turn) -> bool:
    """Whether the turn on record stays as it is, whatever is sent of it: it has ended, or has more tokens than `turn`."""
    return before.row.finish != OPEN or turn.completion_tokens < before.completion_tokens


def _exact(raw: bytes) -> bytes:
    """The same bytes in memory of their own size: encoders return theirs in the buffer that they reserved, zstd's being
    as large as the text was."""
    return bytes(memoryview(raw))

"""The recording itself in Redis (I3, I5): commit, and the ways back from what was committed. Groups and lists are not known here.

One script and one round trip per commit, one round trip per tail. Turns are read in chunks: a long session must neither hold up
the server nor arrive whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from steno.contracts.chat import Message
from steno.contracts.errors import Gone, NotFound, StoreUnavailable
from steno.contracts.lenient import read_json
from steno.contracts.notes import MOST_NOTES, Note, Notes
from steno.contracts.records import IndexRow, Session, Turn, TurnAnnotation
from steno_proxy.pace import Pace
from steno_proxy.store.claims import Claimed, claimed
from steno_proxy.store.encoding.annotations import decode_annotation, encode_annotation
from steno_proxy.store.encoding.codec import (
    FIRST_MESSAGE,
    EncodedTurn,
    PromptTexts,
    decode_entry,
    decode_row,
    decode_turn,
    encode_turn,
    is_long,
    pack_id,
    path_ids,
)
from steno_proxy.store.encoding.head import Head, head_from_hash, session_of
from steno_proxy.store.encoding.images import apart, together
from steno_proxy.store.encoding.texts import pack, unpack
from steno_proxy.store.encoding.texts import text as text_of
from steno_proxy.store.interface import ParentLost, RecordedOtherwise, RetryKey, SessionTail, TokenPath, ends_alike
from steno_proxy.store.redis.link.batch import Command
from steno_proxy.store.redis.link.redis_link import RedisLink, Script
from steno_proxy.store.redis.schema import TrialKeys, annotations_key, notes_key, trial_keys
from steno_proxy.store.retries import MOST_PLACES, MOST_REFUSALS, MOST_RETRIES, REFUSED_S, RETRY_MEMORY_S, place
from steno_proxy.store.runs.settlement import Tokens, tokens_of

T = TypeVar("T")
MISSING, CLOSED, RESEND, OTHER, SEALED, CLAIMED, NO_PARENT = -1, -2, -3, -4, -6, -7, -8
"""Outcomes of the scripts, as in their headings."""
CHUNK_TURNS = 64
NOTES_S = 30 * 86_400.0
"""How long notes stay after the last: also of a session that a replica removed which knows nothing of them."""
CLAIM_ATTEMPTS = 8
NO_ROWS = -1
"""As the start of a tail: the session alone."""


class RedisRecordings:
    """The part of `SessionStore` that is about turns."""

    def __init__(self, link: RedisLink, pace: Pace | None = None) -> None:
        self._link = link
        self._pace = pace or Pace()
        self._known = KnownTexts()
        self._scripts: dict[str, Script] = {}

    async def _run(self, name: str, keys: Sequence[str], args: Sequence[Any], *, writes: bool = True) -> Any:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = Script(name)
        return await self._link.run(script, keys, args, writes=writes)

    async def tail(self, trial_id: str, start: int, *, known: int = 0) -> SessionTail:
        keys = trial_keys(trial_id)
        commands: list[Command] = [("HGETALL", keys.session), ("GET", keys.doc)]
        if start != NO_ROWS:
            commands.append(("LRANGE", keys.turns, start, -1))
        fields, doc, *found = await self._link.ask(*commands)
        head = alive(trial_id, fields, doc)
        rows = found[0] if found else []
        if len(rows) > known and self._link.waits:
            # As a write, which waits for replicas: who goes on from a turn that a failover forgets goes on from nothing (I2).
            rows = await self._link.write("LRANGE", keys.turns, start, -1)
        return SessionTail(session_of(trial_id, head, doc), [decode_row(raw) for raw in rows])

    async def path(self, trial_id: str, numbers: Sequence[int]) -> TokenPath:
        if not numbers:
            return TokenPath(b"", {})
        keys = trial_keys(trial_id)
        commands: list[Command] = [("LRANGE", keys.ids, first, last) for first, last in _runs(numbers)]
        *runs, entry = await self._link.ask(*commands, ("LINDEX", keys.turns, numbers[-1]))
        elements = [element for run in runs for element in run]
        if entry is None or len(elements) != len(numbers):
            await self.tail(trial_id, NO_ROWS)
            raise NotFound(f"session {trial_id} has no turns {list(numbers)}")
        reply_at = decode_entry(entry).refs[-1]
        [packed] = await self._link.ask(("LINDEX", keys.texts, reply_at))
        if packed is None:
            refuse(trial_id, CLOSED)
        return TokenPath(path_ids(elements), unpack(packed))

    async def commit(
        self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, retry_key: RetryKey | None = None
    ) -> int:
        long = is_long(turn)
        encoded = encode_turn(turn, row, await self._said(turn) if long else None)
        keys = trial_keys(trial_id)
        which = (
            (place(retry_key, turn.choice), b"1" if retry_key.found else b"0") if retry_key is not None else (b"", b"0")
        )
        texts = await self._packed(self._known.packed(trial_id, encoded), long)
        reply = await self._run("commit", keys, _commit_args(encoded, texts, now, which))
        if reply[0] == RESEND:
            everything = await self._packed((pack(text.raw) for text in encoded.texts), long)
            reply = await self._run("commit", keys, _commit_args(encoded, everything, now, which))
        number: int = reply[0]
        if number == NO_PARENT:
            raise ParentLost(turn.parent_id, row.parent)
        if number < 0:
            if number in (CLOSED, SEALED):
                await self._came_late(trial_id, turn, now)
            refuse(trial_id, number)
        for entry in reply[1:]:
            on_record = decode_entry(entry)
            if not ends_alike(on_record.row, row):
                await self._came_late(trial_id, turn, now, tokens_of([entry]))
                raise RecordedOtherwise(turn.turn_id, on_record.completion_tokens)
        self._known.add(trial_id, encoded)
        turn.index = number
        if long:
            await self._pace.turn()  # the conversation's tree takes it in
        return number

    async def _said(self, turn: Turn) -> PromptTexts:
        """`said_in` a long turn."""
        await self._pace.turn()
        messages, images = apart(turn.messages)
        texts = await self._in_slices(map(text_of, (*images, *messages)))
        return PromptTexts(texts, len(images))

    async def _in_slices(self, work: Iterable[T]) -> list[T]:
        done: list[T] = []

        def one_by_one() -> Iterator[None]:
            for each in work:
                done.append(each)
                yield

        await self._pace.steps(one_by_one())
        await self._pace.turn()  # for what the caller does with all of them
        return done

    async def _packed(self, packed: Iterable[bytes], long: bool) -> list[bytes]:
        return await self._in_slices(packed) if long else list(packed)

    async def _came_late(self, trial_id: str, turn: Turn, now: float, recorded: Tokens | None = None) -> None:
        """A turn was refused, since its session takes none any more, or since something else is on record of it: `recorded`."""
        raise NotImplementedError

    async def mark_delivered(self, trial_id: str, turn_id: str, delivered: int) -> None:
        await self._run("delivered", [trial_keys(trial_id).numbers], [pack_id(turn_id), delivered])

    async def conversation(self, trial_id: str, numbers: Sequence[int]) -> list[list[Message]]:
        if not numbers:
            return []
        keys = trial_keys(trial_id)
        runs = await self._link.ask(*[("LRANGE", keys.turns, first, last) for first, last in _runs(numbers)])
        entries = [decode_entry(element) for run in runs for element in run]
        if len(entries) != len(numbers):
            await self.tail(trial_id, NO_ROWS)
            raise NotFound(f"session {trial_id} has no turns {list(numbers)}")
        positions = sorted({ref for entry in entries for ref in entry.refs[FIRST_MESSAGE:]})
        runs = await self._link.ask(*[("LRANGE", keys.texts, first, last) for first, last in _runs(positions)])
        packed = [element for run in runs for element in run]
        if len(packed) != len(positions):
            refuse(trial_id, CLOSED)
        texts = dict(zip(positions, packed, strict=True))
        return [together(unpack(texts[ref]) for ref in entry.refs[FIRST_MESSAGE:]) for entry in entries]

    async def hide(self, trial_id: str, turn_id: str) -> None:
        await self._run("hide", [trial_keys(trial_id).numbers], [pack_id(turn_id)])

    async def hidden(self, trial_id: str, turn_id: str) -> bool:
        name = _name(turn_id) + b"-"
        [found] = await self._link.ask(("HEXISTS", trial_keys(trial_id).numbers, name))
        return bool(found)

    async def supersede(self, trial_id: str, earlier: str, later: str) -> None:
        await self._run("supersede", [trial_keys(trial_id).numbers], [pack_id(earlier), pack_id(later)])

    async def refused(self, trial_id: str, key: bytes, *, began: float, now: float) -> None:
        args = [key, repr(began), repr(now), MOST_REFUSALS, int(RETRY_MEMORY_S * 1000)]
        keys = trial_keys(trial_id)
        await self._run("refused", [keys.again, keys.session], args)

    async def asked_again(self, trial_id: str, key: bytes, *, began: float, count: int, n: int, now: float) -> bool:
        args = [key, repr(began), count, n, repr(now), REFUSED_S, MOST_RETRIES, int(RETRY_MEMORY_S * 1000)]
        args.append(MOST_PLACES)
        keys = trial_keys(trial_id)
        outcome = await self._run("again", [keys.again, keys.session], args)
        if outcome < 0:
            refuse(trial_id, outcome)
        return bool(outcome)

    async def note(self, trial_id: str, seen: Sequence[Note]) -> None:
        told = msgspec.json.encode([note.model_dump() for note in seen])
        keys = [notes_key(trial_id), trial_keys(trial_id).session]
        outcome = await self._run("note", keys, [told, MOST_NOTES, int(NOTES_S * 1000)], writes=False)
        if outcome != 1:
            refuse(trial_id, outcome)

    async def notes(self, trial_id: str) -> Notes | None:
        [found] = await self._link.ask(("GET", notes_key(trial_id)))
        return None if found is None else read_json(Notes, found)

    async def annotate(self, trial_id: str, annotations: Mapping[str, TurnAnnotation]) -> None:
        told = [part for turn_id, each in annotations.items() for part in (turn_id, encode_annotation(each))]
        keys = [annotations_key(trial_id), trial_keys(trial_id).session]
        outcome = await self._run("annotate", keys, told, writes=False)
        if outcome != 1:
            refuse(trial_id, outcome)

    async def rotate_key(self, trial_id: str, generation: int | None) -> int:
        rotations = await self._run("rotate", [trial_keys(trial_id).session], [generation - 1 if generation else -1])
        if rotations < 0:
            refuse(trial_id, rotations)
        return int(rotations) + 1

    async def claim(
        self, trial_id: str, launcher: str, ttl_s: float, *, now: float, gone: Collection[str] = ()
    ) -> tuple[Session, Claimed]:
        keys = trial_keys(trial_id)
        for _ in range(CLAIM_ATTEMPTS):
            fields, doc = await self._link.ask(("HGETALL", keys.session), ("GET", keys.doc))
            head = alive(trial_id, fields, doc)
            is_open, waits = head.status == "open", head.awaits_reward
            found = claimed(head.claimed, launcher, ttl_s, now, is_open=is_open, awaits_reward=waits, gone=gone)
            if not found.granted:
                return session_of(trial_id, head, doc), found
            before = [fields.get(name, b"") for name in (b"claim", b"claim_by", b"claim_until")]
            epoch, by, until = found.claim
            args = [*before, epoch, by, repr(until), int(found.taken_over)]
            if await self._run("claim", [keys.session], args):
                head.rotations += found.taken_over
                return session_of(trial_id, head, doc), found
        raise StoreUnavailable(f"session {trial_id}: {CLAIM_ATTEMPTS} attempts to claim it met another claim")

    async def begin_task_step(self, trial_id: str, name: str | None) -> None:
        outcome = await self._run("task_step", [trial_keys(trial_id).session], [name or ""])
        if outcome != 1:
            refuse(trial_id, outcome)

    async def turns(self, trial_id: str, *, start: int = 0, limit: int | None = None) -> list[Turn]:
        await self.tail(trial_id, NO_ROWS)
        turns: list[Turn] = []
        while limit is None or len(turns) < limit:
            wanted = CHUNK_TURNS if limit is None else min(CHUNK_TURNS, limit - len(turns))
            chunk = await self._chunk(trial_id, trial_keys(trial_id), start + len(turns), wanted)
            turns += chunk
            if len(chunk) < wanted:
                break
        return turns

    async def _chunk(self, trial_id: str, keys: TrialKeys, start: int, count: int) -> list[Turn]:
        pipe = self._link.client.pipeline(transaction=False)
        for key in (keys.turns, keys.ids, keys.logprobs):
            pipe.lrange(key, start, start + count - 1)
        pipe.hget(keys.session, "status")
        raw, ids, logprobs, status = await self._link.call(pipe.execute())
        _check_there(trial_id, status)
        if not raw:
            return []
        entries = [decode_entry(element) for element in raw]
        positions = sorted({ref for entry in entries for ref in entry.refs})
        pipe = self._link.client.pipeline(transaction=False)
        names = [_name(entry.row.turn_id) for entry in entries]
        pipe.hmget(keys.numbers, [name + mark for mark in (b"", b"<", b">") for name in names])
        pipe.hmget(annotations_key(trial_id), [entry.row.turn_id for entry in entries])
        for first, last in _runs(positions):
            pipe.lrange(keys.texts, first, last)
        pipe.hget(keys.session, "status")
        numbers, annotations, *runs, status = await self._link.call(pipe.execute())
        _check_there(trial_id, status)
        packed = [element for run in runs for element in run]
        # Commits between the reads make the later ones longer.
        if len(packed) != len(positions) or min(len(ids), len(logprobs)) < len(raw):
            refuse(trial_id, CLOSED)
        texts = dict(zip(positions, packed, strict=True))
        turns = [
            decode_turn(
                start + i,
                entry,
                ids[i],
                logprobs[i],
                lambda at: unpack(texts[at]),
                _delivered(numbers[i]),
                _turn_id(numbers[len(entries) + i]),
                _turn_id(numbers[2 * len(entries) + i]),
            )
            for i, entry in enumerate(entries)
        ]
        for each, annotation in zip(turns, annotations, strict=True):
            each.annotation = decode_annotation(annotation)
        return turns


def _commit_args(encoded: EncodedTurn, packed: Sequence[bytes], now: float, which: tuple[bytes, bytes]) -> list[Any]:
    state = b"open" if encoded.open else b"1" if encoded.partial else b"0"
    args: list[Any] = [
        pack_id(encoded.turn_id), state, encoded.row, encoded.meta, encoded.ids, encoded.logprobs,
        encoded.new_prompt_tokens, encoded.completion_tokens, encoded.constrained_tokens, b"1" if encoded.fork else b"0",
        repr(encoded.began_at), repr(now), pack_id(encoded.retry_of) or b"", *which, encoded.parent_number, encoded.parent or b"",
    ]  # fmt: skip
    for text, rest in zip(encoded.texts, packed, strict=True):
        args += (text.digest, rest)
    args[-2] = b""  # the reply: its own, never looked up
    return args


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """HGETALL as a script returns it."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _name(turn_id: str) -> bytes:
    """A turn's field in `numbers`; other fields begin with it."""
    packed = pack_id(turn_id)
    return packed if isinstance(packed, bytes) else str(packed).encode()


def _turn_id(raw: bytes | None) -> str | None:
    """A turn id in `numbers`, as 6 bytes or as text."""
    return None if raw is None else raw.hex() if len(raw) == 6 else raw.decode()


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as inclusive ranges, in the order given."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _delivered(known: bytes | None) -> int | None:
    _, marked, count = (known or b"").partition(b":")
    return int(count) if marked else None


def alive(trial_id: str, fields: dict[bytes, bytes], doc: bytes | None) -> Head:
    """The head of a session that is there, from the fields of its hash. Raises: NotFound; Gone: it was deleted."""
    if not fields:
        refuse(trial_id, MISSING)
    if doc is None or fields[b"status"] == b"deleted":
        refuse(trial_id, CLOSED)
    return head_from_hash(fields)


def _check_there(trial_id: str, status: bytes | None) -> None:
    """That what was read before its status is whole: a session goes in one step, for good or into the archive.

    Raises: NotFound, Gone.
    """
    if status is None:
        refuse(trial_id, MISSING)
    if status == b"deleted":
        refuse(trial_id, CLOSED)


def refuse(trial_id: str, outcome: int) -> NoReturn:
    """What a script's refusal means to the caller."""
    if outcome == MISSING:
        raise NotFound(f"no session {trial_id}")
    raise Gone(f"session {trial_id} is closed")


MAX_KNOWN = 16_384  # about 2 MB


class KnownTexts:
    """Texts that need not be sent to Redis again: a guess that saves bytes, never one that the record depends on.

    Settings and tools are the same from turn to turn, and tools can be tens of kilobytes. A text left out on a wrong guess (the
    trial was deleted and made anew, say) is asked for by commit.lua, and the commit is sent again whole.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], None] = {}

    def packed(self, trial_id: str, encoded: EncodedTurn) -> Iterator[bytes]:
        """What to send for each text: b"" for one that is believed to be there."""
        shared = encoded.shared_texts
        for i, text in enumerate(encoded.texts):
            yield b"" if i < shared and (trial_id, text.digest) in self._known else pack(text.raw)

    def add(self, trial_id: str, encoded: EncodedTurn) -> None:
        """After a commit. The oldest are forgotten first."""
        for text in encoded.texts[: encoded.shared_texts]:
            self._known[trial_id, text.digest] = None
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

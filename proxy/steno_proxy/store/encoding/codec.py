"""Encodes and decodes stored turns, byte for byte the same in both stores. The layout in prose is docs/recording-format.md.

    turns      msgpack [row, refs, meta]: the IndexRow (its turn_id as 6 bytes); positions in texts; all else (TurnMeta)
    ids        msgpack [bin new prompt ids, bin completion ids], int32 LE
    logprobs   float32 LE, one per completion id
    texts      JSON of the settings, the tools, images (`images.py`), each new message and the reply, in the order of refs

Nothing is said twice: what the row knows is not in TurnMeta, what turns have in common (names, sampling law, options, tools) is a
text that they share, and tool-call ids that clients see are made again from the turn's id. That keeps I5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from steno.contracts.chat import Message
from steno.contracts.records import OPEN, IndexRow, Timings, TokenSpan, Turn, WorkerSpan
from steno_proxy.pace import LARGE_BYTES, MANY
from steno_proxy.store.encoding.images import apart, data_of, together
from steno_proxy.store.encoding.texts import StoredText, text

FORMAT = 1
_HEX_ID = re.compile(r"[0-9a-f]{12}")
_VOLATILE = ("max_tokens", "seed", "max_completion_tokens")
"""Sampling fields that change from turn to turn (clamped, counted up). TurnMeta keeps them by position; the rest is shared."""
_NAMES = ("dialect", "model", "served_model", "worker_id", "policy")
FIRST_MESSAGE = 2
"""Where messages begin in `refs`, after the settings and the tools; first the images that they show."""
TICK_S = 2.0**-22
"""Seconds. The spacing of float64 near today's Unix times (until 2038), so that ticks are exact and shorter than floats."""
_ENTRY_HEAD = b"\x93"  # msgpack: an array of three


class TurnMeta(msgspec.Struct, array_like=True):
    """What neither the index row nor a shared text says of a turn.

    parent: the parent's turn_id as 6 bytes (as text if it is not 12 hex digits). finish: None if it is the row's.
    calls: prefix of the clients' tool-call ids `<prefix>_<turn_id>_<i>`, the model's own being the row's; or the whole map.
    prompt_tokens, completion_tokens: None if the row says them. versions: the version alone where one sampled them all.
    law, asked: the volatile sampling fields, by position in _VOLATILE; asked None: the same as law.
    choice: the request's first turn as `parent` is, and the place in its answer, where n > 1. retry_of: as `parent`.
    queued: Unix s. timings: started, first and last token as ticks after it (or in Unix s, where ticks are not exact).
    """

    parent: Any  # bytes | str | None, which msgspec will not tell apart
    fork_reason: str | None
    attempt: int
    prompt_tokens: int | None
    completion_tokens: int | None
    prompt_digest: bytes
    versions: str | list[tuple[str, int, int]]
    constrained: list[tuple[int, int]]
    finish: str | None
    error: str | None
    delivered: int | None
    calls: str | dict[str, str] | None
    thinking_kept: bool
    cached_tokens: int
    law: dict[int, Any]
    asked: dict[int, Any] | None
    queued: float
    timings: tuple[int | float | None, ...]
    reasoning_tokens: int = 0
    choice: tuple[Any, int] | None = None
    retry_of: Any = None
    stop: str = ""
    workers: list[tuple[str, int, int]] = []
    mixed_kv: bool = False
    replayed: int | None = None

    def at(self, position: int) -> float | None:
        """A time in Unix s, by its position in `timings`."""
        moment = self.timings[position]
        return self.queued + moment * TICK_S if isinstance(moment, int) else moment


class DecodedTurn(msgspec.Struct):
    """An element of turns, decoded; its ids and texts are not."""

    row: IndexRow
    refs: list[int]
    meta: TurnMeta

    @property
    def completion_tokens(self) -> int:
        known = self.row.completion_tokens if self.meta.completion_tokens is None else self.meta.completion_tokens
        return known or 0

    @property
    def constrained_tokens(self) -> int:
        return sum(end - start for start, end in self.meta.constrained)

    @property
    def prompt_tokens(self) -> int:
        known = self.meta.prompt_tokens
        return self.row.path_tokens - self.completion_tokens if known is None else known


class _Stored(msgspec.Struct, array_like=True):
    row: list[Any]
    refs: list[int]
    meta: TurnMeta


class _StoredRow(msgspec.Struct, array_like=True):
    row: list[Any]


class EncodedTurn(msgspec.Struct):
    """A turn ready for rest, but for `refs`, which the store knows. `texts`: settings, tools, images…, messages…, reply.
    `parent`: as in `TurnMeta`; None where the row names none."""

    turn_id: str
    parent: Any
    parent_number: int
    row: bytes
    meta: bytes
    ids: bytes
    logprobs: bytes
    texts: list[StoredText]
    shared_texts: int
    new_prompt_tokens: int
    completion_tokens: int
    constrained_tokens: int
    fork: bool
    partial: bool
    open: bool
    began_at: float
    retry_of: str | None


_ROW_FIELDS = len(IndexRow.__struct_fields__)
_encode = msgspec.msgpack.Encoder().encode
_decode_stored = msgspec.msgpack.Decoder(_Stored).decode
_decode_stored_row = msgspec.msgpack.Decoder(_StoredRow).decode
_decode_ids = msgspec.msgpack.Decoder(list[bytes]).decode


class PromptTexts(msgspec.Struct):
    """The texts of what was said before the reply: images first, then messages."""

    texts: list[StoredText]
    images: int


def said_in(turn: Turn) -> PromptTexts:
    """The texts of a turn's messages. Linear in them."""
    messages, images = apart(turn.messages)
    return PromptTexts([*map(text, images), *map(text, messages)], len(images))


def is_long(turn: Turn) -> bool:
    """Whether its messages are more than one slice of work (`pace.py`)."""
    return len(turn.messages) > MANY or sum(map(_length, turn.messages)) > LARGE_BYTES


def _length(message: Message) -> int:
    """About, in bytes: what of it can be long."""
    content = message.get("content") or ""
    length = len(content)
    if not isinstance(content, str):
        length += sum(len(part.get("text") or data_of(part)) + 64 for part in content)
    return length + sum(len(call["function"]["arguments"]) for call in message.get("tool_calls") or ())


def encode_turn(turn: Turn, row: IndexRow, said: PromptTexts | None = None) -> EncodedTurn:
    """Linear in the turn's own content. said: `said_in` the turn, if that is known. Raises ValueError when row and turn are not
    of the same turn."""
    if row.turn_id != turn.turn_id or row.partial != turn.partial:
        raise ValueError(f"the index row is of turn {row.turn_id}, not of {turn.turn_id}, or disagrees about `partial`")
    law, volatile_law = _split(turn.law)
    asked, volatile_asked = _split(turn.asked)
    settings: dict[str, Any] = {name: getattr(turn, name) for name in _NAMES}
    settings |= {"law": law, "asked": asked, "options": turn.options}
    if turn.task_step is not None:
        settings["task_step"] = turn.task_step
    timings = turn.timings
    said = said or said_in(turn)
    completion_tokens = turn.completion_tokens
    parent = pack_id(turn.parent_id)
    meta = TurnMeta(
        parent=parent,
        fork_reason=turn.fork_reason,
        attempt=turn.attempt,
        prompt_tokens=None if turn.prompt_tokens == row.path_tokens - completion_tokens else turn.prompt_tokens,
        completion_tokens=None if completion_tokens == row.completion_tokens else completion_tokens,
        prompt_digest=turn.prompt_digest,
        versions=_pack_versions(turn.versions, completion_tokens),
        constrained=turn.constrained,
        finish=None if turn.finish_reason == row.finish else turn.finish_reason,
        error=turn.error,
        delivered=turn.delivered,
        calls=_pack_calls(turn, row),
        thinking_kept=turn.thinking_kept,
        cached_tokens=turn.cached_tokens,
        law=volatile_law,
        asked=None if volatile_asked == volatile_law else volatile_asked,
        queued=timings.queued,
        timings=tuple(_ticks(timings.queued, (timings.started, timings.first_token, timings.last_token))),
        reasoning_tokens=turn.reasoning_tokens,
        choice=None if turn.answer_id is None else (pack_id(turn.answer_id), turn.choice),
        retry_of=pack_id(turn.retry_of),
        stop=turn.stop,
        workers=[(span.worker_id, span.start, span.end) for span in turn.workers],
        mixed_kv=turn.mixed_kv,
        replayed=turn.replayed,
    )
    return EncodedTurn(
        turn_id=turn.turn_id,
        parent=parent if row.parent >= 0 else None,
        parent_number=row.parent,
        row=_encode([pack_id(row.turn_id), *msgspec.structs.astuple(row)[1:]]),
        meta=_encode(meta),
        ids=_encode([turn.new_prompt_ids, turn.completion_ids]),
        logprobs=turn.sampling_logprobs,
        texts=[text(settings), text(turn.tools), *said.texts, text(turn.reply)],
        shared_texts=FIRST_MESSAGE + said.images,
        new_prompt_tokens=len(turn.new_prompt_ids) // 4,
        completion_tokens=completion_tokens,
        constrained_tokens=sum(end - start for start, end in turn.constrained),
        fork=turn.fork_reason is not None,
        partial=turn.partial,
        open=row.finish == OPEN,
        began_at=timings.queued,
        retry_of=turn.retry_of,
    )


def join_entry(encoded: EncodedTurn, refs: Sequence[int]) -> bytes:
    """The element of turns. The Redis store does the same in commit.lua, where the positions are known."""
    return _ENTRY_HEAD + encoded.row + _encode(list(refs)) + encoded.meta


def decode_entry(raw: bytes) -> DecodedTurn:
    """An element of turns -> its row, the positions of its texts, and its `TurnMeta`."""
    stored = _decode_stored(raw)
    return DecodedTurn(_row(stored.row), stored.refs, stored.meta)


def decode_row(raw: bytes) -> IndexRow:
    """The index row of an element of turns; the rest is skipped, not decoded."""
    return _row(_decode_stored_row(raw).row)


def _row(fields: list[Any]) -> IndexRow:
    return IndexRow(unpack_id(fields[0]), *fields[1:_ROW_FIELDS])


def path_ids(raw: Sequence[bytes]) -> bytes:
    """Elements of ids -> prompt and completion ids of all of them, concatenated, int32 LE."""
    return b"".join([part for element in raw for part in _decode_ids(element)])


def decode_turn(
    index: int,
    entry: DecodedTurn,
    ids: bytes,
    logprobs: bytes,
    text_at: Callable[[int], Any],
    delivered: int | None,
    superseded_by: str | None = None,
    retry_of: str | None = None,
) -> Turn:
    """Put a turn back together.

    Args: text_at: the value of the text at a position. delivered: a count recorded after the commit, None if there is none.
        superseded_by: recorded with the commit of that turn. retry_of: found out when the other turn was recorded, or this one.
    """
    row, meta = entry.row, entry.meta
    settings, tools, *said = [text_at(position) for position in entry.refs]
    *messages, reply = together(said)
    new_prompt_ids, completion_ids = _decode_ids(ids)
    return Turn(
        turn_id=row.turn_id,
        parent_id=unpack_id(meta.parent),
        fork_reason=meta.fork_reason,
        index=index,
        attempt=meta.attempt,
        answer_id=unpack_id(meta.choice[0]) if meta.choice else None,
        choice=meta.choice[1] if meta.choice else 0,
        retry_of=retry_of if meta.retry_of is None else unpack_id(meta.retry_of),
        superseded_by=superseded_by,
        new_prompt_ids=new_prompt_ids,
        prompt_tokens=entry.prompt_tokens,
        prompt_digest=meta.prompt_digest,
        completion_ids=completion_ids,
        upstream_tokens=(entry.completion_tokens or None) if not completion_ids else None,
        sampling_logprobs=logprobs,
        versions=_unpack_versions(meta.versions, len(completion_ids) // 4),
        constrained=meta.constrained,
        finish_reason=row.finish if meta.finish is None else meta.finish,
        stop=meta.stop,
        workers=[WorkerSpan(worker_id=name, start=start, end=end) for name, start, end in meta.workers],
        mixed_kv=meta.mixed_kv,
        replayed=meta.replayed,
        tokenizer=row.tokenizer.hex(),
        task_step=settings.get("task_step"),
        partial=row.partial,
        error=meta.error,
        delivered=meta.delivered if delivered is None else delivered,
        asked=settings["asked"] | _named(meta.law if meta.asked is None else meta.asked),
        law=settings["law"] | _named(meta.law),
        options=settings["options"],
        messages=messages,
        reply=reply,
        call_ids=_unpack_calls(meta.calls, row),
        tools=tools,
        thinking_kept=meta.thinking_kept,
        cached_tokens=meta.cached_tokens,
        reasoning_tokens=meta.reasoning_tokens,
        timings=Timings(queued=meta.queued, started=meta.at(0), first_token=meta.at(1), last_token=meta.at(2)),
        **{name: settings[name] for name in _NAMES},
    )


def _split(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[int, Any]]:
    volatile = {i: fields[name] for i, name in enumerate(_VOLATILE) if name in fields}
    if not volatile:
        return fields, volatile
    return {name: value for name, value in fields.items() if name not in _VOLATILE}, volatile


def _named(volatile: dict[int, Any]) -> dict[str, Any]:
    return {_VOLATILE[position]: value for position, value in volatile.items()}


def _pack_versions(spans: list[TokenSpan], completion_tokens: int) -> str | list[tuple[str, int, int]]:
    if len(spans) == 1 and spans[0].start == 0 and spans[0].end == completion_tokens:
        return spans[0].version
    return [(span.version, span.start, span.end) for span in spans]


def _unpack_versions(packed: str | list[tuple[str, int, int]], completion_tokens: int) -> list[TokenSpan]:
    spans = [(packed, 0, completion_tokens)] if isinstance(packed, str) else packed
    return [TokenSpan(version=version, start=start, end=end) for version, start, end in spans]


def _ticks(queued: float, times: Iterable[float | None]) -> Iterator[int | float | None]:
    """Times as ticks after `queued` where that loses nothing, else as they are."""
    for time in times:
        ticks = None if time is None else round((time - queued) / TICK_S)
        yield ticks if ticks is not None and queued + ticks * TICK_S == time else time


def pack_id(turn_id: str | None) -> bytes | str | None:
    """Turn ids at rest: 6 bytes where they are 12 lowercase hex digits."""
    return bytes.fromhex(turn_id) if turn_id is not None and _HEX_ID.fullmatch(turn_id) else turn_id


def unpack_id(packed: Any) -> Any:
    """The turn id that `pack_id` packed."""
    return packed.hex() if isinstance(packed, bytes) else packed


def _pack_calls(turn: Turn, row: IndexRow) -> str | dict[str, str] | None:
    if not turn.call_ids:
        return None
    prefix = next(iter(turn.call_ids)).partition("_" + turn.turn_id)[0]
    return prefix if _unpack_calls(prefix, row) == turn.call_ids else turn.call_ids


def _unpack_calls(calls: str | dict[str, str] | None, row: IndexRow) -> dict[str, str]:
    if isinstance(calls, str):
        return {f"{calls}_{row.turn_id}_{i}": own for i, own in enumerate(row.own_call_ids)}
    return calls or {}

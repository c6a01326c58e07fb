"""The interface of a wire format: its routes, its key header, how it parses requests and writes answers and errors.

A dialect is a folder of its own. It is pure: bytes of a request in, a `CanonicalRequest` out; what the worker said in, bytes of
the answer out. It keeps no store, no clock and no socket, and it tokenises nothing (I6). The turn
(`steno_proxy/turns/service.py`) decides *when* bytes leave (I3); the dialect decides only what they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import msgspec

from steno.contracts.chat import CanonicalRequest, TokenLogprob, ToolCallPiece
from steno.contracts.errors import BadRequest, StenoError
from steno.contracts.records import Turn
from steno_proxy.dialects import bounds

T = TypeVar("T")
_INDEX = re.compile(r"\[(\d+)\]")
_FLOAT = re.compile(r"Expected `int\b.*`, got `float`")
MAX_NESTING = 200
"""The deepest nesting of JSON that a turn records. Pydantic, which writes the record's JSON, stops at 255."""
MOST_SURROGATES = 100_000
"""The most surrogate escapes checked in a body (50 ms); up to 64 pairs in a row count as one. A half after them is refused."""
_HIGH, _LOW = rb"[89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SURROGATES = re.compile(
    rb"\\u[dD](?:(%b%b(?:\\u[dD]%b%b){0,63})|[89a-fA-F][0-9a-fA-F]{2})" % (_HIGH, _LOW, _HIGH, _LOW)
)
"""Group 1: whole pairs; without it, the match is half of a pair. `re` searches a body for the first two bytes of the pattern, and
tries the pattern only there.
Possessive quantifiers of such groups match wrongly before Python 3.11.5."""


@dataclass(slots=True)
class Piece:
    """What arrived of one choice: text, reasoning, fragments of tool calls (with the ids that clients see), tokens.

    tokens: only when the client asked for log-probabilities. ids: int32 LE, of the same tokens.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    ids: bytes = b""


@dataclass(slots=True)
class Choice:
    """One finished completion, as its client is to see it.

    message: canonical assistant message (`role`, `content`, `reasoning_content`?, `tool_calls`? with client-visible ids).
    tokens: of the whole completion, only when the client asked for log-probabilities.
    stop: the stop string that ended it, if one did.
    reasoning_tokens: of the completion's, those that were reasoning (the markers around it go with what follows them).
    ended: when its last token came, Unix seconds; 0.0: not known.
    ids, prompt_ids: of the completion and of its prompt, int32 LE; only for a client that asked for them.
    """

    index: int
    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    tokens: list[TokenLogprob] = field(default_factory=list)
    stop: str = ""
    reasoning_tokens: int = 0
    ended: float = 0.0
    ids: bytes = b""
    prompt_ids: bytes = b""

    @classmethod
    def on_record(cls, index: int, turn: Turn) -> Choice:
        """The choice of a recorded turn, to be answered again. Texts of tokens are not on record (I6), so there are no
        log-probabilities. If the turn replayed another's record, its answer is the end of its new prompt ids."""
        if turn.replayed is not None:
            said = len(turn.new_prompt_ids) - 4 * turn.replayed
            turn = turn.model_copy(update={
                "completion_ids": turn.new_prompt_ids[said:], "new_prompt_ids": turn.new_prompt_ids[:said],
                "prompt_tokens": turn.prompt_tokens - turn.replayed,
            })  # fmt: skip
        return cls(
            index=index,
            message=turn.reply,
            finish_reason=turn.finish_reason,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
            cached_tokens=turn.cached_tokens,
            stop=turn.stop,
            reasoning_tokens=turn.reasoning_tokens,
            ended=turn.timings.last_token or turn.timings.queued,
            ids=turn.completion_ids,
        )


@dataclass(slots=True, frozen=True)
class Header:
    """What every answer repeats: `answer_id` is the first sibling's turn id, `created` in Unix seconds, `model` the name
    that the client asked for (the served one if it gave none)."""

    answer_id: str
    created: int
    model: str


class Writer(Protocol):
    """Encodes one streamed answer. Each method returns the bytes of whole events, possibly none, for one choice."""

    def begin(self, index: int, prompt_tokens: int, cached_tokens: int) -> bytes:
        """Before the first piece of a choice."""
        ...

    def closes(self, index: int, piece: Piece) -> bool:
        """Whether the events of this piece close a block (an item): one that came before it, or one within it.

        They then leave only after the turn so far is in the store, as an open turn (I3): a client may act on a closed block,
        and keeps it when the stream breaks. Formats without blocks say False. Asked once for each piece, before `piece`.
        """
        ...

    def piece(self, index: int, piece: Piece) -> bytes: ...
    def finish(self, choice: Choice) -> bytes:
        """The events that end a choice. They leave only after its turn is committed (I3)."""
        ...

    def end(self, choices: Sequence[Choice]) -> bytes:
        """The last events of all."""
        ...


@runtime_checkable
class FailureWriter(Protocol):
    """A writer whose format ends a failed stream with events that depend on what it has said so far."""

    def broken(self, error: StenoError) -> bytes:
        """As `Dialect.broken`; it is called in place of that method."""
        ...


@runtime_checkable
class PromptIdsWriter(Protocol):
    """A writer that can show the ids of the prompt, to a client that asked for them (`CanonicalRequest.returns_ids`)."""

    def prompt(self, ids: bytes) -> None:
        """int32 LE; before `begin`."""
        ...


class Dialect(Protocol):
    """One wire format. Instances are stateless and shared.

    name: recorded on each turn. paths: of the routes, after `/{trial_id}`. call_prefix: of the tool-call ids that
    clients of this dialect expect. keepalive: bytes that clients skip, sent while a stream is idle.
    """

    name: ClassVar[str]
    paths: ClassVar[tuple[str, ...]]
    call_prefix: ClassVar[str]
    keepalive: ClassVar[bytes]

    def parse(self, body: bytes) -> CanonicalRequest:
        """Raises: BadRequest with the dotted path of the field to blame."""
        ...

    def writer(self, request: CanonicalRequest, header: Header) -> Writer: ...
    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        """The body of an error answer. request_id: as in the answer's head, for formats that repeat it."""
        ...

    def broken(self, error: StenoError) -> bytes:
        """The events that end a stream which failed after its first byte; b"": the connection is broken instead."""
        ...

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI operation of this dialect's routes, without its parameters."""
        ...


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Bytes of JSON -> the dialect's typed body. Fields it does not declare are ignored, null counts as absent. Half of a
    surrogate pair is read as U+FFFD, and 4096.0 as an integer.

    Raises:
        BadRequest: not JSON, nested beyond reason, or a field of the wrong type (named by its dotted path).
    """
    try:
        try:
            return _read(decoder, body)
        except msgspec.ValidationError as error:
            raise _refusal(str(error), body) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _read(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a body. Floats for integers, and halves of surrogate pairs, are mended only after msgspec has refused the body: one
    more pass over it for each of the two."""
    tried: set[Callable[[bytes], bytes]] = set()
    while True:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if _FLOAT.match(str(error)) is None or _whole_numbers in tried:
                raise
            mend = _whole_numbers
        except msgspec.DecodeError:
            if whole_pairs in tried:
                raise
            mend = whole_pairs
        tried.add(mend)
        body = mend(body)


def _whole_numbers(body: bytes) -> bytes:
    try:
        return bounds.whole_numbers(body)
    except msgspec.DecodeError:  # it stopped at the number, before it came to half of a pair
        return bounds.whole_numbers(whole_pairs(body))


def whole_pairs(body: bytes) -> bytes:
    """JSON text with U+FFFD for each escape that is half of a surrogate pair. It gets no longer.

    Agents cut texts inside of an emoji, models sample such escapes, and clients send either again with each request.
    """
    return _SURROGATES.sub(_mended, body, MOST_SURROGATES)


def _mended(found: re.Match[bytes]) -> bytes:
    said: bytes = found[0]
    if _is_escaped(found.string, found.start()):  # then this is text, and what follows it may be a half
        return said[:6] + _SURROGATES.sub(_mended, said[6:])
    return said if found[1] else rb"\ufffd"


def _is_escaped(body: bytes, at: int) -> bool:
    """Whether an odd number of backslashes stands before this one."""
    looked = 64
    while True:
        before = body[max(at - looked, 0) : at]
        other = before.rstrip(b"\\")
        if other or looked >= at:
            return (len(before) - len(other)) % 2 == 1
        looked *= 2


def _refusal(said: str, body: bytes) -> BadRequest:
    """What msgspec said of a body, in the words that an agent gets."""
    message, _, where = said.partition(" - at `")
    where = where.rstrip("`")
    path = dotted(where)
    if message.startswith("Object missing required field `"):
        missing = message.removeprefix("Object missing required field `").rstrip("`")
        path = ".".join(part for part in (path, missing) if part)
        return BadRequest(f"{path} is required", field=path)
    try:
        refused = bounds.outside(message, where, body)
    except msgspec.DecodeError:
        refused = bounds.outside(message, where, whole_pairs(body))
    if refused is not None:
        return refused
    return BadRequest(f"{path or 'the body'}: {message[:1].lower()}{message[1:]}", field=path or None)


def dotted(path: str) -> str:
    """msgspec's `$.messages[3].role` -> `messages.3.role`."""
    return _INDEX.sub(r".\1", path.removeprefix("$")).replace("[...]", "").lstrip(".")


def check_wire(name: str, value: Any) -> None:
    """What clients may nest freely (schemas, template arguments, metadata) must fit the relay's frames and every view of it.

    Raises: BadRequest naming the field: an integer beyond 64 bits has no place in a frame; deeper than `MAX_NESTING`, it has none
        in a record's JSON.
    """
    try:
        size = len(msgspec.msgpack.encode(value))
    except OverflowError:
        raise BadRequest(f"{name}: an integer in it does not fit in 64 bits", field=name) from None
    if size > MAX_NESTING and _nested_deeper(value, MAX_NESTING):
        raise BadRequest(f"{name}: nested deeper than {MAX_NESTING}", field=name)


def _nested_deeper(value: Any, most: int) -> bool:
    """Whether an object or a list in `value` has more than so many around it. Written as loops, since each turn brings all of its
    tools again: 6 us for one of 1 kB."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most + 1):
        inner = []
        for one in level:
            for item in one.values() if isinstance(one, dict) else one:
                if isinstance(item, dict | list):
                    inner.append(item)  # twice as fast as a comprehension of the other loops
        if not inner:
            return False
        level = inner
    return True

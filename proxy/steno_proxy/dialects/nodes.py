"""Counts the objects and values of a JSON body in its bytes, before it is parsed.

What a request costs in time and memory goes by its objects and arrays (messages, parts, calls, tools, parts of schemas) and only
then by its bytes: 26 MB of empty messages are 900,000 of them. A decoder would find that out by making them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from steno.contracts.chat import Message
from steno.contracts.errors import BodyTooLarge

VALUES_PER_NODE = 10
"""A body may hold so many values (numbers, strings, objects …) for each object or array that it may hold, since a value costs a
tenth: a prompt may be given as hundreds of thousands of token ids."""
ARGUMENT_VALUES_PER_NODE = 2
"""The same, of the JSON inside the calls' arguments: each value is made, made equal and written again to compare a history."""
MOST_ESCAPES = 3_000_000
"""Backslashes. One costs a decoder as much as ten plain characters. So many are more text than any context takes."""
SETTING = "max_request_nodes"
SLICE_BYTES = 1 << 20
_OTHERS = bytes(set(range(256)) - set(b'"{[,'))


class NodeCounter:
    """A count that goes on from piece to piece of one JSON text. Up to where the text is no JSON it is exact.

    nodes: objects and arrays. values: all, them included, without keys; what is empty may count twice.
    escapes: backslashes.
    """

    __slots__ = ("_inside", "_skip", "_values", "escapes", "nodes")

    def __init__(self) -> None:
        self.nodes = self._values = self.escapes = 0
        self._inside = False  # of a string
        self._skip = False  # the next byte is escaped by the last one

    @property
    def values(self) -> int:
        return self._values + self.nodes

    def take(self, piece: bytes) -> None:
        self.escapes += piece.count(b"\\")
        if self._skip:
            piece, self._skip = piece[1:], False
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece, self._skip = piece[:-1], True
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Of a text without escaped quotes, every second part between quotes is inside a string.
        parts = piece.translate(None, _OTHERS).split(b'"')
        outside = b"".join(parts[self._inside :: 2])
        self._inside ^= len(parts) % 2 == 0
        self.nodes += outside.count(b"{") + outside.count(b"[")
        self._values += outside.count(b",")


def unbounded(body: bytes, most_nodes: int) -> bool:
    """Whether a body is long enough to be more than it may: an object or an array takes two bytes at least."""
    return len(body) > 2 * most_nodes


def check_nodes(body: bytes, most_nodes: int) -> Iterator[None]:
    """Yields after each slice that was counted, of SLICE_BYTES: some milliseconds.

    Raises: BodyTooLarge: more objects and arrays than `most_nodes`, more values or escapes than go with it.
    """
    found, most_values = NodeCounter(), VALUES_PER_NODE * most_nodes
    for at in range(0, len(body), SLICE_BYTES):
        found.take(body[at : at + SLICE_BYTES])
        if found.nodes > most_nodes:
            raise BodyTooLarge(
                f"the body holds at least {found.nodes} objects and arrays (messages, parts, calls, tools, parts of schemas); "
                f"{SETTING} is {most_nodes}"
            )
        if found.values > most_values:
            raise BodyTooLarge(
                f"the body holds at least {found.values} values; {VALUES_PER_NODE} times {SETTING} is {most_values}"
            )
        if found.escapes > MOST_ESCAPES:
            raise BodyTooLarge(
                f"the body holds at least {found.escapes} backslashes, at most {MOST_ESCAPES} are allowed: "
                "send text as UTF-8, not as \\u escapes"
            )
        yield


def check_arguments(messages: Sequence[Message], most_nodes: int) -> Iterator[None]:
    """The JSON that stands in strings: the arguments of calls. Yields after each slice, and each message that has some.

    Raises: BodyTooLarge: more values in all than go with `most_nodes`.
    """
    most, values = ARGUMENT_VALUES_PER_NODE * most_nodes, 0
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not calls:
            continue
        for call in calls:
            arguments: str = call["function"]["arguments"]
            if "," in arguments or "[" in arguments:
                found, raw = NodeCounter(), arguments.encode("utf-8", "replace")
                for at in range(0, len(raw), SLICE_BYTES):
                    found.take(raw[at : at + SLICE_BYTES])
                    yield
                values += found.values
        if values > most:
            raise BodyTooLarge(
                f"the arguments of calls hold at least {values} values up to message {i}; "
                f"{ARGUMENT_VALUES_PER_NODE} times {SETTING} is {most}",
                field="messages",
            )
        yield

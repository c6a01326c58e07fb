"""The one built-in tool format, as Qwen and Hermes models write it: `<think>…</think>` and `<tool_call>{…}</tool_call>`.

Owns the cutting of one completion's text into reasoning, content and tool calls, as it comes. Any cutting of the text gives the
same result. Text is held back only while it may still become part of a marker or of a call's head (`{"name": …,
"arguments": `); white space beside markers, which the template adds again, is dropped.

    text                                                    becomes
    <think> first, or opened by the prompt, to </think>     reasoning, without the line breaks at its ends
    <tool_call>{"name": N, "arguments": {…                  a call; its arguments as sampled, as they come
    other orders of keys, arguments as a string or absent   a call, once </tool_call> or the end is there
    anything else after <tool_call>                         content, every character of it
    what follows the arguments and is not }</tool_call>     content (the call has been told by then)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto

from steno.contracts.chat import ToolCallPiece
from steno_worker.chat.interfaces import ParsedText

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_HEAD_CHARS = 1024  # a head that is longer waits for </tool_call>: each token looks at it again
_INSIDE = re.compile(r'["{}\[\]<]')  # all that matters to the nesting outside a string
_IN_STRING = re.compile(r'["\\]')


class _Mode(Enum):
    START = auto()  # nothing but white space yet: <think> may come
    REASONING = auto()
    CONTENT = auto()
    HEAD = auto()  # after <tool_call>, before the arguments
    ARGUMENTS = auto()
    TAIL = auto()  # after the arguments, before </tool_call>


class HermesParser:
    """Parses one completion in Hermes's format: `<think>` and `<tool_call>`.

    tools: whether calls are looked for. thinking: the generation prompt has opened `<think>`.
    Attributes: closed_calls: how many calls are complete, closing marker included.
    """

    def __init__(self, *, tools: bool = True, thinking: bool = False) -> None:
        self.closed_calls = 0
        self._tools = tools
        self._mode = _Mode.REASONING if thinking else _Mode.START
        self._text = ""
        self._calls = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._bare = True  # reasoning or content has shown nothing yet: line breaks at its start are dropped
        self._after_call = False
        self._gap = ""  # white space dropped before <tool_call>; comes back if that was no call
        self._steps: dict[_Mode, Callable[[ParsedText, bool], bool]] = {
            _Mode.START: self._start,
            _Mode.REASONING: self._reasoning,
            _Mode.CONTENT: self._content,
            _Mode.HEAD: self._head,
            _Mode.ARGUMENTS: self._arguments,
            _Mode.TAIL: self._tail,
        }

    def feed(self, text: str, ids: Sequence[int] = (), *, final: bool = False) -> ParsedText:
        """`ids` are not looked at: the markers are text in every tokenizer."""
        parsed = ParsedText()
        self._text += text
        while (self._text or (final and self._mode is _Mode.HEAD)) and self._steps[self._mode](parsed, final):
            pass
        return parsed

    # Each step takes what it can from self._text and says whether another step may find more to do.

    def _start(self, parsed: ParsedText, final: bool) -> bool:
        bare = self._text.lstrip()
        if bare.startswith(THINK):
            self._text = bare[len(THINK) :]
            self._mode = _Mode.REASONING
            return True
        if THINK.startswith(bare) and not final:
            return False
        self._mode = _Mode.CONTENT
        self._bare = False
        return True

    def _reasoning(self, parsed: ParsedText, final: bool) -> bool:
        if self._bare:
            self._text = self._text.lstrip("\n")
        before, marker, after = self._text.partition(THINK_END)
        if marker:
            parsed.reasoning += before.rstrip("\n")
            self._text, self._mode, self._bare = after, _Mode.CONTENT, True
            return True
        # At the end line breaks stay: the reasoning was cut off, nothing says that they close it.
        keep = 0 if final else _may_begin(self._text, THINK_END, "\n")
        self._bare = self._bare and keep == len(self._text)
        parsed.reasoning += self._take(len(self._text) - keep)
        return False

    def _content(self, parsed: ParsedText, final: bool) -> bool:
        if self._bare:
            self._text = self._text.lstrip("\n")
        if not self._tools:
            self._bare = self._bare and not self._text
            parsed.content += self._take(len(self._text))
            return False
        before, marker, after = self._text.partition(CALL)
        if marker:
            shown = before.rstrip()
            self._gap = before[len(shown) :]
            parsed.content += shown
            self._text, self._mode, self._bare, self._after_call = after, _Mode.HEAD, False, False
            return True
        keep = _may_begin(self._text, CALL, None)
        if final:
            keep = len(self._text) if self._after_call and not self._text.strip() else 0
        emitted = self._take(len(self._text) - keep)
        if emitted:
            self._bare = self._after_call = False
        parsed.content += emitted
        return False

    def _head(self, parsed: ParsedText, final: bool) -> bool:
        head = _HEAD.match(self._text, 0, _HEAD_CHARS)
        name = _string(head[1]) if head else None
        if head and name:
            self._tell(parsed, name)
            self._text = self._text[head.end() :]
            self._depth, self._in_string, self._escaped, self._mode = 0, False, False, _Mode.ARGUMENTS
            return True
        inner, marker, after = self._text.partition(CALL_END)
        if not marker and not final:
            return False
        call = _whole_call(inner)
        if call is None:
            # Only the marker and what follows up to the next one: a well-formed call may stand inside.
            parsed.content += self._gap + CALL
            self._mode = _Mode.CONTENT
            return True
        self._tell(parsed, call[0], call[1])
        self._text = after
        self._close(closed=bool(marker))
        return True

    def _arguments(self, parsed: ParsedText, final: bool) -> bool:
        end = self._scan(final)
        done = self._depth == 0 or self._text.startswith(CALL_END, end)
        if end:
            parsed.tool_calls.append(ToolCallPiece(self._calls - 1, self._take(end)))
        if done:
            self._mode = _Mode.TAIL
        return done

    def _scan(self, final: bool) -> int:
        """How much of the text belongs to the arguments: to the brace that closes them, to a `</tool_call>` outside any
        string (they are malformed then), or all of it; less what may begin that marker."""
        text, position = self._text, 0
        if self._escaped and text:
            self._escaped, position = False, 1
        while True:
            found = (_IN_STRING if self._in_string else _INSIDE).search(text, position)
            if found is None:
                return len(text)
            position, char = found.end(), found[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._escaped = position == len(text)
                position += 1
            elif char == "<":
                rest = text[found.start() :]
                if rest.startswith(CALL_END) or (not final and CALL_END.startswith(rest)):
                    return found.start()
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    self._depth = 0
                    return position

    def _tail(self, parsed: ParsedText, final: bool) -> bool:
        bare = self._text.lstrip()
        rest = bare[1:].lstrip() if bare.startswith("}") else bare
        if rest.startswith(CALL_END):
            self._text = rest[len(CALL_END) :]
            self._close(closed=True)
            return True
        if not rest or (CALL_END.startswith(rest) and not final):
            if final:
                self._text = ""
            return False
        self._close(closed=False)
        self._after_call = False
        return True

    def _tell(self, parsed: ParsedText, name: str, arguments: str = "") -> None:
        parsed.tool_calls.append(ToolCallPiece(self._calls, arguments, "", name))
        self._calls += 1

    def _close(self, *, closed: bool) -> None:
        self.closed_calls += closed
        self._mode, self._after_call = _Mode.CONTENT, True

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken


def _may_begin(text: str, marker: str, spaces: str | None) -> int:
    """Length of the end of `text` that may turn out to be white space and a marker (`spaces` as in `str.rstrip`)."""
    cut = len(text)
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            cut -= length
            break
    return len(text) - len(text[:cut].rstrip(spaces))


def _string(literal: str) -> str | None:
    try:
        return str(json.loads(literal))
    except ValueError:
        return None


def _whole_call(inner: str) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of a call that is complete, its keys in any order; None: it is not a call."""
    try:
        call = json.loads(inner)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments")
    if arguments is None:
        return call["name"], "{}"
    return call["name"], arguments if isinstance(arguments, str) else _raw_member(inner, "arguments")


def _raw_member(text: str, key: str) -> str:
    """The last member `key` of the JSON object in `text`, as it was written."""
    decoder = json.JSONDecoder()
    space = re.compile(r"[\s,:]*")
    position, raw = text.index("{") + 1, ""
    while text[(position := space.match(text, position).end())] != "}":  # type: ignore[union-attr]
        name, position = decoder.raw_decode(text, position)
        start = space.match(text, position).end()  # type: ignore[union-attr]
        _, position = decoder.raw_decode(text, start)
        if name == key:
            raw = text[start:position]
    return raw

"""The events of a streamed response, in OpenAI's order, each with its sequence number.

One item is open at a time. What comes next decides when it ends: reasoning, content or another call open an item of
their own, and what ends the one before (`output_text.done`, `content_part.done`, `output_item.done`) leaves only when
the turn so far is on record (I3: clients keep and act on items that were closed): `closes` says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steno.contracts.chat import TokenLogprob
from steno.contracts.errors import ContextOverflow, EngineFailed, StenoError
from steno_proxy.dialects.base import Choice, Header, Piece
from steno_proxy.dialects.openai.common import error_words, logprobs_of, to_json
from steno_proxy.dialects.responses.output import (
    Item,
    ResponsesRequest,
    call_item,
    head_of,
    message_item,
    output_part,
    reasoning_item,
    state_of,
)
from steno_proxy.dialects.responses.text import FreeText
from steno_proxy.dialects.responses.tools import ClientTool, Tools

_REASONING, _MESSAGE = -2, -1
"""What is open, beside the index of a call."""


class ResponsesWriter:
    """One response. Text deltas, most of what there is, are spliced (1 us each); all else is encoded as it comes."""

    def __init__(self, request: ResponsesRequest, header: Header) -> None:
        self._request = request
        self._tools = Tools(places=request.places)
        self._turn_id = header.answer_id
        self._head = to_json(head_of(request, header))[:-1] + b","
        self._sequence = 0
        self._begun = False
        self._items: list[Item] = []  # closed ones
        self._open: int | None = None
        self._calls: set[int] = set()  # those that have been opened
        self._texts: list[str] = []  # what the open item has said
        self._tokens: list[TokenLogprob] = []
        self._pending: list[TokenLogprob] = []  # sampled since the last text delta
        self._function, self._place = "", ClientTool("", "")
        self._call_id = ""
        self._free: FreeText | None = None
        self._held = True  # a call whose id can't be told yet
        self._splice = b""

    # -- what the turn asks for

    def begin(self, index: int, prompt_tokens: int, cached_tokens: int) -> bytes:
        self._begun = True
        state = state_of("in_progress", [], None)
        return self._response("response.created", state) + self._response("response.in_progress", state)

    def closes(self, index: int, piece: Piece) -> bool:
        """Whether `piece` ends an item, so that the turn so far must be on record before its events leave (I3)."""
        wants: list[int] = [_REASONING] if piece.reasoning else []
        if piece.content:
            wants.append(_MESSAGE)
        wants += [call.index for call in piece.tool_calls]
        return any(want != self._open for want in wants) and (self._open is not None or len(set(wants)) > 1)

    def piece(self, index: int, piece: Piece) -> bytes:
        if piece.tokens:
            if not piece.content and (piece.reasoning or piece.tool_calls):
                self._pending = []  # only text has a place for them
            else:
                self._pending = [*self._pending, *piece.tokens]
        if self._open == _MESSAGE and not (piece.reasoning or piece.tool_calls):
            return self._delta(piece.content) if piece.content else b""
        out = []
        # The end of a call may come with what follows it, which closes its item.
        going_on = self._open
        for call in piece.tool_calls:
            if call.index == going_on:
                out.append(self._argued(call.arguments))
        if piece.reasoning:
            if self._open != _REASONING:
                out.append(self._close() + self._open_reasoning())
            out.append(self._delta(piece.reasoning))
        if piece.content:
            if self._open != _MESSAGE:
                out.append(self._close() + self._open_message())
            out.append(self._delta(piece.content))
        for call in piece.tool_calls:
            if call.index == going_on:
                continue
            if self._open != call.index:
                if call.index in self._calls:
                    raise EngineFailed(f"tool call {call.index} went on after another had begun")
                out.append(self._close())
                self._open, self._call_id = call.index, call.id
                self._calls.add(call.index)
                out.append(self._open_call(call.name))
            out.append(self._argued(call.arguments))
        return b"".join(out)

    def finish(self, choice: Choice) -> bytes:
        """The events that end the last item. If no item is open, they are those of an empty message."""
        opened = b""
        if self._open is None:
            opened = self._open_message()
        return opened + self._close("incomplete" if choice.finish_reason == "length" else "completed")

    def end(self, choices: Sequence[Choice]) -> bytes:
        status = "incomplete" if choices[0].finish_reason == "length" else "completed"
        return self._response(f"response.{status}", state_of(status, self._items, choices[0]))

    def broken(self, error: StenoError) -> bytes:
        """The end of a stream that failed. Its open item stays open: no client may take it for whole."""
        code = "server_error"
        if isinstance(error, ContextOverflow):
            code = error.code  # clients compact, and go on
        elif error.status == 429:
            code = "rate_limit_exceeded"
        begun = b"" if self._begun else self.begin(0, 0, 0)
        failure = {"code": code, "message": error_words(error)}
        return begun + self._response("response.failed", state_of("failed", self._items, None, failure))

    # -- items

    @property
    def _index(self) -> int:
        """Output index of the open item."""
        return len(self._items)

    def _open_reasoning(self) -> bytes:
        self._open = _REASONING
        item_id = self._id("rs")
        where: dict[str, Any] = {"item_id": item_id, "output_index": self._index}
        added = self._added(reasoning_item(item_id, "", self._request, "in_progress"))
        if self._request.summary:
            where["summary_index"] = 0
            self._splice_of("response.reasoning_summary_text.delta", where)
            part = {"type": "summary_text", "text": ""}
            return added + self._event("response.reasoning_summary_part.added", where | {"part": part})
        where["content_index"] = 0
        self._splice_of("response.reasoning_text.delta", where)
        return added + self._event(
            "response.content_part.added", where | {"part": {"type": "reasoning_text", "text": ""}}
        )

    def _open_message(self) -> bytes:
        self._open = _MESSAGE
        where = {"item_id": self._id("msg"), "output_index": self._index, "content_index": 0}
        self._splice_of("response.output_text.delta", where)
        added = self._added(message_item(self._id("msg"), [], "in_progress"))
        return added + self._event("response.content_part.added", where | {"part": output_part("", [])})

    def _open_call(self, function: str) -> bytes:
        self._function = function
        self._place = place = self._tools.place(function)
        self._free = FreeText() if place.custom else None
        self._held = place.custom or bool(place.kind)
        return b"" if self._held else self._add_call(False)

    def _call(self, index: int, text: str, raw: bool, status: str) -> Item:
        return call_item(self._turn_id, index, self._call_id, self._place, text, raw, status, self._function)

    def _add_call(self, raw: bool) -> bytes:
        item = self._call(self._index, "", raw, "in_progress")
        kind = "custom_tool_call_input" if self._place.custom else "function_call_arguments"
        self._splice_of(f"response.{kind}.delta", {"item_id": item["id"], "output_index": self._index})
        self._held = False
        return self._added(item)

    def _argued(self, arguments: str) -> bytes:
        """The events for a piece of a call's arguments; none yet for a tool that OpenAI defines: its call is sent whole."""
        if self._place.kind:
            self._texts.append(arguments)
            return b""
        if self._free is None:
            return self._delta(arguments) if arguments else b""
        text = self._free.feed(arguments)
        if self._held and self._free.raw is not None:
            return self._add_call(self._free.raw) + (self._delta(text) if text else b"")
        return self._delta(text) if text else b""

    def _delta(self, text: str) -> bytes:
        """A delta of the open item."""
        self._texts.append(text)
        sequence, self._sequence = self._sequence, self._sequence + 1
        if self._open != _MESSAGE:
            return self._splice % (to_json(text), b"", sequence)
        tokens, shown = self._pending, b',"logprobs":[]'
        if tokens:
            self._tokens += tokens
            self._pending = []
            shown = b',"logprobs":' + to_json(logprobs_of(tokens))
        return self._splice % (to_json(text), shown, sequence)

    def _close(self, status: str = "completed") -> bytes:
        """The events that end the open item."""
        if self._open is None:
            return b""
        index = self._index
        if self._open == _REASONING:
            out, item = self._close_reasoning(index, status)
        elif self._open == _MESSAGE:
            out, item = self._close_message(index, status)
        else:
            out, item = self._close_call(index, status)
        self._items.append(item)
        self._open, self._texts = None, []
        return out + self._event("response.output_item.done", {"output_index": index, "item": item})

    def _close_reasoning(self, index: int, status: str) -> tuple[bytes, Item]:
        text = "".join(self._texts)
        item = reasoning_item(self._id("rs"), text, self._request, status)
        if self._request.summary:
            where = {"item_id": item["id"], "output_index": index, "summary_index": 0}
            out = self._event("response.reasoning_summary_text.done", where | {"text": text})
            part = item["summary"][0]
            return out + self._event("response.reasoning_summary_part.done", where | {"part": part}), item
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        out = self._event("response.reasoning_text.done", where | {"text": text})
        return out + self._event("response.content_part.done", where | {"part": item["content"][0]}), item

    def _close_message(self, index: int, status: str) -> tuple[bytes, Item]:
        text, tokens = "".join(self._texts), self._tokens + self._pending
        self._tokens, self._pending = [], []
        part = output_part(text, tokens)
        item = message_item(self._id("msg"), [part], status)
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        done = where | {"text": text, "logprobs": part["logprobs"]}
        out = self._event("response.output_text.done", done)
        return out + self._event("response.content_part.done", where | {"part": part}), item

    def _close_call(self, index: int, status: str) -> tuple[bytes, Item]:
        out, raw = b"", False
        if self._place.kind:
            text, self._texts = "".join(self._texts), []
            item = self._call(index, text, False, status)
            if item["type"] != "function_call":
                return self._added(item | {"status": "in_progress"}), item
            self._place = ClientTool("", self._function)
            out = self._add_call(False) + (self._delta(text) if text else b"")
        if self._free is not None:
            text = self._free.end()
            raw = bool(self._free.raw)
            if self._held:
                out += self._add_call(raw)
            if text:
                out += self._delta(text)
        text = "".join(self._texts)
        item = self._call(index, text, raw, status)
        where = {"item_id": item["id"], "output_index": index}
        if self._place.custom:
            return out + self._event("response.custom_tool_call_input.done", where | {"input": text}), item
        done = where | {"name": item["name"], "arguments": text}
        return out + self._event("response.function_call_arguments.done", done), item

    # -- bytes

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._turn_id}_{self._index}"

    def _added(self, item: Item) -> bytes:
        return self._event("response.output_item.added", {"output_index": self._index, "item": item})

    def _splice_of(self, kind: str, where: dict[str, Any]) -> None:
        """What all deltas of an item have in common: (delta, logprobs, sequence number) are put in."""
        head = b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind} | where)[:-1]
        self._splice = head.replace(b"%", b"%%") + b',"delta":%b%b,"sequence_number":%d}\n\n'

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        data = to_json({"type": kind} | fields | {"sequence_number": sequence})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _response(self, kind: str, state: dict[str, Any]) -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        head = b"event: %b\ndata: {" % kind.encode() + b'"type":"%b","sequence_number":%d,"response":' % (
            kind.encode(),
            sequence,
        )
        return head + self._head + to_json(state)[1:] + b"}\n\n"

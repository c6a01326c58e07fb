"""A conversation made short, so that it can go on in less context: what is asked of the model, and how its summary is told.

The model makes it short: it is asked for a summary, after the conversation as it stands, and what it says is a turn like any
other, on record and of the policy. The summary comes back sealed, as one item of type `compaction`, which stands for all that
came before it when it is sent again (`items.py`). Two requests ask for that: one to `/compact`, which answers in an object of its
own, and one to `/responses` whose last item is TRIGGER (Codex), which is answered as any response, streamed or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steno.contracts.errors import EngineFailed, StenoError
from steno_proxy.dialects.base import Choice, Header, Piece
from steno_proxy.dialects.responses.events import ResponsesWriter
from steno_proxy.dialects.responses.items import seal
from steno_proxy.dialects.responses.output import Item, ResponsesRequest, head_of, state_of, usage

ASK = (
    "This conversation is about to be cut off here, and will go on from your next message alone. Write down all that is needed "
    "to go on: what was asked for, what has been done and found out, with names, paths and numbers, what was decided, and what "
    "is left to do. Call no tools, and answer with that summary only."
)
TRIGGER = "compaction_trigger"


def is_triggered(given: str | list[Any] | None) -> bool:
    """Whether an `input` ends with TRIGGER."""
    last = given[-1] if isinstance(given, list) and given else None
    return isinstance(last, dict) and last.get("type") == TRIGGER


def compaction_item(turn_id: str, choice: Choice) -> Item:
    """The summary, sealed. One that was cut off is still the best that there is. Raises: EngineFailed: it is empty."""
    summary = choice.message["content"]
    if not summary.strip():
        raise EngineFailed("the model gave no summary of the conversation")
    return {"id": f"cmp_{turn_id}_0", "type": "compaction", "encrypted_content": seal(summary)}


def compacted_body(header: Header, choice: Choice) -> dict[str, Any]:
    """What `/compact` answers."""
    return {
        "id": f"resp_{header.answer_id}",
        "object": "response.compaction",
        "created_at": header.created,
        "output": [compaction_item(header.answer_id, choice)],
        "usage": usage(choice),
    }


def triggered_body(request: ResponsesRequest, header: Header, choice: Choice) -> dict[str, Any]:
    """What `/responses` answers to TRIGGER, in one piece."""
    return head_of(request, header) | state_of("completed", [compaction_item(header.answer_id, choice)], choice)


class CompactionWriter(ResponsesWriter):
    """Streams the answer to TRIGGER. It writes nothing before the summary is whole, since that leaves sealed. The
    events that open the response come with the summary; if there is none, before the event of the failure."""

    def begin(self, index: int, prompt_tokens: int, cached_tokens: int) -> bytes:
        return b""

    def closes(self, index: int, piece: Piece) -> bool:
        return False

    def piece(self, index: int, piece: Piece) -> bytes:
        return b""

    def finish(self, choice: Choice) -> bytes:
        """Nothing, where there is no summary: `end` says so."""
        if not choice.message["content"].strip():
            return b""
        item = compaction_item(self._turn_id, choice)
        told = super().begin(choice.index, choice.prompt_tokens, choice.cached_tokens) + self._added(item)
        told += self._event("response.output_item.done", {"output_index": 0, "item": item})
        self._items.append(item)
        return told

    def end(self, choices: Sequence[Choice]) -> bytes:
        item = compaction_item(self._turn_id, choices[0])
        return self._response("response.completed", state_of("completed", [item], choices[0]))

    def broken(self, error: StenoError) -> bytes:
        begun = b"" if self._begun else super().begin(0, 0, 0)
        return begun + super().broken(error)

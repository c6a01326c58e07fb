"""A stored response, put together again from its turn's record. What only the request knew is in the turn's options
(`kept`).

Log-probabilities are on record, the texts of their tokens are not (I6), so a stored response has none; and it shows
its tools as the model was offered them, without those that were dropped.

`GET …/input_items` lists what it was an answer to, page by page, made of the messages on record: what the model was asked. Ids
that their client gave them are not kept. An item's id is `item_<turn_id>_i<n>`, its place in the conversation, which names no
turn's output (`items.py`). Calls of tools that OpenAI defines are listed as those of functions, which the model knows them as.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from steno.contracts.chat import Job, Message
from steno.contracts.errors import BadRequest
from steno.contracts.records import Turn
from steno_proxy.dialects.base import Choice, Header
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.dialects.parts import Part
from steno_proxy.dialects.responses.output import Item, ResponsesRequest, body_of, message_item, output_part
from steno_proxy.dialects.responses.text import free_text
from steno_proxy.dialects.responses.tools import FUNCTION_DEFAULTS, ClientTool, Tools, places_on_record

MOST_ITEMS = 100
"""Of one page, as at OpenAI."""
_ITEMS = 20


def stored_body(turn: Turn, kept: dict[str, Any], instructions: list[dict[str, Any]]) -> bytes:
    """The body of `GET`. Args: instructions: the messages that the request's instructions were."""
    places = places_on_record(kept)
    request = ResponsesRequest(
        dialect=turn.dialect,
        model=turn.model,
        job=Job(),
        places=places,
        summary="summary" in kept,
        sealed="sealed" in kept,
        echo=_echo(turn, kept, places, instructions),
    )
    header = Header(turn.turn_id, int(turn.timings.queued), turn.model or turn.served_model)
    return to_json(body_of(request, header, Choice.on_record(0, turn)))


def deleted_body(response_id: str) -> bytes:
    """The body of `DELETE`."""
    return to_json({"id": response_id, "object": "response.deleted", "deleted": True})


def _echo(
    turn: Turn, kept: dict[str, Any], places: dict[str, ClientTool], instructions: list[dict[str, Any]]
) -> dict[str, Any]:
    asked, options = turn.asked, turn.options
    return {
        "frequency_penalty": asked.get("frequency_penalty", 0.0),
        "instructions": "\n".join(_text(message) for message in instructions) or None,
        "max_output_tokens": asked.get("max_output_tokens"),
        "max_tool_calls": kept.get("max_tool_calls"),
        "metadata": kept.get("metadata", {}),
        "parallel_tool_calls": options.get("parallel_tool_calls", True),
        "previous_response_id": f"resp_{turn.parent_id}" if kept.get("after") and turn.parent_id else None,
        "presence_penalty": asked.get("presence_penalty", 0.0),
        "prompt_cache_key": kept.get("prompt_cache_key"),
        "reasoning": {
            "effort": options.get("template_kwargs", {}).get("reasoning_effort"),
            "summary": kept.get("summary"),
        },
        "safety_identifier": kept.get("safety_identifier"),
        "store": True,
        "temperature": asked.get("temperature", 1.0),
        "text": {"format": _format(options.get("response_format", {}))},
        "tool_choice": _choice(options.get("tool_choice", "auto"), places),
        "tools": _tools(turn.tools, places),
        "top_logprobs": 0,
        "top_p": asked.get("top_p", 1.0),
        "user": kept.get("user"),
    }


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return {"type": given.get("type", "text")}
    return {"type": "json_schema", "name": "", "strict": False} | given


def _choice(choice: str, places: dict[str, ClientTool]) -> Any:
    if not choice.startswith("function:"):
        return choice
    name = choice.removeprefix("function:")
    place = places.get(name) or ClientTool("", name)
    if place.kind:
        return {"type": place.kind}
    shown = {"type": "custom" if place.custom else "function", "name": place.name}
    return shown | ({"namespace": place.namespace} if place.namespace else {})


def _tools(functions: list[dict[str, Any]], places: dict[str, ClientTool]) -> list[dict[str, Any]]:
    """As the client would say them, those of a namespace together."""
    tools: list[dict[str, Any]] = []
    namespaces: dict[str, list[dict[str, Any]]] = {}
    for function in (tool["function"] for tool in functions):
        place = places.get(function["name"]) or ClientTool("", function["name"])
        if place.kind:
            tools.append({"type": place.kind} | ({"environment": {"type": "local"}} if place.kind == "shell" else {}))
            continue
        shown = {"type": "custom" if place.custom else "function", "name": place.name}
        if "description" in function:
            shown["description"] = function["description"]
        if not place.custom:
            told = {"parameters": function.get("parameters"), "strict": function.get("strict", False)}
            shown = FUNCTION_DEFAULTS | shown | told
        if not place.namespace:
            tools.append(shown)
            continue
        if place.namespace not in namespaces:
            inner = namespaces[place.namespace] = []
            tools.append({"type": "namespace", "name": place.namespace, "description": "", "tools": inner})
        namespaces[place.namespace].append(shown)
    return tools


# -- what it was an answer to


def input_items(turn_id: str, messages: Sequence[Message], places: Mapping[str, ClientTool]) -> list[Item]:
    """The items of a conversation, in its order.

    Args: messages: all before the answer, without the instructions. places: `Tools.places` of the answer's request.
    """
    lister = _Lister(turn_id, Tools(places=dict(places)))
    for message in messages:
        lister.take(message)
    return lister.items


def page_of(items: list[Item], query: bytes) -> bytes:
    """The body: `limit` items (20, at most 100) in `order` (`desc`, or `asc`), of those that come `after` an item.

    Raises: BadRequest naming the field of the query.
    """
    asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order: got {order[:40]!r}, must be asc or desc", field="order")
    limit = asked.get("limit", str(_ITEMS))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MOST_ITEMS):
        raise BadRequest(f"limit: got {limit[:40]!r}, must be 1 to {MOST_ITEMS}", field="limit")
    if order == "desc":
        items = items[::-1]
    if "after" in asked:
        found = next((i for i, item in enumerate(items) if item["id"] == asked["after"]), None)
        if found is None:
            raise BadRequest(f"after: no item has the id {asked['after'][:80]!r}", field="after")
        items = items[found + 1 :]
    shown = items[: int(limit)]
    return to_json(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(items) > len(shown),
        }
    )


class _Lister:
    def __init__(self, turn_id: str, tools: Tools) -> None:
        self.items: list[Item] = []
        self._turn_id = turn_id
        self._tools = tools
        self._custom: set[str] = set()  # ids of the custom calls so far

    def take(self, message: Message) -> None:
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            self._reply(message)
        elif role == "tool":
            call_id = message["tool_call_id"]
            kind = "custom_tool_call_output" if call_id in self._custom else "function_call_output"
            output = content if isinstance(content, str) else _parts(content)
            self._add({"type": kind, "call_id": call_id, "output": output, "status": "completed"})
        else:
            self._add({"type": "message", "role": role, "content": _parts(content), "status": "completed"})

    def _reply(self, message: Message) -> None:
        calls = message.get("tool_calls") or ()
        if thought := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thought}]
            self._add({"type": "reasoning", "summary": [], "content": content, "status": "completed"})
        if message.get("content") or not calls:
            self._add(message_item("", [output_part(message.get("content") or "", [])]))
        for call in calls:
            place = self._tools.place(call["function"]["name"])
            item = {"type": "function_call", "call_id": call["id"], "name": place.name, "status": "completed"}
            if place.custom:
                self._custom.add(call["id"])
                item |= {"type": "custom_tool_call", "input": free_text(call["function"]["arguments"])[0]}
            else:
                item["arguments"] = call["function"]["arguments"]
            if place.namespace:
                item["namespace"] = place.namespace
            self._add(item)

    def _add(self, item: Item) -> None:
        self.items.append(item | {"id": f"item_{self._turn_id}_i{len(self.items)}"})


def _parts(content: str | list[Part]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {
            "type": "input_image",
            "image_url": part["image_url"]["url"],
            "detail": part["image_url"].get("detail", "auto"),
        }
        for part in content
    ]

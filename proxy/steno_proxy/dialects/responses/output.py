"""A finished answer in the Responses format: output items and the response object, of a turn that just ended.

Ids are derived from the turn's, so that what comes back names its turn: `resp_<turn_id>`, items
`<kind>_<turn_id>_<output_index>`, calls `call_<turn_id>_<i>`. Reasoning is told as the item's text, or as its summary
where the client asks for summaries (those clients show and echo nothing else); nothing is summarised, both are all of
it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from steno.contracts.chat import CanonicalRequest, TokenLogprob, Tool
from steno_proxy.dialects.base import Choice, Header
from steno_proxy.dialects.openai.common import logprobs_of
from steno_proxy.dialects.refusals import nobody_runs
from steno_proxy.dialects.responses.client_tools import KINDS
from steno_proxy.dialects.responses.items import RAW_CALL, seal
from steno_proxy.dialects.responses.text import free_text
from steno_proxy.dialects.responses.tools import ClientTool, Tools, read_choice

Item = dict[str, Any]


class ResponsesRequest(CanonicalRequest):
    """A request, and what it takes to answer in kind.

    tools: its own, and those of the conversation that it goes on from once that is known. tool_choice: as sent.
    places: `Tools.places`. summary: reasoning goes back as a summary. sealed: with `encrypted_content`.
    echo: what a response repeats of its request.
    """

    tools: Tools = msgspec.field(default_factory=Tools)
    tool_choice: Any = None
    places: dict[str, ClientTool] = msgspec.field(default_factory=dict)
    summary: bool = False
    sealed: bool = False
    echo: dict[str, Any] = msgspec.field(default_factory=dict)

    def goes_on_from(self, carried: dict[str, Any], tools: list[Tool]) -> None:
        if not self.compacts:
            self.tools.take_over(carried, tools)
        self.offer()

    def offer(self, *, complete: bool = True) -> None:
        """Settle what the model is offered. All tools are known.

        Args: complete: an answer is wanted.
        Raises: BadRequest: the client runs none of them; a choice that can't be honoured.
        """
        tools = self.tools
        if tools.first_dropped and not tools.functions and complete:
            raise nobody_runs(f"{tools.first_dropped}.type", tools.dropped[0])
        choice, functions = read_choice(self.tool_choice, tools)
        self.job = msgspec.structs.replace(self.job, tools=functions, tool_choice=choice)
        self.places = tools.places
        self.carried = ({"leading": self.leading} if self.leading else {}) | tools.carry(functions)
        if self.kept:
            self.kept |= self.carried


def reasoning_item(item_id: str, text: str, request: ResponsesRequest, status: str = "completed") -> Item:
    item: Item = {"id": item_id, "type": "reasoning", "summary": [], "status": status}
    if request.summary:
        item["summary"] = [{"type": "summary_text", "text": text}] if text else []
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}] if text else []
    if request.sealed:
        item["encrypted_content"] = seal(text) if text else None
    return item


def output_part(text: str, tokens: list[TokenLogprob]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs_of(tokens)}


def message_item(item_id: str, parts: list[dict[str, Any]], status: str = "completed") -> Item:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": parts}


def call_item(
    turn_id: str, index: int, call_id: str, place: ClientTool, text: str, raw: bool, status: str, function: str
) -> Item:
    """The item of a call. text: arguments, or a custom call's input. function: the model's name for the tool: the item has it if
    the arguments are not what the tool takes, since a function of the client may have the tool's own name."""
    if place.kind:
        made = KINDS[place.kind].item(turn_id, index, call_id, text, status)
        if made is not None:
            return made
        place = ClientTool("", function)
    if place.custom:
        prefix = RAW_CALL if raw else "ctc"
        item = {"id": f"{prefix}_{turn_id}_{index}", "type": "custom_tool_call", "call_id": call_id, "name": place.name}
        item["input"] = text
    else:
        item = {"id": f"fc_{turn_id}_{index}", "type": "function_call", "call_id": call_id, "name": place.name}
        item["arguments"] = text
    item["status"] = status
    if place.namespace:
        item["namespace"] = place.namespace
    return item


def items_of(request: ResponsesRequest, turn_id: str, choice: Choice) -> list[Item]:
    """The output of a whole answer: reasoning, message, calls. An answer with none of them gets an empty message."""
    message, tools = choice.message, Tools(places=request.places)
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    items: list[Item] = []
    if reasoning := message.get("reasoning_content"):
        items.append(reasoning_item(f"rs_{turn_id}_0", reasoning, request))
    calls = message.get("tool_calls") or ()
    if message["content"] or not (calls or items):
        part = output_part(message["content"], choice.tokens)
        items.append(message_item(f"msg_{turn_id}_{len(items)}", [part]))
    for i, call in enumerate(calls, 1):
        name, text, raw = call["function"]["name"], call["function"]["arguments"], False
        place = tools.place(name)
        if place.custom:
            text, raw = free_text(text)
        ended = status if i == len(calls) else "completed"
        items.append(call_item(turn_id, len(items), call["id"], place, text, raw, ended, name))
    if not calls:
        items[-1]["status"] = status
    return items


def usage(choice: Choice) -> dict[str, Any]:
    return {
        "input_tokens": choice.prompt_tokens,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": choice.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": choice.prompt_tokens + choice.completion_tokens,
    }


def head_of(request: ResponsesRequest, header: Header) -> dict[str, Any]:
    """What stays the same while a response comes."""
    return {
        "id": f"resp_{header.answer_id}" if header.answer_id else "",
        "object": "response",
        "created_at": header.created,
        "model": header.model,
        "background": False,
        "service_tier": "default",
        "truncation": "disabled",
        **request.echo,
    }


def state_of(
    status: str, output: list[Item], choice: Choice | None, error: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What changes while a response comes."""
    cut = status == "incomplete"
    return {
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": usage(choice) if choice is not None else None,
        "completed_at": int(choice.ended) if choice is not None and choice.ended and not cut else None,
    }


def body_of(request: ResponsesRequest, header: Header, choice: Choice) -> dict[str, Any]:
    """The whole response object."""
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    return head_of(request, header) | state_of(status, items_of(request, header.answer_id, choice), choice)

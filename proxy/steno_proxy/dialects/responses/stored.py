"""A stored response, put together again from its turn's record. What only the request knew is in the turn's options
(`kept`).

Log-probabilities are on record, the texts of their tokens are not (I6), so a stored response has none; and it shows
its tools as the model was offered them, without those that were dropped.
"""

from __future__ import annotations

from typing import Any

from steno.contracts.chat import Job
from steno.contracts.records import Turn
from steno_proxy.dialects.base import Choice, Header
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.dialects.responses.output import ResponsesRequest, body_of
from steno_proxy.dialects.responses.tools import FUNCTION_DEFAULTS, Place


def stored_body(turn: Turn, kept: dict[str, Any], instructions: list[dict[str, Any]]) -> bytes:
    """The body of `GET`. Args: instructions: the messages that the request's instructions were."""
    places = {name: Place(*place) for name, place in kept.get("places", {}).items()}
    request = ResponsesRequest(
        dialect=turn.dialect,
        model=turn.model,
        job=Job(),
        places=places,
        summary="summary" in kept,
        sealed="sealed" in kept,
        echo=_echo(turn, kept, places, instructions),
    )
    choice = Choice(
        index=0,
        message=turn.reply,
        finish_reason=turn.finish_reason,
        prompt_tokens=turn.prompt_tokens,
        completion_tokens=turn.completion_tokens,
        cached_tokens=turn.cached_tokens,
        reasoning_tokens=turn.reasoning_tokens,
        ended=turn.timings.last_token or turn.timings.queued,
    )
    header = Header(turn.turn_id, int(turn.timings.queued), turn.model or turn.served_model)
    return to_json(body_of(request, header, choice))


def deleted_body(response_id: str) -> bytes:
    """The body of `DELETE`."""
    return to_json({"id": response_id, "object": "response.deleted", "deleted": True})


def _echo(
    turn: Turn, kept: dict[str, Any], places: dict[str, Place], instructions: list[dict[str, Any]]
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


def _choice(choice: str, places: dict[str, Place]) -> Any:
    if not choice.startswith("function:"):
        return choice
    name = choice.removeprefix("function:")
    place = places.get(name) or Place("", name)
    shown = {"type": "custom" if place.custom else "function", "name": place.name}
    return shown | ({"namespace": place.namespace} if place.namespace else {})


def _tools(functions: list[dict[str, Any]], places: dict[str, Place]) -> list[dict[str, Any]]:
    """As the client would say them, those of a namespace together."""
    tools: list[dict[str, Any]] = []
    namespaces: dict[str, list[dict[str, Any]]] = {}
    for function in (tool["function"] for tool in functions):
        place = places.get(function["name"]) or Place("", function["name"])
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

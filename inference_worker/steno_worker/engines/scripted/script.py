"""A script for the scripted engine: the user's function, what it is told, and what it may answer.

Owns loading `FILE.py:function`, the request as OpenAI shapes, and reading the answer; nothing about tokens or time.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from steno.config.plugins import load_function
from steno.contracts.chat import Job, Message
from steno.contracts.errors import BY_CODE, EngineFailed, StenoError

log = logging.getLogger(__name__)

_MESSAGE_KEYS = {"role", "content", "reasoning_content", "tool_calls", "refusal", "name"}


@dataclass(slots=True)
class Reply:
    """What a script says. A dict with the same keys, the message's own (`content`, `reasoning_content`, `tool_calls`) beside
    them, means the same; a string is a message with that content.

    message: the assistant message, OpenAI shapes; a tool call needs `function.name` and `function.arguments` (text or dict).
    token_ids: said as they are, instead of a message; a stop id is added if the last is none.
    delay_s: before the first token. pace_s: between tokens; None: the engine's.
    error: (code, message) instead of an answer, codes as in `steno/contracts/errors.py`.
    fail_after_tokens: the engine fails after so many. length_after_tokens: the answer is cut off there by length.
    """

    message: Message = field(default_factory=dict)
    token_ids: list[int] | None = None
    delay_s: float = 0.0
    pace_s: float | None = None
    error: tuple[str, str] | None = None
    fail_after_tokens: int | None = None
    length_after_tokens: int | None = None


_CONTROLS = {control.name for control in fields(Reply)} - {"message"}


class ScriptFunction:
    """The function of `FILE.py:function`, sync or async. A sync one runs on the worker's event loop: it must not wait."""

    def __init__(self, where: str) -> None:
        """Raises: ConfigError saying what is wrong with the file or the function."""
        self.where = where
        self._function = load_function(where, "script")

    async def __call__(self, request: dict[str, Any]) -> Reply:
        """Ask the script. Raises: the error it asks for; EngineFailed naming the script when it breaks its contract."""
        try:
            answer = self._function(request)
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:
            log.exception("script %s raised", self.where)
            raise EngineFailed(f"script {self.where} raised {type(error).__name__}: {error}") from error
        try:
            reply = read_reply(answer)
            if reply.error is not None:
                raise script_error(*reply.error)
        except (TypeError, ValueError, KeyError) as error:
            shown = repr(answer)
            shown = shown if len(shown) <= 200 else shown[:200] + "…"
            raise EngineFailed(f"script {self.where} returned {shown}: {error}") from error
        return reply


def request_of(job: Job, *, trial_id: str, turn: int) -> dict[str, Any]:
    """What a script is told: the canonical request in OpenAI shapes, `trial_id`, and `turn`: assistant messages so far."""
    choice: Any = job.tool_choice
    if job.tool_choice.startswith("function:"):
        choice = {"type": "function", "function": {"name": job.tool_choice.removeprefix("function:")}}
    wanted: dict[str, Any] = {"type": job.response_format.type}
    if job.response_format.type == "json_schema":
        wanted["json_schema"] = {"name": job.response_format.name, "schema": job.response_format.schema}
    return {
        "messages": job.messages,
        "prompt": job.prompt_text,
        "tools": job.tools,
        "tool_choice": choice,
        "response_format": wanted,
        "temperature": job.sampling.temperature,
        "max_tokens": job.sampling.max_tokens,
        "seed": job.sampling.seed,
        "trial_id": trial_id,
        "turn": turn,
    }


def read_reply(answer: Any) -> Reply:
    """Raises: TypeError, ValueError saying what is wrong with the answer."""
    if isinstance(answer, Reply):
        reply = answer
    elif isinstance(answer, str):
        reply = Reply({"content": answer})
    elif isinstance(answer, Mapping):
        unknown = answer.keys() - _MESSAGE_KEYS - _CONTROLS
        if unknown:
            raise ValueError(f"unknown keys {sorted(map(str, unknown))}")
        message = {key: value for key, value in answer.items() if key in _MESSAGE_KEYS}
        reply = Reply(message, **{key: value for key, value in answer.items() if key in _CONTROLS})
    else:
        raise TypeError("a script returns an assistant message (dict), a string or a Reply")
    reply.message = _normal_message(reply.message)
    if isinstance(reply.error, Mapping):
        reply.error = (str(reply.error["code"]), str(reply.error.get("message", "")))
    return reply


def _normal_message(message: Message) -> Message:
    """As templates take it: content a string, tool calls with an id and arguments as text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise TypeError(f"content is {type(content).__name__}, not a string")
    normal: Message = {"role": "assistant", "content": content}
    if message.get("reasoning_content"):
        normal["reasoning_content"] = str(message["reasoning_content"])
    if message.get("tool_calls"):
        normal["tool_calls"] = [_normal_call(call, index) for index, call in enumerate(message["tool_calls"])]
    return normal


def _normal_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    # Nine letters and digits: the strictest template (Mistral's) takes no other id.
    return {
        "id": call.get("id") or f"call{index:05d}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def script_error(code: str, message: str) -> StenoError:
    """The error that a script asks for. Raises: ValueError for a code that there is not."""
    if code not in BY_CODE:
        raise ValueError(f"no error has the code {code!r}; there are {', '.join(sorted(BY_CODE))}")
    return BY_CODE[code](message or code)

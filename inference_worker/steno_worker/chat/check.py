"""What is known of a model's chat format once it is loaded: found out by small conversations, so that no family needs an entry.

A template that can't be extended, or takes no tool results, is known before the first turn: in the log and on the model's card.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steno.contracts.chat import Message, Tool
from steno.contracts.errors import BadRequest
from steno_worker.chat.extend import ExtensionRefusal, extend
from steno_worker.chat.fold import MessageFolding, probe
from steno_worker.chat.interfaces import Renderer

_ASKED: Message = {"role": "user", "content": "ok?"}
_SAID: Message = {"role": "assistant", "content": "ok"}
_ASKED_AGAIN: Message = {"role": "user", "content": "and?"}


@dataclass(frozen=True, slots=True)
class FormatReport:
    """What a self-check conversation showed.

    problems: one sentence each, for the log. extends: which new messages can be rendered alone after a reply: `user`, `tool`.
    keeps_thinking: whether the template renders the reasoning of replies before the last question.
    counted: whether what is new depends on how many messages came before (`extend`).
    """

    folding: MessageFolding
    problems: list[str] = field(default_factory=list)
    extends: frozenset[str] = frozenset()
    keeps_thinking: bool = False
    counted: bool = False


def check_format(format: Renderer) -> FormatReport:
    """Run small conversations through the template: a few dozen renderings, milliseconds each at most."""
    problems: list[str] = []
    if not format.stop_ids:
        problems.append("no stop ids: the generation config, the tokenizer and the template name none")
    try:
        format.render([_ASKED], [], {})
    except BadRequest as refusal:
        return FormatReport(MessageFolding(), [*problems, f"the template refuses a user's message: {refusal.message}"])
    folding = probe(format)
    extends = set()
    for role, messages in (("user", [_SAID, _ASKED_AGAIN]), ("tool", called("abcdefghi"))):
        result = extend_folded(format, folding, [_ASKED, *messages], [], {}, 2, -1)
        if isinstance(result, ExtensionRefusal):
            problems.append(f"the template can't render a {role} message alone after a reply: {result.detail}")
        else:
            extends.add(role)
    if "user" in extends and not folding.late_system:
        late = [_ASKED, _SAID, {"role": "system", "content": "ok."}, _ASKED_AGAIN]
        if isinstance(extend_folded(format, folding, late, [], {}, 2, -1), ExtensionRefusal):
            # GLM: a reply is closed by the header of a user or a tool, and a system message's closes none.
            folding = replace(folding, late_system=True)
    counted = "tool" in extends and _counts(format, folding)
    return FormatReport(folding, problems, frozenset(extends), _keeps_thinking(format, folding), counted)


def extend_folded(
    format: Renderer,
    folding: MessageFolding,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    options: dict[str, Any],
    prefix_messages: int,
    last_id: int,
    counted: bool = False,
) -> list[int] | ExtensionRefusal:
    """`extend`, of messages as the model's template can take them."""

    def folded(some: Sequence[Message], with_tools: Sequence[Tool], kwargs: dict[str, Any]) -> list[int]:
        return format.render(folding.apply(some), with_tools, kwargs)

    return extend(
        format,
        messages,
        tools,
        options,
        prefix_messages=prefix_messages,
        last_id=last_id,
        render=folded,
        counted=counted,
    )


def called(call_id: str, result: str = "done") -> list[Message]:
    """A reply that calls a tool, and the tool's result."""
    function = {"name": "probe", "arguments": '{"key": "value"}'}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "name": "probe", "content": result},
    ]


def _counts(format: Renderer, folding: MessageFolding) -> bool:
    old = [_ASKED, *called("abcdefgh1"), *called("abcdefgh2"), _SAID, _ASKED_AGAIN]
    messages = [*old, *called("abcdefgh3")]
    short, long = (
        extend_folded(format, folding, messages, [], {}, len(old) + 1, -1, counted) for counted in (False, True)
    )
    return short != long


def _keeps_thinking(format: Renderer, folding: MessageFolding) -> bool:
    nonce = secrets.token_hex(8)
    messages = [_ASKED, {**_SAID, "reasoning_content": nonce}, _ASKED_AGAIN]
    try:
        ids = format.render(folding.apply(messages), [], {})
    except BadRequest:
        return False
    return nonce in format.decoder().feed(ids, final=True)

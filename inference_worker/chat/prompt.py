"""From messages to prompt ids: the recorded ids and what is new, or the whole conversation rendered.

Owns the choice between the two, what is known of a model's format once it is loaded (`FormatReport`), and the generation
prompt that parsers look at. Samples nothing, does no I/O; everything here is CPU work, linear in what is new, or in the request
when rendered whole.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inference_worker.chat.base import ChatFormat
from inference_worker.chat.extend import Refusal, extend
from inference_worker.chat.fold import Folding, probe
from proxy.contracts.canonical import Job, Message, Tool
from proxy.contracts.errors import BadRequest
from proxy.contracts.records import ForkReason

_EXAMPLES = 256
"""Generation prompts are looked up by template options, which are the agent's to vary."""


@dataclass(frozen=True, slots=True)
class FormatReport:
    """What a self-check conversation showed.

    problems: one sentence each, for the log. extends: which new messages can be rendered alone after a reply: `user`, `tool`.
    keeps_thinking: whether the template renders the reasoning of replies before the last question.
    """

    folding: Folding
    problems: list[str] = field(default_factory=list)
    extends: frozenset[str] = frozenset()
    keeps_thinking: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """kept_tokens: how many recorded ids it begins with: all, or 0; `refused`: why 0 though there were some.
    generation_prompt: its last ids, from the last message's end on; empty where that is not known."""

    ids: list[int]
    kept_tokens: int = 0
    refused: str = ""
    thinking_kept: bool = True
    generation_prompt: Sequence[int] = ()


def check_format(format: ChatFormat) -> FormatReport:
    """Run a small conversation through the template, at load: one that can't be extended is known before the first turn."""
    problems: list[str] = []
    if not format.stop_ids:
        problems.append("no stop ids: neither the generation config nor the tokenizer nor the template names one")
    question: Message = {"role": "user", "content": "ok?"}
    try:
        format.render([question], [], {})
    except BadRequest as refusal:
        return FormatReport(Folding(), [*problems, f"the template refuses a user's message: {refusal.message}"])
    folding = probe(format)
    call_id = "abcdefghi"
    function = {"name": "probe", "arguments": '{"key": "value"}'}
    calls = [{"id": call_id, "type": "function", "function": function}]
    after: dict[str, list[Message]] = {
        "user": [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}],
        "tool": [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call_id, "name": "probe", "content": "done"},
        ],
    }
    extends = set()
    for role, messages in after.items():
        result = _extended(format, folding, [question, *messages], [], {}, 2, -1)
        if isinstance(result, Refusal):
            problems.append(f"after a reply a {role} message can't be rendered alone: {result.detail}")
        else:
            extends.add(role)
    if "user" in extends and not folding.late_system:
        late = [question, after["user"][0], {"role": "system", "content": "ok."}, after["user"][1]]
        if isinstance(_extended(format, folding, late, [], {}, 2, -1), Refusal):
            # GLM: a reply is closed by the header of a user or a tool, and a system message's closes none.
            folding = replace(folding, late_system=True)
    return FormatReport(folding, problems, frozenset(extends), _keeps_thinking(format, folding))


class Prompter:
    """Makes the prompts of one format. Not to be used from two threads at once."""

    def __init__(self, format: ChatFormat, report: FormatReport) -> None:
        self._format = format
        self._report = report
        self._examples: dict[tuple[str, str], list[int]] = {}

    def chat(self, job: Job, prefix: array[int], prefix_messages: int) -> Prompt:
        """Raises: BadRequest: the template refuses the whole conversation, naming the field."""
        options = job.template_kwargs
        new = refusal = None
        if prefix and prefix_messages and self._report.extends:
            result = _extended(
                self._format, self._report.folding, job.messages, job.tools, options, prefix_messages, prefix[-1]
            )
            if isinstance(result, Refusal):
                refusal = result
            else:
                new = result
        if new is not None:
            return self._prompt(job, prefix.tolist() + new, kept=len(prefix))
        whole = self._format.render(self._report.folding.apply(job.messages), job.tools, options)
        if not prefix:
            return self._prompt(job, whole)
        if whole[: len(prefix)] == prefix.tolist():
            return self._prompt(job, whole, kept=len(prefix))
        return self._prompt(job, whole, refused=refusal.reason if refusal else ForkReason.RENDER_REFUSED)

    def _prompt(self, job: Job, ids: list[int], *, kept: int = 0, refused: str = "") -> Prompt:
        thought = any(message.get("reasoning_content") for message in job.messages)
        return Prompt(
            ids=ids,
            kept_tokens=kept,
            refused=str(refused),
            thinking_kept=bool(kept) or not thought or self._report.keeps_thinking,
            generation_prompt=self._generation_prompt(job, ids),
        )

    def _generation_prompt(self, job: Job, ids: list[int]) -> list[int]:
        """What the template added after the last message's text: where `ids` ends like a prompt with another text there. What it
        adds depends on the options and on that message's role (DeepSeek has no header after tool results)."""
        role = "tool" if job.messages[-1]["role"] == "tool" else "user"
        key = (role, json.dumps(job.template_kwargs, sort_keys=True, default=str))
        if key not in self._examples:
            if len(self._examples) >= _EXAMPLES:
                self._examples.clear()
            self._examples[key] = self._example(role, job.template_kwargs)
        example = self._examples[key]
        shorter, length = min(len(example), len(ids)), 0
        while length < shorter and example[-1 - length] == ids[-1 - length]:
            length += 1
        return ids[len(ids) - length :]

    def _example(self, role: str, options: dict[str, Any]) -> list[int]:
        try:
            return self._format.render(self._report.folding.apply(_asking(role)), [], options)
        except BadRequest:
            return []


def _extended(
    format: ChatFormat,
    folding: Folding,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    options: dict[str, Any],
    prefix_messages: int,
    last_id: int,
) -> list[int] | Refusal:
    def folded(some: Sequence[Message], with_tools: Sequence[Tool], kwargs: dict[str, Any]) -> list[int]:
        return format.render(folding.apply(some), with_tools, kwargs)

    return extend(format, messages, tools, options, prefix_messages=prefix_messages, last_id=last_id, render=folded)


def _asking(role: str) -> list[Message]:
    nonce = secrets.token_hex(8)
    if role == "user":
        return [{"role": "user", "content": nonce}]
    function = {"name": "probe", "arguments": '{"key": "value"}'}
    return [
        {"role": "user", "content": "ok"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "probe", "content": nonce},
    ]


def _keeps_thinking(format: ChatFormat, folding: Folding) -> bool:
    nonce = secrets.token_hex(8)
    messages: list[Message] = [
        {"role": "user", "content": "ok?"},
        {"role": "assistant", "content": "ok", "reasoning_content": nonce},
        {"role": "user", "content": "and?"},
    ]
    try:
        ids = format.render(folding.apply(messages), [], {})
    except BadRequest:
        return False
    return nonce in format.decoder().feed(ids, final=True)

"""From messages to prompt ids: the recorded ids and what is new, or the whole conversation rendered.

Owns the choice between the two, and the generation prompt that parsers look at. Samples nothing, does no I/O; everything here is
CPU work, linear in what is new, or in the request when rendered whole.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steno.contracts.chat import CONTINUES, OPEN_END, Job, Message, Sampling
from steno.contracts.errors import BadRequest
from steno.contracts.records import ForkReason, ids_to_bytes
from steno.contracts.wire.frames import Started
from steno_worker.chat.check import FormatReport, called, extend_folded
from steno_worker.chat.extend import ExtensionRefusal
from steno_worker.chat.interfaces import END_OF_PROMPT, Renderer

_QUESTION: Message = {"role": "user", "content": "ok?"}
_EXAMPLES = 256
"""Generation prompts are looked up by template options, which are the agent's to vary."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt. kept_tokens: how many recorded ids it begins with: all, or 0; `refused`: why 0 though there were some.
    generation_prompt: its last ids, from the last message's end on; empty where that is not known."""

    ids: list[int]
    kept_tokens: int = 0
    refused: str = ""
    thinking_kept: bool = True
    generation_prompt: Sequence[int] = ()


def started_of(stream: int, prompt: Prompt, law: Sampling, *, grammar: bool) -> Started:
    """What is said of a generation that begins with this prompt. law: in effect."""
    raw = ids_to_bytes(prompt.ids)
    return Started(
        stream=stream,
        kept_tokens=prompt.kept_tokens,
        new_ids=raw[4 * prompt.kept_tokens :],
        prompt_tokens=len(prompt.ids),
        prompt_digest=hashlib.blake2b(raw, digest_size=16).digest(),
        law=law,
        resumable=not grammar and not law.remembers_output(),
        constrained=grammar,
        refused=prompt.refused,
        thinking_kept=prompt.thinking_kept,
    )


class PromptRenderer:
    """Makes the prompts of one format. Not to be used from two threads at once."""

    def __init__(self, format: Renderer, report: FormatReport) -> None:
        self._format = format
        self._report = report
        self._examples: dict[tuple[str, str], list[int]] = {}

    def chat(self, job: Job, prefix: array[int], prefix_messages: int) -> Prompt:
        """Raises: BadRequest: the template refuses the whole conversation, naming the field."""
        options = job.template_kwargs
        new = refusal = None
        # Where the prompt ends elsewhere than after a header, what is new can't be rendered by itself.
        if prefix and prefix_messages and self._report.extends and not END_OF_PROMPT & options.keys():
            report, last_id = self._report, prefix[-1]
            result = extend_folded(
                self._format, report.folding, job.messages, job.tools, options, prefix_messages, last_id, report.counted
            )
            if isinstance(result, ExtensionRefusal):
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

    def again(self, job: Job, ids: list[int]) -> Prompt:
        """A prompt that was made before, of this job, perhaps by another worker."""
        return Prompt(ids, kept_tokens=len(ids), generation_prompt=self._generation_prompt(job, ids))

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
        if job.template_kwargs.get(CONTINUES):
            return self._begun(job, ids)
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

    def _begun(self, job: Job, ids: list[int]) -> list[int]:
        """The end of a prompt that ends inside an assistant's message, from that message on: it may have begun to think."""
        options = {**job.template_kwargs, CONTINUES: False, OPEN_END: False}
        try:
            before = self._format.render(self._report.folding.apply(job.messages[:-1]), job.tools, options)
        except BadRequest:  # there may be nothing before it
            before = []
        same = next((n for n, (old, new) in enumerate(zip(before, ids, strict=False)) if old != new), len(before))
        return ids[same:]

    def _example(self, role: str, options: dict[str, Any]) -> list[int]:
        try:
            return self._format.render(self._report.folding.apply(_asking(role)), [], options)
        except BadRequest:
            return []


def _asking(role: str) -> list[Message]:
    nonce = secrets.token_hex(8)
    return [_QUESTION, *called("abcdefghi", nonce)] if role == "tool" else [{"role": "user", "content": nonce}]

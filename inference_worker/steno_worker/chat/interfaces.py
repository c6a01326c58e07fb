"""The seam between a model's chat format and everything else in the worker.

A `ChatFormat` knows one model's template, tokenizer and parsers; it knows nothing of sockets or sampling. The embedded and
scripted engines use `chat/hf.py` with the built-in parser; vLLM brings its own renderer and parsers
(`engines/vllm/chat_format.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from steno.contracts.chat import CONTINUES, OPEN_END, Job, Message, Tool, ToolCallPiece
from steno.contracts.errors import BadRequest

END_OF_PROMPT = frozenset({OPEN_END, CONTINUES})
"""Options of the template that are arguments of its call, and that agents may set nevertheless."""


def check_template_options(options: Iterable[str], apply_template: Callable[..., Any]) -> None:
    """Raises: BadRequest: an option that is an argument of `apply_template`: `chat_template` would run the agent's (I8)."""
    reserved = {"messages", *inspect.signature(apply_template).parameters} - END_OF_PROMPT
    for key in options:
        if key in reserved:
            name = f"chat_template_kwargs.{key}"
            raise BadRequest(f"{name}: agents must not set this template option", field=name)


@dataclass(slots=True)
class ParsedText:
    """What a parser made of some new text. Tool-call ids here are the model's own ("" where the format has none)."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)


class Parser(Protocol):
    """Parses the text of one completion as it comes. It has seen no ids before the last assistant header."""

    def feed(self, text: str, ids: Sequence[int], *, final: bool = False) -> ParsedText: ...


class Decoder(Protocol):
    """Incremental detokeniser: ids in, text out; text that ends inside a character is held back until `final`.

    Special tokens that structure the format (`<tool_call>`, `<think>`) come out as text; stop ids come out as "".
    """

    def feed(self, ids: Sequence[int], *, final: bool = False) -> str: ...


class Renderer(Protocol):
    """The part of a chat format that continuing a conversation needs (`prompt.py`, `extend.py`)."""

    stop_ids: frozenset[int]
    """Engine stop ids: a completion that ends in one keeps it."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: dict[str, Any]) -> list[int]:
        """Whole conversation -> prompt ids with the generation prompt at the end, or as END_OF_PROMPT says. `options`:
        template_kwargs.

        Raises: BadRequest naming the field, when the template refuses. ContextOverflow: from a format that knows the context.
        """
        ...

    def decoder(self) -> Decoder: ...


class ChatFormat(Renderer, Protocol):
    """All that a chat format does: renders messages to ids, decodes ids, parses text."""

    name: str
    vocab_size: int
    """Ids are below this; a prompt given as ids is checked against it."""
    special_ids: frozenset[int]
    """Ids of structural tokens: ends, headers, marks of calls."""

    @property
    def digest(self) -> str:
        """For `ModelCard.tokenizer_digest`: equal where the same ids mean the same text, in the same template."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Plain text -> ids, for `completions`. special: with what the tokenizer adds (BOS)."""
        ...

    def strings(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary has it; "" for ids that have none."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all of them, special tokens included: also stop ids, which a `decoder` leaves out."""
        ...

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token as clients see it in `logprobs`: its text (may be a replacement character) and its raw bytes."""
        ...

    def parser(self, job: Job, generation_prompt_ids: Sequence[int]) -> Parser:
        """`generation_prompt_ids`: the prompt ids from the last assistant header on (a template may open `<think>` there)."""
        ...

"""The seam between a model's chat format and everything else in the worker.

A `ChatFormat` knows one model's template, tokenizer and parsers; it knows nothing of sockets or sampling. The embedded
and scripted engines use `chat/hf.py` with the built-in parser; vLLM brings its own renderer and parsers (`chat/vllm.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.contracts.canonical import Job, Message, Tool, ToolCallPiece


@dataclass(slots=True)
class Parsed:
    """What a parser made of some new text. Tool-call ids here are the model's own ("" where the format has none)."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = field(default_factory=list)


class Parser(Protocol):
    """Incremental, one per completion. It has seen no ids before the last assistant header."""

    def feed(self, text: str, ids: Sequence[int], *, final: bool = False) -> Parsed: ...


class Decoder(Protocol):
    """Incremental detokeniser: ids in, text out; text that ends inside a character is held back until `final`.

    Special tokens that structure the format (`<tool_call>`, `<think>`) come out as text; stop ids come out as "".
    """

    def feed(self, ids: Sequence[int], *, final: bool = False) -> str: ...


class Renderer(Protocol):
    """What continuing a conversation takes of a chat format (`prompt.py`, `extend.py`)."""

    stop_ids: frozenset[int]
    """Engine stop ids: a completion that ends in one keeps it."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: dict[str, Any]) -> list[int]:
        """Whole conversation -> prompt ids with the generation prompt at the end. `options`: template_kwargs.

        Raises: BadRequest naming the field, when the template refuses. ContextOverflow: from a format that knows the context.
        """
        ...

    def decoder(self) -> Decoder: ...


class ChatFormat(Renderer, Protocol):
    name: str
    vocab_size: int
    """Ids are below this; a prompt given as ids is checked against it."""

    @property
    def digest(self) -> str:
        """For `ModelCard.tokenizer_digest`: equal where the same ids mean the same text, in the same template."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text -> ids, for `completions`; adds what the tokenizer adds (BOS)."""
        ...

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token as clients see it in `logprobs`: its text (may be a replacement character) and its raw bytes."""
        ...

    def parser(self, job: Job, generation_prompt_ids: Sequence[int]) -> Parser:
        """`generation_prompt_ids`: the prompt ids from the last assistant header on (a template may open `<think>` there)."""
        ...

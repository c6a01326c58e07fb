"""Text of what vLLM's models sample: by the table of bytes where the tokenizer has one, else by vLLM's own means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from vllm.tokenizers.detokenizer_utils import detokenize_incrementally

from steno.contracts.errors import ConfigError
from steno_worker.chat.decode import TokenBytes


class SlowDecoder:
    """Incremental text of a tokenizer whose bytes can't be read off it (mistral-common, tiktoken), by vLLM's own means."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._ids: list[int] = []
        self._tokens: list[str] | None = None
        self._prefix = 0
        self._read = 0

    def feed(self, ids: Sequence[int], *, final: bool = False) -> str:
        text = "".join([self._one(token_id) for token_id in ids if token_id not in self._stop_ids])
        return text + self._rest() if final else text

    def _one(self, token_id: int) -> str:
        self._ids.append(token_id)
        tokens, text, self._prefix, self._read = detokenize_incrementally(
            self._tokenizer, self._ids, self._tokens, self._prefix, self._read, skip_special_tokens=False
        )
        self._tokens = tokens if self._tokens is None else self._tokens + tokens
        return str(text)

    def _rest(self) -> str:
        held = (self._tokens or [])[self._read :]
        return str(self._tokenizer.convert_tokens_to_string(held)) if held else ""


def token_bytes(tokenizer: Any) -> TokenBytes | None:
    """The tokenizer's table of bytes; None where it has none to read: those are decoded by vLLM's own means."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return None
    try:
        return TokenBytes(backend)
    except ConfigError:
        return None

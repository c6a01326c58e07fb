"""The fewest tokens that a text can be, in one linear pass: what can't fit a context is refused before it is tokenised.

Each byte of a token of n bytes has the share 1/n of it. With n of the longest token that a byte occurs in, its share is smallest.
The sum of these smallest shares over a text is at most its number of tokens, whatever the merges do. This holds only if each byte
of a text ends up in a token, so it is computed only for tokenizers of which this is known (`_covers`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from steno.contracts.chat import Message
from steno.contracts.errors import ContextOverflow
from steno_worker.chat.decode import TokenBytes

_METASPACE = "\u2581"
_SPACE_NORMALIZERS = (
    {"type": "Replace", "pattern": {"String": " "}, "content": _METASPACE},
    {"type": "Prepend", "prepend": _METASPACE},
)
_QUICK_CHARACTERS = 65536
"""So many are tokenised in a tenth of a second, whatever they are."""
_SLICE_CHARACTERS = 1 << 19
NFC_SHRINKS = 4
"""NFC makes a text shorter by less than this factor, in UTF-8 (Hangul jamo by 3, Greek with two accents by 3.5)."""


class FewestTokens:
    """The fewest tokens that a text can be, by one tokenizer. Pure."""

    def __init__(self, tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
        whole = json.loads(tokenizer.to_str())
        self._known = _covers(whole)
        self._byte_level = any(part["type"] == "ByteLevel" for part in _parts(whole, "pre_tokenizer"))
        self._composes = any(part["type"] == "NFC" for part in _parts(whole, "normalizer"))
        self._longest = [1] * 256
        """For each byte, the length of the longest token that it occurs in."""
        if self._known:
            for token_id in tokenizer.get_vocab(with_added_tokens=True).values():
                raw = self._plain(token_bytes[token_id])
                for byte in set(raw):
                    self._longest[byte] = max(self._longest[byte], len(raw))

    def __call__(self, text: str) -> int:
        """A number that `text` can't have fewer tokens than; 0 if nothing is known of this tokenizer."""
        if not self._known:
            return 0
        raw = np.frombuffer(self._plain(text.encode()), np.uint8)
        if not self._composes:
            return math.ceil(self._shares(raw))
        # What NFC composes ends in something that is not ASCII: an ASCII character before another one stays.
        kept = np.append(raw[1:] < 128, True) & (raw < 128)
        others = Fraction(int((~kept).sum()), NFC_SHRINKS * max(self._longest))
        return math.ceil(self._shares(raw[kept]) + others)

    def check(self, text: str, context_tokens: int, field: str) -> None:
        """Raises: ContextOverflow: a text that is long to tokenise can't be as few tokens as fit."""
        self._check(text, 0, context_tokens, field)

    def check_messages(self, messages: Sequence[Message], context_tokens: int) -> None:
        """As `check`, for the text of user messages before rendering: every template renders all of it, except white space around
        it. It may leave out other messages' text (reasoning, calls); the rendered text is checked later in any case."""
        fewest = 0
        for message in messages:
            if message["role"] == "user" and isinstance(content := message["content"], str):
                fewest = self._check(content.strip(), fewest, context_tokens, "messages")

    def _check(self, text: str, fewest: int, context_tokens: int, field: str) -> int:
        """fewest: tokens of what comes before. Returns those with `text`. Not all of it is looked at once it is too long."""
        if len(text) <= _QUICK_CHARACTERS or not self._known:
            return fewest
        for at in range(0, len(text), _SLICE_CHARACTERS):
            slice_ = text[at : at + _SLICE_CHARACTERS]
            # What NFC composes may lie across the ends of slices, and each is rounded up.
            fewest += self(slice_) if slice_ == text else max(self(slice_) - 2, 0)
            if fewest >= context_tokens:
                raise ContextOverflow(
                    f"the prompt has at least {fewest} tokens; the model's context is {context_tokens}, "
                    "one of them for the answer",
                    prompt_tokens=fewest,
                    context_tokens=context_tokens,
                    field=field,
                )
        return fewest

    def _shares(self, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> Fraction:
        counts = np.bincount(raw, minlength=256).tolist()
        return sum((Fraction(n, longest) for n, longest in zip(counts, self._longest, strict=True) if n), Fraction(0))

    def _plain(self, raw: bytes) -> bytes:
        """Where spaces are read as metaspaces, so that the two are the same, both are spaces here."""
        return raw if self._byte_level else raw.replace(_METASPACE.encode(), b" ")


def _parts(tokenizer: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    part = tokenizer[stage]
    if part is None:
        return []
    inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}[stage]
    return list(part[inner]) if part["type"] == "Sequence" else [part]


def _covers(tokenizer: dict[str, Any]) -> bool:
    """Whether each byte of a text is in one of its tokens, and no token is longer than it looks: nothing is dropped, no run of
    what is unknown becomes one token, no added token takes the white space around it or is changed by the normalizer."""
    normalizers, splits = _parts(tokenizer, "normalizer"), _parts(tokenizer, "pre_tokenizer")
    kinds = {part["type"] for part in splits}
    if any(part["type"] != "NFC" and part not in _SPACE_NORMALIZERS for part in normalizers):
        return False
    if not kinds <= {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"}:
        return False
    if any(part.get("behavior") == "Removed" or part.get("replacement", _METASPACE) != _METASPACE for part in splits):
        return False
    prepends = any(part["type"] == "Prepend" for part in normalizers)
    for token in tokenizer["added_tokens"]:
        changed = token["normalized"] and (prepends or (bool(normalizers) and not token["content"].isascii()))
        if token["lstrip"] or token["rstrip"] or changed:
            return False
    model = tokenizer["model"]
    if model["type"] == "BPE" and "ByteLevel" in kinds:
        return set(pre_tokenizers.ByteLevel.alphabet()) <= set(model["vocab"])
    if model["type"] not in ("BPE", "Unigram") or "ByteLevel" in kinds or not model["byte_fallback"]:
        return False
    vocab = model["vocab"] if model["type"] == "BPE" else [token for token, _ in model["vocab"]]
    return {f"<0x{byte:02X}>" for byte in range(256)} <= set(vocab)

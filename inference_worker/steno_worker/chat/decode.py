"""Token ids -> text, incrementally, by a table of the bytes that each token stands for.

Owns the reading of a `tokenizers` decoder: which bytes a token is, and whether the first space of a text is dropped. Does not
use `DecodeStream`: it re-decodes what it holds back (quadratic on bytes that never become a character), and raises on
sequences that no encoder would give, which a policy samples all the same (I1).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from steno.contracts.errors import ConfigError

_METASPACE = "\u2581"


@cache
def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, other bytes for code points from 256 on.

    Source: GPT-2's `bytes_to_unicode`, kept by every byte-level tokenizer since.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    table.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return table


class TokenBytes:
    """The bytes of each token of one tokenizer; filled as tokens are met.

    strips_space: whether decoding drops one space at the very start of a text (sentencepiece's dummy prefix).

    Raises: ConfigError: the tokenizer's decoder is none of byte-level, metaspace or byte fallback.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._literal = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}
        parts = _decoder_parts(tokenizer)
        kinds = {part["type"] for part in parts}
        self._byte_level = "ByteLevel" in kinds
        spaced = [part for part in parts if part["type"] == "Metaspace" or _replaces_metaspace(part)]
        if not self._byte_level and not spaced:
            raise ConfigError(
                f"tokenizer: its decoder ({', '.join(sorted(kinds)) or 'none'}) can't be streamed exactly; "
                "supported are ByteLevel, Metaspace and ByteFallback"
            )
        self._byte_fallback = "ByteFallback" in kinds
        self.strips_space = any(part["type"] == "Strip" and part.get("start", 0) > 0 for part in parts) or any(
            part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in parts
        )

    def __getitem__(self, token_id: int) -> bytes:
        """Ids that the tokenizer has no token for (a padded embedding) are no bytes."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._find(token_id)
        return known

    def _find(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            table = _byte_of_char()
            if all(char in table for char in piece):
                return bytes(table[char] for char in piece)
            return piece.encode()
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_METASPACE, " ").encode()


def _decoder_parts(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.to_str()).get("decoder")
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _replaces_metaspace(part: dict[str, Any]) -> bool:
    return part["type"] == "Replace" and part.get("pattern") == {"String": _METASPACE} and part.get("content") == " "


class ByteDecoder:
    """A `Decoder` over `TokenBytes`: one pass, one table lookup a token.

    Bytes that are no UTF-8 come out as U+FFFD as soon as that is certain; `hidden` ids (stop ids) come out as nothing.
    """

    def __init__(self, table: TokenBytes, hidden: Iterable[int] = ()) -> None:
        self._table = table
        self._hidden = frozenset(hidden)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = table.strips_space

    def feed(self, ids: Sequence[int], *, final: bool = False) -> str:
        table, hidden = self._table, self._hidden
        text = self._utf8.decode(b"".join([table[id_] for id_ in ids if id_ not in hidden]), final)
        if self._at_start and text:
            self._at_start = False
            return text[1:] if text[0] == " " else text
        return text

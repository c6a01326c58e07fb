"""A text never has fewer tokens than `FewestTokens` says: over tokenizers of each kind, and normalizers that shrink."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from steno.contracts.errors import ContextOverflow
from steno_worker.chat.decode import TokenBytes
from steno_worker.chat.fewest import NFC_SHRINKS, FewestTokens
from steno_worker.chat.hf import HfChatFormat
from tests.unit.worker.chat.families import CORPUS, TOKENIZERS, transformers_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "</tool_response>", "[INST]")


def composing() -> Tokenizer:
    """As Qwen's: NFC before byte-level BPE."""
    tokenizer = TOKENIZERS["byte_level"]()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def gemma() -> Tokenizer:
    """Runs of metaspaces are added tokens, and nothing is put in front."""
    tokenizer = TOKENIZERS["spaced_bpe"]()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_tokens([AddedToken("▁" * n, normalized=False) for n in range(2, 32)])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {**TOKENIZERS, "composing": composing, "gemma": gemma}


@cache
def made(kind: str) -> tuple[Tokenizer, FewestTokens]:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer, FewestTokens(tokenizer, TokenBytes(tokenizer))


def tokens_of(kind: str, text: str) -> int:
    return len(made(kind)[0].encode(text, add_special_tokens=False).ids)


MARKS = st.sampled_from(
    ["\u0338", "\u0301", "e\u0301", "\u1fbe\u0308\u0341", "\u212a", "\u1112\u1161\u11ab", "▁", "  "]
)
TEXTS = st.lists(st.one_of(st.sampled_from([*SPECIAL, *CORPUS]), MARKS, st.text(max_size=8)), max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, times=st.integers(1, 20))
def test_no_text_has_fewer_tokens(kind: str, text: str, times: int) -> None:
    assert made(kind)[1](text * times) <= tokens_of(kind, text * times)


@pytest.mark.parametrize("kind", KINDS)
def test_no_run_of_one_token_has_fewer(kind: str) -> None:
    """Where the bound is closest: texts of the vocabulary's own pieces."""
    tokenizer, fewest = made(kind)
    for token_id in tokenizer.get_vocab(with_added_tokens=True).values():
        text = tokenizer.decode([token_id], skip_special_tokens=False) * 50
        assert fewest(text) <= tokens_of(kind, text), text


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_something(kind: str) -> None:
    text, longest = "a" * 100_000, 40
    assert tokens_of(kind, text) // longest <= made(kind)[1](text)


def test_nfc_shrinks_no_further() -> None:
    """Over all of Unicode: the longest that any character's canonical parts can be written, against that character."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    parts = {char: unicodedata.normalize("NFD", char) for char in characters}
    widest: dict[str, int] = {}
    for char, apart in parts.items():
        if len(apart) == 1:
            widest[apart] = max(widest.get(apart, 0), len(char.encode()), len(apart.encode()))
    for char, apart in parts.items():
        written = sum(widest[part] for part in apart)
        assert len(char.encode()) <= written
        assert written < NFC_SHRINKS * len(unicodedata.normalize("NFC", char).encode())


def dropping(change: Callable[[Tokenizer], None], kind: str = "byte_level") -> FewestTokens:
    tokenizer = TOKENIZERS[kind]()
    change(tokenizer)
    return FewestTokens(tokenizer, TokenBytes(tokenizer))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_nothing_is_said_where_text_may_vanish(kind: str) -> None:
    def stripping(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizers.Strip()

    def swallowing(tokenizer: Tokenizer) -> None:
        tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])

    def splitting(tokenizer: Tokenizer) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    for change in (stripping, swallowing, splitting):
        assert dropping(change, kind)("a b" * 1000) == 0


def test_nothing_is_said_where_unknown_characters_vanish() -> None:
    def shrinking(tokenizer: Tokenizer) -> None:
        tokenizer.model = models.BPE(vocab={"a": 0, "b": 1}, merges=[])

    assert dropping(shrinking)("a" * 1000) == 0


@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_what_cannot_fit_is_refused_before_it_is_tokenised(field: str) -> None:
    tokenizer = transformers_tokenizer("chatml", "byte_level")
    format = HfChatFormat(tokenizer, context_tokens=20_000)

    def made_of(text: str) -> list[int]:
        return (
            format.render([{"role": "user", "content": text}], [], {}) if field == "messages" else format.encode(text)
        )

    assert len(made_of("a " * 40_000)) > 20_000, "what may fit is tokenised, and its length seen to by who asked"
    with pytest.raises(ContextOverflow, match="at least") as refused:
        made_of("a" * 3_500_000)
    assert (refused.value.context_tokens, refused.value.field) == (20_000, field)
    assert 20_000 < refused.value.prompt_tokens < 3_500_000

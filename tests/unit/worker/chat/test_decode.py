"""Ids -> text: any cutting gives the same, and the text is the tokenizer's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from steno.contracts.errors import ConfigError
from steno_worker.chat.decode import ByteDecoder, TokenBytes
from tests.unit.worker.chat.families import TOKENIZERS

BUILT = {kind: make() for kind, make in TOKENIZERS.items()}
TABLES = {kind: TokenBytes(tokenizer) for kind, tokenizer in BUILT.items()}
kinds = st.sampled_from(list(TOKENIZERS))
texts = st.text(st.one_of(st.characters(codec="utf-8", exclude_characters="▁"), st.sampled_from(" \n🙂é天")))


def in_pieces(kind: str, ids: list[int], cuts: list[int]) -> str:
    decoder, places = ByteDecoder(TABLES[kind]), sorted({min(cut, len(ids)) for cut in cuts} | {0})
    pieces = [ids[start:end] for start, end in zip(places, [*places[1:], len(ids)], strict=True)]
    return "".join(decoder.feed(piece) for piece in pieces) + decoder.feed([], final=True)


@given(kinds, texts, st.lists(st.integers(0, 50)))
def test_text_is_the_tokenizers_own(kind: str, text: str, cuts: list[int]) -> None:
    ids = BUILT[kind].encode(text, add_special_tokens=False).ids
    assert in_pieces(kind, ids, cuts) == BUILT[kind].decode(ids, skip_special_tokens=False)


@given(kinds, st.lists(st.integers(0, 2**20)), st.lists(st.integers(0, 50)))
def test_any_ids_any_cutting_same_text(kind: str, numbers: list[int], cuts: list[int]) -> None:
    """What a policy samples need not be UTF-8, nor what an encoder would give."""
    ids = [number % BUILT[kind].get_vocab_size() for number in numbers]
    whole = ByteDecoder(TABLES[kind]).feed(ids, final=True)
    assert in_pieces(kind, ids, cuts) == whole


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_characters_are_held_back_until_they_are_whole(kind: str) -> None:
    ids = BUILT[kind].encode("🚀", add_special_tokens=False).ids
    decoder = ByteDecoder(TABLES[kind])
    fed = [decoder.feed([token_id]) for token_id in ids]
    assert len(ids) >= 3 and fed[-1] == "🚀" and "".join(fed[:-1]) == ""
    broken = ByteDecoder(TABLES[kind])
    assert "".join(broken.feed([token_id]) for token_id in ids[:-1]) == ""
    assert set(broken.feed([], final=True)) == {"\ufffd"}


def test_stop_ids_are_invisible_and_unknown_ids_are_nothing() -> None:
    table = TABLES["byte_level"]
    ids = BUILT["byte_level"].encode("the user", add_special_tokens=False).ids
    assert ByteDecoder(table, [ids[-1]]).feed(ids, final=True) == BUILT["byte_level"].decode(ids[:-1])
    assert ByteDecoder(table).feed([10**6, *ids], final=True) == "the user"


def test_decoders_that_cannot_be_streamed_are_refused_at_load() -> None:
    with pytest.raises(ConfigError, match="ByteLevel"):
        TokenBytes(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))

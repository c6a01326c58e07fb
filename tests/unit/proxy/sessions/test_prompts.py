"""Plain prompts find what they go on from, in one pass."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.records import IndexRow, ids_to_bytes
from steno_proxy.sessions.prompt_index import IDS, TEXT, PromptIndex, digests


def row(number: int, prompt: bytes, path: bytes, parent: int = -1, kind: bytes = IDS) -> IndexRow:
    return IndexRow(f"{number:012x}", parent, digests(prompt, path), b"\0" * 8, kind, "stop", False, len(path) // 4)


def test_the_longest_path_wins_and_the_newest_of_equals() -> None:
    index = PromptIndex()
    a, ab = ids_to_bytes([1, 2]), ids_to_bytes([1, 2, 3, 4])
    index.add(0, row(0, a[:4], a))
    index.add(1, row(1, a, ab, parent=0))
    index.add(2, row(2, a, ab, parent=0))
    assert index.find(IDS, ab + b"\5\0\0\0")[:2] == (2, 16)
    assert index.find(IDS, a + b"\t\0\0\0") == (0, 8, True)
    assert index.find(IDS, ids_to_bytes([7, 7, 7]))[0] == -1


def test_text_and_ids_are_apart_and_chats_are_not_looked_at() -> None:
    index = PromptIndex()
    index.add(0, row(0, b"a", b"abcd", kind=TEXT))
    index.add(1, IndexRow("x" * 12, -1, b"u" * 32, b"\0" * 8, b"\0" * 8, "stop", False, 3))
    assert index.find(IDS, b"abcdefgh")[0] == -1
    assert index.find(TEXT, b"abcdefgh")[:2] == (0, 4)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8), st.lists(st.integers(0, 2), max_size=8)
)
def test_finds_what_a_search_of_all_paths_would(paths: list[list[int]], prompt: list[int]) -> None:
    index = PromptIndex()
    for number, path in enumerate(paths):
        index.add(number, row(number, b"", ids_to_bytes(path)))
    matching = [(len(path), number) for number, path in enumerate(paths) if prompt[: len(path)] == path]
    length, number = max(matching, default=(0, -1))
    assert index.find(IDS, ids_to_bytes(prompt))[:2] == (number, 4 * length)


@pytest.mark.parametrize("kind", [IDS, TEXT])
def test_a_turn_that_was_cut_before_its_first_token_is_not_gone_on_from(kind: bytes) -> None:
    index, prompt = PromptIndex(), ids_to_bytes([1, 2])
    cut = msgspec.structs.replace(row(0, prompt, prompt, kind=kind), partial=True, completion_tokens=0)
    index.add(0, cut)
    assert index.find(kind, prompt)[0] == -1
    assert index.find(kind, prompt + prompt)[0] == -1


def test_one_that_said_nothing_is_asked_again_and_gone_on_from_by_more() -> None:
    index = PromptIndex()
    index.add(0, row(0, b"ab", b"ab", kind=TEXT))
    assert index.find(TEXT, b"ab")[:2] == (-1, 0)
    assert index.find(TEXT, b"abc")[:2] == (0, 2)
    index.add(1, row(1, b"a", b"ab", kind=TEXT))
    index.add(2, row(2, b"ab", b"ab", kind=TEXT))
    assert index.find(TEXT, b"ab")[:2] == (1, 2), "this one has said the rest of it"
    assert index.find(TEXT, b"abc")[:2] == (2, 2)

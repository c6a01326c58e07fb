"""Plain prompts find what they go on from, in one pass."""

from __future__ import annotations

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

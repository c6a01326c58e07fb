"""Continuation for plain prompts (`completions`): which recorded turn's tokens does this prompt begin with?

Prompts have no messages to match, so a turn leaves a mark of its whole path (prompt + completion) in its index row: the
path's length and a hash of it. A new prompt is hashed once, front to back, and looked up at each recorded length (I5:
one linear pass, whatever the session's size). Ids and text have marks of their own. Pure.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from steno.contracts.records import IndexRow

IDS = b"prompt-i"
TEXT = b"prompt-t"
"""What stands in `IndexRow.options` of such turns: 8 bytes that no digest is likely to be."""


class PromptMatch(NamedTuple):
    """The recorded turn that a plain prompt goes on from. parent: number of the turn to continue, -1 for none. length: of what
    it covers, in bytes of the prompt.
    has_children: another turn goes on from it already."""

    parent: int
    length: int
    has_children: bool


class PromptIndex:
    """The marks of one session's plain-prompt turns, and how they hang together."""

    __slots__ = ("_continued", "_marks")

    def __init__(self) -> None:
        # Kind -> length -> mark -> digest of the turn's own prompt -> its number, the newest last.
        self._marks: dict[bytes, dict[int, dict[bytes, dict[bytes, int]]]] = {}
        self._continued: set[int] = set()

    def add(self, number: int, row: IndexRow) -> None:
        """Take note of a turn; turns of chats are ignored. No turn goes on from one that was cut off before its first token, as
        in a chat (`tree.py`)."""
        if row.options not in (IDS, TEXT):
            return
        if row.parent >= 0:
            self._continued.add(row.parent)
        if row.partial and row.completion_tokens == 0:
            return
        own, mark = row.digests[:16], row.digests[16:32]
        lengths = self._marks.setdefault(row.options, {})
        numbers = lengths.setdefault(int.from_bytes(mark[1:7], "little"), {}).setdefault(mark, {})
        numbers.pop(own, None)
        numbers[own] = number

    def find(self, kind: bytes, prompt: bytes) -> PromptMatch:
        """The recorded turn with the longest path that `prompt` begins with; the newest of equals. A turn that was asked this
        very prompt and sampled nothing does not count: this request asks it again."""
        found, found_length = -1, 0
        rolling = hashlib.blake2b(digest_size=9)
        at = 0
        lengths = self._marks.get(kind, {})
        for length in sorted(length for length in lengths if length <= len(prompt)):
            rolling.update(prompt[at:length])
            at = length
            numbers = lengths[length].get(_mark(length, rolling.digest()), {})
            own = prompt_digest(prompt) if numbers and length == len(prompt) else b""
            number = next((numbers[asked] for asked in reversed(numbers) if asked != own), -1)
            if number >= 0:
                found, found_length = number, length
        return PromptMatch(found, found_length, found in self._continued)


def digests(prompt: bytes, path: bytes) -> bytes:
    """`IndexRow.digests` of a plain-prompt turn: a digest of its prompt, and the mark of its whole path (prompt +
    completion), both as int32 LE ids or UTF-8 text."""
    return prompt_digest(prompt) + _mark(len(path), hashlib.blake2b(path, digest_size=9).digest())


def prompt_digest(prompt: bytes) -> bytes:
    """16 bytes: what stands for the prompt's one message in a conversation tree."""
    return b"o" + hashlib.blake2b(prompt, digest_size=15).digest()


def _mark(length: int, digest: bytes) -> bytes:
    """16 bytes. The first says that this is no message of a chat (OTHER in `messages/normalise.py`)."""
    return b"o" + length.to_bytes(6, "little") + digest

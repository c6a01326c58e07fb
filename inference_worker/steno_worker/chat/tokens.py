"""Answers a Count that wants more than the number of tokens (`Count.wants`): ids, strings of the vocabulary, text.

CPU work, linear in the prompt; nothing is sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from steno.contracts.errors import BadRequest, BodyTooLarge
from steno.contracts.records import bytes_to_ids, ids_to_bytes
from steno.contracts.wire.frames import TEXTS, Count, Counted
from steno_worker.chat.prompt import PromptRenderer

MAX_ANSWER_BYTES = 4 * 2**20
"""It goes in one packet, which the proxy reads in one go: the ids of a million tokens."""


class Tokenizer(Protocol):
    """What of a chat format it takes."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Plain text -> ids. special: with what the tokenizer adds (BOS)."""
        ...

    def strings(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary has it (`Ġthe`); "" for ids that have none."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all of them, special tokens included."""
        ...


@runtime_checkable
class Vocabulary(Protocol):
    """What of a chat format says single tokens."""

    special_ids: frozenset[int]

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token's text and its bytes; nothing for an id that is no token."""
        ...


def tokenized(asked: Count, tokenizer: Tokenizer, prompter: PromptRenderer) -> Counted:
    """Answer what `asked.wants` about its job. Raises: BadRequest: the template refuses, or a newer proxy wants something unknown
    here. ContextOverflow: the prompt is known to be too long before it is counted. BodyTooLarge: the answer is too large."""
    if asked.wants == TEXTS and asked.job.prompt_ids is not None and isinstance(tokenizer, Vocabulary):
        return _texts(asked.stream, bytes_to_ids(asked.job.prompt_ids).tolist(), tokenizer)
    if asked.wants not in ("ids", "strings", "text"):
        raise BadRequest(f"this worker can't say {asked.wants[:40]!r} of a prompt")
    job = asked.job
    if job.prompt_ids is not None:
        ids = bytes_to_ids(job.prompt_ids).tolist()
    elif job.prompt_text is not None:
        ids = tokenizer.encode(job.prompt_text, special=not asked.bare)
    else:
        ids = prompter.chat(job, array("i"), 0).ids
    counted = Counted(asked.stream, len(ids))
    if asked.wants == "text":
        counted.text = tokenizer.decode(ids)
    else:
        counted.ids = ids_to_bytes(ids)
    if asked.wants == "strings":
        counted.strings = tokenizer.strings(ids)
    return _bounded(counted)


def _texts(stream: int, ids: list[int], tokenizer: Vocabulary) -> Counted:
    special = [token_id for token_id in ids if token_id in tokenizer.special_ids]
    texts = [tokenizer.token_text(token_id)[1] for token_id in ids]
    return _bounded(Counted(stream, len(ids), ids_to_bytes(special), texts=texts))


def _bounded(counted: Counted) -> Counted:
    size = len(counted.ids) + len(counted.text.encode()) + sum(len(string.encode()) + 5 for string in counted.strings)
    size += sum(len(text) + 5 for text in counted.texts)
    if size > MAX_ANSWER_BYTES:
        raise BodyTooLarge(f"the answer would have {size} bytes; at most {MAX_ANSWER_BYTES} are sent")
    return counted

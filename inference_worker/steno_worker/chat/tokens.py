"""What is said of a prompt's tokens to who asks for more than their number (`Count.wants`): ids, strings of the vocabulary, text.

CPU work, linear in the prompt; nothing is sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from steno.contracts.errors import BadRequest, BodyTooLarge
from steno.contracts.records import bytes_to_ids, ids_to_bytes
from steno.contracts.wire.frames import Count, Counted
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


def tokenized(asked: Count, tokenizer: Tokenizer, prompter: PromptRenderer) -> Counted:
    """What the tokenizer makes of a job. Raises: BadRequest: the template refuses, or a later proxy wants what is not known
    here. ContextOverflow: the format knows without counting. BodyTooLarge: the answer would be."""
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
    size = len(counted.ids) + len(counted.text.encode()) + sum(len(string.encode()) + 5 for string in counted.strings)
    if size > MAX_ANSWER_BYTES:
        raise BodyTooLarge(f"the answer would have {size} bytes; at most {MAX_ANSWER_BYTES} are sent")
    return counted

"""What the chaos worker says: every token, its log-probability and its text follow from the prompt's ids and the position.

So a checker that has a record and nothing else knows each token that must stand there, whichever worker sampled it, on however
many attempts (I1, I9). The log-probability depends on the version as well: a token under the wrong label is found (I10).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from steno.contracts.records import ids_to_bytes

STOP_ID = 2
BASE_VERSION = "base/0"
MOST_WORDS = 40


@dataclass(frozen=True, slots=True)
class Token:
    """One token and what the parser makes of it: at most one of reasoning, content, call and arguments."""

    id: int
    reasoning: str = ""
    content: str = ""
    call: str = ""  # a tool call of this name begins
    arguments: str = ""


def digest_of(prompt_ids: bytes) -> bytes:
    return blake2b(prompt_ids, digest_size=16).digest()


@lru_cache(maxsize=4096)
def answer(digest: bytes) -> tuple[Token, ...]:
    """The whole completion after a prompt with this digest, stop id included."""
    thinks, calls = digest[0] % 4 == 0, max(0, digest[1] % 6 - 3)
    words = 12 + digest[2] % (MOST_WORDS - 12)
    tokens: list[Token] = []
    for position in range(words):
        token_id = 3 + int.from_bytes(_hash(digest, position)[:4], "little") % 30_000
        at = position - (words - 4 * calls)
        if thinks and position < 4:
            tokens.append(Token(token_id, reasoning=f"r{token_id} "))
        elif at >= 0 and at % 4 == 0:
            tokens.append(Token(token_id, call="look"))
        elif at >= 0:
            tokens.append(Token(token_id, arguments=('{"at": ', f"{token_id % 1000}", "}")[at % 4 - 1]))
        else:
            tokens.append(Token(token_id, content=f"w{token_id} "))
    return (*tokens, Token(STOP_ID))


def resumable(digest: bytes) -> bool:
    """Whether another worker can go on with the completion after this prompt: one in six is as if under a grammar (I9)."""
    return digest[3] % 6 != 0


def logprob(digest: bytes, position: int, version: str) -> float:
    """In float32 exactly."""
    return -(1 + int.from_bytes(_hash(digest, position, version)[:4], "little") % 8000) / 1024


def message_of(tokens: tuple[Token, ...]) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, arguments)]) as a client sees it."""
    calls: list[list[str]] = []
    for token in tokens:
        if token.call:
            calls.append([token.call, ""])
        if token.arguments:
            calls[-1][1] += token.arguments
    return "".join(token.content for token in tokens), [(name, arguments) for name, arguments in calls]


def slowness(digest: bytes) -> int:
    """How many times longer than others a token of this completion takes: one in four lasts long enough to be struck."""
    return 6 if digest[4] % 4 == 0 else 1


def render(messages: list[dict[str, Any]], model: str = "chaos") -> list[int]:
    """Ids of new messages: their characters, and those of their calls. Each model has a first id of its own, so what they say
    differs."""
    ids = [1, zlib.crc32(model.encode()) % 30_000]
    for message in messages:
        ids += [ord(letter) for letter in f"{message['role']}:{message.get('content') or ''}"]
        for call in message.get("tool_calls") or ():
            ids += [ord(letter) for letter in f"{call['function']['name']}({call['function']['arguments']})"]
    return ids


def prompt_digest(*parts: bytes | list[int]) -> bytes:
    """Of a prompt in pieces."""
    return digest_of(b"".join(part if isinstance(part, bytes) else ids_to_bytes(part) for part in parts))


def _hash(digest: bytes, position: int, version: str = "") -> bytes:
    return blake2b(digest + position.to_bytes(4, "little") + version.encode(), digest_size=8).digest()

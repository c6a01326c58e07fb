"""Filler for what agents' vendors wrote: of the same shape, and equal where the texts were equal.

A fixture keeps what recognition and the dialects read (keys, types, roles, names, ids, numbers, the arguments of calls) and no
prose. `fill(text)` depends on the text alone, so that what was echoed stays equal to what it echoes, and two messages that
differed still do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from hashlib import sha256
from typing import Any

EXACT_CHARS, MOST_CHARS = 256, 2048
"""Up to the first, filler is as long as its text; beyond, half to all of that, and never more than the second."""
WORDS = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore".split()
PROSE = frozenset(
    {"text", "content", "description", "thinking", "output", "instructions", "system", "title", "user_id", "result"}
)
"""Keys whose strings are filled even if they are one word."""
CALLED = frozenset({"arguments", "args"})
NOBODY = "00000000-0000-4000-8000-"
"""Begins what stands for a UUID: of a session, a device, an account."""
_BILLING = re.compile(r"(\s*x-anthropic-billing-header: )([^\n]*)(\n?)", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9_.:@$+-]{0,40}|[\w.-]*\{\{turn \d+\}\}[\w.-]*|\{\{base64 .*\}\}|steno1\.[\w=-]+")
_HASH = re.compile(r"[0-9a-f]{16,}")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)


def fill(text: str) -> str:
    """Words in the place of a text. White space around it stays, as do a billing header's name and whether there are lines."""
    bare = text.strip()
    if not bare:
        return text
    if header := _BILLING.match(text):
        return header[1] + fill(header[2]) + header[3] + fill(text[header.end() :])
    start = text.index(bare[0])
    before, after = text[:start], text[start + len(bare) :]
    return before + _words(bare) + after


def _words(text: str) -> str:
    digest = sha256(text.encode("utf-8", "surrogatepass"))
    length = len(text) if len(text) <= EXACT_CHARS else min(MOST_CHARS, 1 << (len(text).bit_length() - 1))
    said = digest.hexdigest()[:8]
    for i in range(length // 3 if length > len(said) else 0):
        gap = "\n" if "\n" in text and i % 12 == 11 else " "
        said += gap + WORDS[digest.digest()[i % 32] % len(WORDS)]
        if len(said) > length:
            break
    return said[: length - 1] + "." if length > len(said[:length].rstrip()) else said[:length]


def without_prose(value: Any, ours: Collection[str], key: str = "") -> Any:
    """A JSON value with its prose filled, and the ids of sessions and devices replaced.

    ours: texts that stay: what our own scripts said and called tools with, which clients echo.
    """
    if isinstance(value, dict):
        custom = value.get("type") in ("tool_use", "custom_tool_call")
        called = CALLED if isinstance(value.get("name"), str) else ()  # else: properties of those names, in a schema
        return {
            name: _arguments(each, ours)
            if name in called or (custom and name == "input")
            else without_prose(each, ours, name)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [without_prose(each, ours, key) for each in value]
    if not isinstance(value, str) or value in ours or value.strip() in ours:
        return value
    if _UUID.search(value) and _NAME.fullmatch(value):
        return _UUID.sub(lambda found: NOBODY + sha256(found[0].encode()).hexdigest()[:12], value)
    if key not in PROSE and _NAME.fullmatch(value) and not _HASH.search(value):
        return value
    return fill(value)


def _arguments(value: Any, ours: Collection[str]) -> Any:
    """Arguments of a call, to the letter: how a client writes them back is what recognition must bear. Only texts that are not
    ours are filled: some clients rewrite a call."""
    if isinstance(value, dict):
        return {name: _arguments(each, ours) for name, each in value.items()}
    if isinstance(value, list):
        return [_arguments(each, ours) for each in value]
    if not isinstance(value, str) or value in ours:
        return value
    try:
        inside = texts_in(json.loads(value))
    except ValueError:
        return fill(value)
    for text in inside - set(ours):
        value = value.replace(json.dumps(text, ensure_ascii=False), json.dumps(fill(text)))
    return value


def texts_in(value: Any) -> set[str]:
    """Every string of a JSON value, names of fields apart."""
    if isinstance(value, dict):
        return set().union(*map(texts_in, value.values()))
    if isinstance(value, list):
        return set().union(*map(texts_in, value))
    return {value} if isinstance(value, str) else set()

"""JSON of a caller's own making (a task, metadata, metrics), held to what JSON and msgpack both have: whatever was accepted can
be stored, and read back in every view.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator

_HALF = re.compile("[\ud800-\udfff]")
MAX_NESTING = 64
"""Of JSON that comes with a group or a session; far more than a task needs, far less than any reader's stack."""


def whole_text(text: str) -> str:
    """With U+FFFD for each half of a surrogate pair: models sample such escapes, and no file, frame or tokenizer takes one."""
    return text if text.isascii() else _HALF.sub("\ufffd", text)


def storable(value: Any, depth: int = 0) -> Any:
    """The value itself. Raises: ValueError saying why it is not one that can be read back."""
    if depth > MAX_NESTING:
        raise ValueError(f"nested deeper than {MAX_NESTING}")
    if isinstance(value, dict):
        for key, item in value.items():
            storable(key, depth)
            storable(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            storable(item, depth + 1)
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise ValueError("invalid Unicode: unpaired surrogate")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("numbers must be finite")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError("integers must fit 64 bits")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(storable)]

"""JSON as it stands in an exported file."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any) -> str:
    """The value as JSON on one line, which UTF-8 can encode. If it holds half a surrogate pair (older proxies recorded some),
    all that is not ASCII is escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text

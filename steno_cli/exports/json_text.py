"""JSON as it stands in an exported file."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any) -> str:
    """On one line, as UTF-8 carries it. Half a surrogate pair, which older proxies recorded, is an escape, and so is then all
    that is not ASCII."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text

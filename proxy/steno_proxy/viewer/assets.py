"""The files of the page `/ui`, as they are sent: plain modules and style sheets, in no need of building.

What agents wrote is shown there, so a browser is told to run and load nothing but these files, and to make no HTML of text
(`require-trusted-types-for`): the page sets text and nothing else.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Asset(NamedTuple):
    """etag: of the content, quoted, as the header has it."""

    body: bytes
    kind: str
    etag: str

    @property
    def headers(self) -> dict[str, str]:
        return {**HEADERS, "content-type": self.kind, "etag": self.etag}


@lru_cache(maxsize=1)
def assets() -> dict[str, Asset]:
    """By name: `index.html`, `app.js`, … All are read at once: there is no path from a request to a file."""
    return {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS}


def _read(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, KINDS[path.suffix], f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')

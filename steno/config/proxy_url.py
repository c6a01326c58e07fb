"""What a URL of a proxy may be. Light: the client asks this, too."""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import urlsplit

PROXY_URL_FORM = "http(s)://HOST[:PORT][/PREFIX]"


def proxy_url(url: str, schemes: Collection[str] = ("http", "https")) -> str:
    """The URL itself. Raises: ValueError: it is no proxy's."""
    wanted = f"must be {PROXY_URL_FORM}"
    try:
        parts = urlsplit(url)
        scheme, host, _port = parts.scheme, parts.hostname, parts.port  # a port that is none shows when it is read
    except ValueError:
        raise ValueError(f"got {shown(url)!r}, {wanted}") from None
    if scheme not in schemes or not host or parts.query or parts.fragment:
        raise ValueError(f"got {shown(url)!r}, {wanted}")
    return url


def shown(url: str) -> str:
    """Without user and password."""
    return re.sub(r"^(\w+://)?\S*@", r"\1***@", url)

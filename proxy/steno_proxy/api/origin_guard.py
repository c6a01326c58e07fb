"""Refuses requests that a web page may have had a browser send.

A browser lets any page send requests to this machine, and its headers say which page did: `Host` is the host name that the page
used (with DNS rebinding, the page's own name), `Origin` the page's address, `Sec-Fetch-Site` how that address relates to the one
asked. A page can neither set these headers nor leave them out. Where keys are asked for, a page has none. Without keys, only
these headers tell the developer's agent from the page in another tab.

This module decides, from the headers of an ASGI scope; `front.Application` acts. The workers' socket refuses every page.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.types import Scope

from steno.config.settings import is_loopback
from steno.contracts.errors import BadRequest, Forbidden, StenoError
from steno_proxy.config.settings import ProxySettings

_LOOKED_AT = frozenset({b"host", b"origin", b"sec-fetch-site", b"content-type"})
_OWN_SITE = frozenset({b"same-origin", b"none"})
"""`none`: no page's, but typed by a person."""
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::(?P<port>[0-9]{0,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
MOST_KNOWN = 256
"""Values of `Host` that were found good and are remembered: reading one takes longer than all else here."""


class Address(NamedTuple):
    """host: lower case, an IPv6 address without brackets and in its shortest form. port: None where none is said."""

    host: str
    port: int | None


class OriginGuard:
    """What a proxy without keys lets in.

    Args:
        public_url: how agents reach the proxy; pages of that origin pass, and requests for its host.
        allowed_hosts: other names under which the proxy may be asked, at any port.
    """

    def __init__(self, public_url: str | None = None, allowed_hosts: Iterable[str] = ()) -> None:
        self._names = {host_name(name) for name in allowed_hosts}
        self._public: tuple[str, str, int | None] | None = None
        if public_url is not None:
            parts = urlsplit(public_url)
            host = host_name(parts.hostname or "")
            self._public = (parts.scheme, host, parts.port or _DEFAULT_PORTS[parts.scheme])
            self._names.add(host)
        self._known: set[bytes] = set()

    @classmethod
    def of(cls, settings: ProxySettings) -> OriginGuard | None:
        """None where keys are asked for: they guard everything."""
        return cls(settings.public_url, settings.allowed_hosts) if settings.admin_key is None else None

    def refusal(self, scope: Scope) -> StenoError | None:
        """Why this request is not answered; None: it is. Its body is not looked at."""
        host = origin = None
        for name, value in scope["headers"]:
            if name not in _LOOKED_AT:
                continue
            if name == b"host":
                if value not in self._known and not self._is_ours(value):
                    return _strange_host(value)
                if host is not None and value != host:
                    return BadRequest("several Host headers", field="host")
                host = value
            elif name == b"origin":
                if origin is not None:
                    return BadRequest("several Origin headers", field="origin")
                origin = value
            elif name == b"sec-fetch-site":
                if value not in _OWN_SITE:
                    return _strange_page(f"Sec-Fetch-Site: {_shown(value)}", "sec-fetch-site")
            elif value[:10].lower() == b"text/plain":
                # What a page's form may send to anybody, in a browser that says nothing of where it comes from.
                return BadRequest(f"content-type: got {_shown(value)}, must be application/json", field="content-type")
        if origin is not None and not self._is_same(origin, host, scope):
            return _strange_page(f"Origin: {_shown(origin)}", "origin")
        return None

    def _is_ours(self, value: bytes) -> bool:
        found = read_authority(value)
        if found is None or not (is_loopback(found.host) or found.host in self._names):
            return False
        if len(self._known) < MOST_KNOWN:
            self._known.add(value)
        return True

    def _is_same(self, origin: bytes, host: bytes | None, scope: Scope) -> bool:
        """Whether this is the origin of the address that was asked, or of the public URL."""
        scheme, separator, authority = origin.lower().partition(b"://")
        found = read_authority(authority)
        if not separator or scheme not in (b"http", b"https") or found is None:
            return False  # "null" among them
        port = _DEFAULT_PORTS[scheme.decode()]
        page = (scheme.decode(), found.host, found.port or port)
        if page == self._public:
            return True
        asked = read_authority(host) if host is not None else None
        own = scope.get("scheme", "http").replace("ws", "http")
        return asked is not None and page == (own, asked.host, asked.port or _DEFAULT_PORTS.get(own))


def from_a_page(scope: Scope) -> StenoError | None:
    """Why a WebSocket is refused, with keys and without: browsers open one for any page, and say whose it is. No worker does."""
    for name, value in scope["headers"]:
        if name == b"origin":
            message = f"Origin: got {_shown(value)}, must be absent: web pages can't connect as workers"
            return Forbidden(message, field="origin")
    return None


def read_authority(value: bytes) -> Address | None:
    """A `Host`, or what comes after an origin's `//`. None: it is neither a name nor an address, with a port or without."""
    try:
        found = _AUTHORITY.fullmatch(value.decode("ascii").lower())
        if found is None:
            return None
        return Address(host_name(found["v6"] or found["name"]), int(found["port"]) if found["port"] else None)
    except ValueError:
        return None


def host_name(host: str) -> str:
    """A host as it is compared: lower case, without a last dot, IPv6 addresses without brackets and in their shortest form."""
    host = host.lower().strip("[]").removesuffix(".")
    if ":" in host:
        return str(ipaddress.IPv6Address(host))
    return host


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))


def _strange_host(value: bytes) -> StenoError:
    found = read_authority(value)
    name = found.host if found else "NAME"
    return Forbidden(
        f"Host: got {_shown(value)}: a proxy without keys accepts only localhost, the host of public_url, and the names in "
        f"allowed_hosts; add it with --allowed-hosts {name} (STENO_ALLOWED_HOSTS), or set an admin_key",
        field="allowed_hosts",
    )


def _strange_page(said: str, field: str) -> StenoError:
    return Forbidden(
        f"{said}: a proxy without keys refuses web pages of other origins than its own (the request's address, or public_url); "
        "set an admin_key (STENO_ADMIN_KEY), then any page with a trial's key may send requests",
        field=field,
    )

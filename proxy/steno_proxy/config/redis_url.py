"""Redis URLs: one server, a cluster, or the primary that Sentinels name."""

from __future__ import annotations

import re
import socket
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from redis.connection import parse_url

from steno.config.settings import is_loopback
from steno.contracts.errors import ConfigError

PORT, SENTINEL_PORT = 6379, 26379
SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")


class RedisUrl(NamedTuple):
    """What a URL names.

    url: of a server, as redis-py takes it; "" where there are nodes or Sentinels.
    nodes: of a cluster, those that are asked for the others. sentinels: of the primary. Both: (host, port).
    service: the name under which Sentinels watch a primary. options: keyword arguments of a connection to a node or
    to the primary; sentinel_options: of one to a Sentinel.
    """

    url: str
    nodes: tuple[tuple[str, int], ...] = ()
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    sentinel_options: dict[str, Any] = {}  # noqa: RUF012


def read_redis_url(url: str) -> RedisUrl:
    """Forms: `redis://`, `rediss://` and `unix://` as in redis-py; `redis+cluster://USER:PASSWORD@HOST:PORT,HOST:PORT` with some
    nodes of a cluster; `redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/DB`, where `?sentinel_username=…` and
    `&sentinel_password=…` are for the Sentinels; `rediss+cluster://`, `rediss+sentinel://`. User, password, ports, DB: optional.

    Raises: ConfigError.
    """
    named = url.partition(":")[0]
    if named not in SCHEMES:
        got = "none" if "@" in named else repr(named)
        raise _wrong(f"scheme: got {got}, must be one of {', '.join(SCHEMES)}")
    if not url.startswith(f"{named}://"):
        raise _wrong(f"must begin with {named}://")
    scheme, _, kind = named.partition("+")
    try:
        if kind == "sentinel":
            return _with_sentinels(scheme, _split(url))
        return _with_nodes(scheme, _split(url)) if kind == "cluster" else _with_server(scheme, url)
    except (ValueError, ConfigError) as error:
        if _may_show_a_password(url):
            raise _wrong(
                "got an @ after the first /, ? or #: in a user or a password, write these as %2F, %3F and %23"
            ) from None
        raise (error if isinstance(error, ConfigError) else _wrong(str(error))) from None


def address_of(url: str) -> str:
    """Which database of which Redis, without user, password and options: `HOST:PORT/DB`, `PATH/DB` of a socket, or
    `HOST:PORT,HOST:PORT/SERVICE/DB` of Sentinels. Loopback addresses are `localhost`.

    Raises: ConfigError.
    """
    named = read_redis_url(url)
    options: dict[str, Any] = dict(named.options)
    if named.url:
        options = parse_url(named.url)  # type: ignore[no-untyped-call]
        if "path" in options:
            return f"{options['path']}/{options.get('db', 0)}"
    hosts = named.nodes or named.sentinels or [(options.get("host", "localhost"), options.get("port", PORT))]
    listed = sorted({f"{'localhost' if is_loopback(host) else host.lower()}:{port}" for host, port in hosts})
    return "/".join(filter(None, (",".join(listed), named.service, str(options.get("db") or 0))))


def home_of(url: str) -> str:
    """`address_of`, with this machine's name if the address is local: another machine has a Redis of its own there."""
    address = address_of(url)
    local = address.startswith("/") or "localhost:" in address
    return f"{address} on {socket.gethostname()}" if local else address


def _split(url: str) -> SplitResult:
    """As `urlsplit`, for several hosts too: that of newer Pythons refuses them if one is an IPv6 address in brackets."""
    scheme, _, rest = url.partition("#")[0].partition("://")
    rest, _, query = rest.partition("?")
    netloc, slash, path = rest.partition("/")
    return SplitResult(scheme, netloc, slash + path, query, "")


def _may_show_a_password(url: str) -> bool:
    """Whether there is an `@` after the first `/`, `?` or `#`: then what can't be read may be a part of a password."""
    return any("@" in rest for rest in re.split("[/?#]", url.partition("://")[2], maxsplit=1)[1:])


def _with_server(scheme: str, url: str) -> RedisUrl:
    parts = urlsplit(url)
    db = parts.path.strip("/")
    if scheme != "unix" and db and not db.isdigit():
        raise _wrong(f"database: got {db!r}, must be a number")  # redis-py takes what is none for 0
    parse_url(url)  # type: ignore[no-untyped-call]  # raises for what it can't take
    return RedisUrl(url)


def _with_nodes(scheme: str, parts: SplitResult) -> RedisUrl:
    if parts.path.strip("/") not in ("", "0"):
        raise _wrong(f"database: got {parts.path.strip('/')!r}, must be 0: a cluster has no other")
    nodes = _addresses(parts, PORT)
    return RedisUrl("", nodes=nodes, options=_options(scheme, parts, "", dict(parse_qsl(parts.query))))


def _with_sentinels(scheme: str, parts: SplitResult) -> RedisUrl:
    service, _, db = parts.path.strip("/").partition("/")
    if not service or not parts.netloc.rpartition("@")[2]:
        raise _wrong(
            "Sentinels, or the service that they watch, are missing: must be redis+sentinel://HOST:PORT,HOST:PORT/SERVICE"
        )
    if db and not db.isdigit():
        raise _wrong(f"database: got {db!r}, must be a number, after the service")
    query = dict(parse_qsl(parts.query))
    theirs = {name.removeprefix("sentinel_"): query.pop(name) for name in list(query) if name.startswith("sentinel_")}
    if unknown := set(theirs) - {"username", "password"}:
        raise _wrong(f"option: got sentinel_{min(unknown)}, must be sentinel_username or sentinel_password")
    options = _options(scheme, parts, db, query)
    secured = {name: value for name, value in options.items() if name.startswith("ssl")}
    return RedisUrl("", (), _addresses(parts, SENTINEL_PORT), unquote(service), options, theirs | secured)


def _options(scheme: str, parts: SplitResult, db: str, query: dict[str, str]) -> dict[str, Any]:
    """Keyword arguments of a connection. Raises: ValueError."""
    user, at, _ = parts.netloc.rpartition("@")
    options: dict[str, Any] = parse_url(f"{scheme}://{user}{at}host/{db}?{urlencode(query)}")  # type: ignore[no-untyped-call]
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    return options | ({"ssl": True} if scheme == "rediss" else {})


def _addresses(parts: SplitResult, port: int) -> tuple[tuple[str, int], ...]:
    """Raises: ValueError."""
    return tuple(_address(text, port) for text in parts.netloc.rpartition("@")[2].split(","))


def _address(text: str, port: int) -> tuple[str, int]:
    found = urlsplit(f"//{text}")
    if not found.hostname:
        raise ValueError(f"address: got {text!r}, must be HOST or HOST:PORT")
    return found.hostname, found.port or port


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"redis_url: {what}", field="redis_url")

"""Redis URLs: one server, a cluster, or the primary that Sentinels name."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.connection import parse_url

from proxy.contracts.errors import ConfigError

SENTINEL_PORT = 26379


class RedisUrl(NamedTuple):
    """What a URL names.

    url: of a server, or of any node of a cluster, as redis-py takes it; "" where there are Sentinels.
    sentinels: hosts and ports. service: the name under which they watch a primary. options: keyword arguments of a connection to
    the primary; sentinel_options: of one to a Sentinel.
    """

    url: str
    cluster: bool = False
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    sentinel_options: dict[str, Any] = {}  # noqa: RUF012


def read_redis_url(url: str) -> RedisUrl:
    """Forms: `redis://`, `rediss://` and `unix://` as in redis-py; `redis+cluster://` and `rediss+cluster://` with any node;
    `redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/DB` and `rediss+sentinel://`, where user, password, ports and DB
    may be left out, and `?sentinel_username=…&sentinel_password=…` are for the Sentinels themselves.

    Raises: ConfigError.
    """
    scheme, _, kind = url.partition(":")[0].partition("+")
    if (
        scheme not in ("redis", "rediss", "unix")
        or kind not in ("", "cluster", "sentinel")
        or (kind and scheme == "unix")
    ):
        raise _wrong(
            f"the scheme is {urlsplit(url).scheme!r}; redis, rediss, unix, redis+cluster, redis+sentinel were expected"
        )
    if kind == "sentinel":
        return _with_sentinels(scheme, url)
    return RedisUrl(url.replace("+cluster", "", 1), cluster=kind == "cluster")


def _with_sentinels(scheme: str, url: str) -> RedisUrl:
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service or not hosts:
        raise _wrong(
            "Sentinels and the service that they watch were expected: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE"
        )
    if db and not db.isdigit():
        raise _wrong(f"the database is {db!r}; a number was expected after the service")
    query = dict(parse_qsl(parts.query))
    theirs = {name.removeprefix("sentinel_"): query.pop(name) for name in list(query) if name.startswith("sentinel_")}
    if unknown := set(theirs) - {"username", "password"}:
        raise _wrong(f"sentinel_{min(unknown)} is none of sentinel_username, sentinel_password")
    try:
        sentinels = tuple(_address(host) for host in hosts.split(","))
        options = parse_url(f"{scheme}://{user}{at}host/{db}?{urlencode(query)}")  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise _wrong(str(error)) from None
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    secured = {name: value for name, value in options.items() if name.startswith("ssl_")}
    if scheme == "rediss":
        options["ssl"] = secured["ssl"] = True
    return RedisUrl("", False, sentinels, unquote(service), options, theirs | secured)


def _address(text: str) -> tuple[str, int]:
    found = urlsplit(f"//{text}")
    if not found.hostname:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return found.hostname, found.port or SENTINEL_PORT


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"redis_url: {what}", field="redis_url")

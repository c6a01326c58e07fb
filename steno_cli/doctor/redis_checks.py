"""Checks of a running Redis: connection, version, memory, disk, and settings."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from steno.contracts.errors import ConfigError
from steno_cli.doctor.findings import Finding, bad, clock, ok, warning
from steno_cli.doctor.redis_promises import failover, restart

if TYPE_CHECKING:
    from steno_proxy.redis_url import RedisUrl

OLDEST = 7
TIMEOUT_S = 5.0
ALMOST_FULL = 0.8
LEAST_SENTINELS = 3
Facts = Mapping[str, Any]


def check_redis(url: str, waited: int | None = None) -> list[Finding]:
    """Look at the Redis behind this URL; for a cluster, at one of the nodes that it names; behind Sentinels, at the primary and
    at them.

    Args: waited: `redis_wait_replicas` of the proxy; None: it can't be seen.
    """
    import redis

    from steno_proxy.redis_url import read_redis_url
    from steno_proxy.store.redis.greeting import refusal

    found: list[Finding] = []
    try:
        named = read_redis_url(url)
        if named.sentinels:
            found += _sentinels(named)
        if named.nodes:
            named, nodes = _one_node(named)
            found += nodes
        with contextlib.closing(_client(named)) as client:
            before = time.time()
            seconds, micros = client.time()
            after = time.time()
            info = client.info("all")
            try:
                settings = client.config_get("*")
            except redis.ResponseError:
                settings = None  # a service that keeps its settings to itself
            cluster = client.execute_command("CLUSTER INFO") if info.get("cluster_enabled") else None
    except redis.AuthenticationError as error:
        return [*found, bad("redis.reachable", f"refused us: {error}", "give the user and the password in --redis-url")]
    except ConfigError as error:
        return [*found, bad("redis.reachable", error.message, "correct --redis-url")]
    except (redis.RedisError, OSError, ValueError) as error:
        if said := asyncio.run(refusal(named)):
            return [*found, bad("redis.reachable", "it serves nobody from here", said)]
        return [*found, bad("redis.reachable", f"no answer: {error}", "start it, or correct --redis-url")]
    skew = clock("redis.clock", seconds + micros / 1e6 - (before + after) / 2, (after - before) / 2)
    return [
        *found,
        ok("redis.reachable", f"answers in {1000 * (after - before):.0f} ms"),
        skew,
        *judge(info, settings, cluster, waited),
    ]


def _options() -> dict[str, Any]:
    return {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, "decode_responses": True, "protocol": 2}


def _client(named: RedisUrl) -> Any:
    import redis

    if named.nodes:
        [(host, port)] = named.nodes
        return redis.Redis(host=host, port=port, **(_options() | named.options))
    if not named.sentinels:
        return redis.Redis.from_url(named.url, **_options())
    sentinel: Any = redis.Sentinel  # untyped, as are commands that redis-py has no method for
    asked = sentinel(list(named.sentinels), sentinel_kwargs=_options() | named.sentinel_options)
    return asked.master_for(named.service, **(_options() | named.options))


def _one_node(named: RedisUrl) -> tuple[RedisUrl, list[Finding]]:
    """The first node that answers, a primary if one does; the first of all if none does."""
    import redis

    roles, away = {}, []
    for node in named.nodes:
        with contextlib.closing(_client(named._replace(nodes=(node,)))) as client:
            try:
                roles[node] = client.execute_command("ROLE")[0]
            except (redis.RedisError, OSError):
                away.append("{}:{}".format(*node))
    primaries = [node for node, role in roles.items() if role == "master"]
    one = [*primaries, *roles, *named.nodes][0]
    findings = []
    if roles and away:
        findings.append(warning("redis.nodes", f"{', '.join(away)} away or refusing us", "start them again"))
    return named._replace(nodes=(one,)), findings


def _sentinels(named: RedisUrl) -> Iterator[Finding]:
    import redis

    agreed, away = 0, []
    for host, port in named.sentinels:
        options: dict[str, Any] = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, "protocol": 2}
        client: Any = redis.Redis(host=host, port=port, **(options | named.sentinel_options))
        with contextlib.closing(client):
            try:
                client.execute_command("SENTINEL", "CKQUORUM", named.service)
                agreed += 1
            except redis.ResponseError as error:
                yield bad(
                    "redis.sentinels",
                    f"{host}:{port}: {error}",
                    "start those that are missing, or correct the service",
                )
                return
            except (redis.RedisError, OSError):
                away.append(f"{host}:{port}")
    if away:
        yield warning("redis.sentinels", f"{', '.join(away)} away; {agreed} can fail over", "start them again")
    elif agreed < LEAST_SENTINELS:
        yield warning(
            "redis.sentinels", f"{agreed} named", f"name {LEAST_SENTINELS} in the URL: proxies start while one is away"
        )
    else:
        yield ok("redis.sentinels", f"{agreed}, with a quorum to fail over")


def judge(info: Facts, settings: Facts | None, cluster: Facts | None, waited: int | None = None) -> Iterator[Finding]:
    """What `INFO`, `CONFIG GET *` (None: forbidden) and `CLUSTER INFO` (None: no cluster) say. waited: as for `check_redis`."""
    version = str(info.get("redis_version", "?"))
    if version.partition(".")[0].isdigit() and int(version.partition(".")[0]) >= OLDEST:
        yield ok("redis.version", version)
    else:
        yield bad("redis.version", f"{version} is older than {OLDEST}", f"upgrade to Redis {OLDEST} or newer")
    if info.get("role") == "slave":
        yield bad("redis.role", "this is a read-only replica", "give the primary's URL")
    if cluster is not None and cluster.get("cluster_state") != "ok":
        yield bad("redis.cluster", f"cluster_state is {cluster.get('cluster_state')}", "redis-cli --cluster check")
    if settings is None:
        yield warning(
            "redis.settings",
            "CONFIG GET is forbidden, so persistence and eviction can't be seen",
            "look in the service's own settings: append-only file on, maxmemory-policy noeviction",
        )
    else:
        yield restart(settings, info)
        yield _eviction(settings)
    if info.get("role") != "slave":
        yield failover(info, waited)
    yield from _health(info)
    yield _memory(info)


def _eviction(settings: Facts) -> Finding:
    policy = settings.get("maxmemory-policy")
    if policy == "noeviction":
        return ok("redis.eviction", "noeviction: full memory refuses turns, and loses none")
    if str(settings.get("maxmemory", "0")) == "0":
        return warning("redis.eviction", f"maxmemory-policy {policy}, harmless while maxmemory is 0",
                       "CONFIG SET maxmemory-policy noeviction")  # fmt: skip
    return bad("redis.eviction", f"maxmemory-policy {policy}: full memory drops records silently (I3, I4)",
               "CONFIG SET maxmemory-policy noeviction; CONFIG REWRITE")  # fmt: skip


def _health(info: Facts) -> Iterator[Finding]:
    """Redis's own word on its last writes."""
    for name, what in (
        ("aof_last_write_status", "the append-only file could not be written"),
        ("aof_last_bgrewrite_status", "the append-only file could not be rewritten, and grows"),
        ("rdb_last_bgsave_status", "the last snapshot failed"),
    ):
        if info.get(name, "ok") != "ok":
            yield bad("redis.disk", f"{what} ({name})", "look at its disk's free space and its log")
    if info.get("loading"):
        yield bad("redis.loading", "it is loading its data", "wait; the proxy answers 503 until then")


def _memory(info: Facts) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    shown = f"{used / 2**20:.0f} MiB used"
    if not most:
        system = int(info.get("total_system_memory", 0))
        if system and used > ALMOST_FULL * system:
            return bad("redis.memory", f"{shown} of the machine's {system / 2**20:.0f} MiB",
                       "more memory, an archive, or a shorter retention_s")  # fmt: skip
        return ok("redis.memory", shown)
    if used > ALMOST_FULL * most:
        return bad("redis.memory", f"{shown} of maxmemory's {most / 2**20:.0f} MiB: turns are refused at the bound",
                   "set archive, raise maxmemory, shorten retention_s, or acknowledge and complete what waits")  # fmt: skip
    return ok("redis.memory", f"{shown} of {most / 2**20:.0f} MiB")

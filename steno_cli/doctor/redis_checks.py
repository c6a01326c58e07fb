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
    from steno_proxy.config.redis_url import RedisUrl

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

    from steno_proxy.config.redis_url import read_redis_url
    from steno_proxy.store.redis.link.greeting import refusal

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
        return [
            *found,
            bad(
                "redis.reachable", f"Redis refused the login: {error}", "give the user and the password in --redis-url"
            ),
        ]
    except ConfigError as error:
        return [*found, bad("redis.reachable", error.message, "correct --redis-url")]
    except (redis.RedisError, OSError, ValueError) as error:
        if said := asyncio.run(refusal(named)):
            return [*found, bad("redis.reachable", "Redis answers, but serves no client on this machine", said)]
        return [
            *found,
            bad("redis.reachable", f"Redis does not answer: {error}", "start Redis, or correct --redis-url"),
        ]
    skew = clock("redis.clock", seconds + micros / 1e6 - (before + after) / 2, (after - before) / 2)
    return [
        *found,
        ok("redis.reachable", f"Redis answers in {1000 * (after - before):.0f} ms"),
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
        findings.append(warning("redis.nodes", f"these nodes do not answer: {', '.join(away)}", "start them again"))
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
                    f"the Sentinel {host}:{port} answers: {error}",
                    "start the Sentinels that are missing, or correct the service in --redis-url",
                )
                return
            except (redis.RedisError, OSError):
                away.append(f"{host}:{port}")
    if away:
        yield warning(
            "redis.sentinels",
            f"these Sentinels do not answer: {', '.join(away)}; {agreed} others can start a failover",
            "start them again",
        )
    elif agreed < LEAST_SENTINELS:
        yield warning(
            "redis.sentinels",
            f"the URL names {agreed} Sentinels, it should name at least {LEAST_SENTINELS}",
            "name more in --redis-url, so that a proxy can start while one of them is away",
        )
    else:
        yield ok("redis.sentinels", f"{agreed} Sentinels answer, and have the quorum for a failover")


def judge(info: Facts, settings: Facts | None, cluster: Facts | None, waited: int | None = None) -> Iterator[Finding]:
    """What `INFO`, `CONFIG GET *` (None: forbidden) and `CLUSTER INFO` (None: no cluster) say. waited: as for `check_redis`."""
    version = str(info.get("redis_version", "?"))
    if version.partition(".")[0].isdigit() and int(version.partition(".")[0]) >= OLDEST:
        yield ok("redis.version", version)
    else:
        yield bad(
            "redis.version",
            f"this is Redis {version}, it must be {OLDEST} or newer",
            f"upgrade to Redis {OLDEST} or newer",
        )
    if info.get("role") == "slave":
        yield bad("redis.role", "this server is a read-only replica", "give the primary's URL")
    if cluster is not None and cluster.get("cluster_state") != "ok":
        yield bad(
            "redis.cluster",
            f"cluster_state is {cluster.get('cluster_state')}, it must be ok",
            "run redis-cli --cluster check",
        )
    if settings is None:
        yield warning(
            "redis.settings",
            "Redis forbids CONFIG GET, so doctor can't see its persistence and its eviction",
            "look in the service's own settings: it must have appendonly yes and maxmemory-policy noeviction",
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
        return ok(
            "redis.eviction",
            "maxmemory-policy is noeviction: a full Redis refuses turns and deletes none",
        )
    if str(settings.get("maxmemory", "0")) == "0":
        return warning("redis.eviction", f"maxmemory-policy is {policy}, it should be noeviction; harmless while maxmemory is 0",
                       "CONFIG SET maxmemory-policy noeviction")  # fmt: skip
    return bad("redis.eviction", f"maxmemory-policy is {policy}: a full Redis deletes records without an error (I3, I4)",
               "CONFIG SET maxmemory-policy noeviction; CONFIG REWRITE")  # fmt: skip


def _health(info: Facts) -> Iterator[Finding]:
    """What Redis says of its last writes to disk."""
    for name, what in (
        ("aof_last_write_status", "Redis could not write its append-only file"),
        ("aof_last_bgrewrite_status", "Redis could not rewrite its append-only file, so the file grows"),
        ("rdb_last_bgsave_status", "Redis could not write its last snapshot"),
    ):
        if info.get(name, "ok") != "ok":
            yield bad(
                "redis.disk", f"{what} ({name}: {info[name]})", "look at the free space of its disk, and at its log"
            )
    if info.get("loading"):
        yield bad("redis.loading", "Redis is loading its data", "wait until it has; the proxy answers 503 meanwhile")


def _memory(info: Facts) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    shown = f"Redis uses {used / 2**20:.0f} MiB"
    if not most:
        system = int(info.get("total_system_memory", 0))
        if system and used > ALMOST_FULL * system:
            return bad("redis.memory", f"{shown} of the machine's {system / 2**20:.0f} MiB",
                       "add memory, set archive, or shorten retention_s")  # fmt: skip
        return ok("redis.memory", shown)
    if used > ALMOST_FULL * most:
        return bad("redis.memory", f"{shown} of {most / 2**20:.0f} MiB (maxmemory): when memory is full, turns are refused",
                   "set archive, raise maxmemory, shorten retention_s, or complete open sessions and let the trainer acknowledge "
                   "its groups")  # fmt: skip
    return ok("redis.memory", f"{shown} of {most / 2**20:.0f} MiB (maxmemory)")

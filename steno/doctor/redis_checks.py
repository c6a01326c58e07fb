"""Redis: what its settings promise of I3. A turn is in the store before it is seen; how durable that is, Redis says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from steno.doctor.findings import Finding, bad, clock, ok, warning

OLDEST = 7
TIMEOUT_S = 5.0
ALMOST_FULL = 0.8
Facts = Mapping[str, Any]


def check_redis(url: str) -> list[Finding]:
    """Look at the Redis behind this URL; for a cluster, at the node that it names."""
    import redis

    try:
        with contextlib.closing(_client(url)) as client:
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
        return [bad("redis.reachable", f"refused us: {error}", "give the user and the password in --redis-url")]
    except (redis.RedisError, OSError, ValueError) as error:
        return [bad("redis.reachable", f"no answer: {error}", "start it, or correct --redis-url")]
    skew = clock("redis.clock", seconds + micros / 1e6 - (before + after) / 2, (after - before) / 2)
    return [
        ok("redis.reachable", f"answers in {1000 * (after - before):.0f} ms"),
        skew,
        *judge(info, settings, cluster),
    ]


def _client(url: str) -> Any:
    import redis

    scheme = urlsplit(url).scheme
    if scheme.endswith("+cluster"):
        url = url.replace("+cluster", "", 1)
    return redis.Redis.from_url(
        url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, decode_responses=True, protocol=2
    )


def judge(info: Facts, settings: Facts | None, cluster: Facts | None) -> Iterator[Finding]:
    """What `INFO`, `CONFIG GET *` (None: forbidden) and `CLUSTER INFO` (None: no cluster) say."""
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
        yield _persistence(settings, info)
        yield _eviction(settings)
    yield from _health(info)
    yield _memory(info)


def _persistence(settings: Facts, info: Facts) -> Finding:
    check = "redis.persistence"
    if settings.get("appendonly") != "yes":
        snapshots = "snapshots only" if settings.get("save") else "nothing on disk"
        return bad(check, f"no append-only file ({snapshots}): a crash loses turns that agents were told (I3)",
                   "CONFIG SET appendonly yes; CONFIG SET appendfsync always; CONFIG REWRITE")  # fmt: skip
    replicas = int(info.get("connected_slaves", 0))
    beside = (
        f"; {replicas} replicas follow without being waited for (no WAIT): a failover may lose the newest turns"
        if replicas
        else ""
    )
    fsync = settings.get("appendfsync")
    if fsync == "always":
        if replicas:
            return warning(check, f"I3 holds over power cuts of this server{beside}",
                           "after a failover compare the runs' ledgers: steno runs show RUN")  # fmt: skip
        return ok(check, "appendonly, appendfsync always: I3 holds over crashes and power cuts")
    if fsync == "everysec":
        return warning(check, f"appendfsync everysec: I3 holds over a crash of Redis; a power cut loses up to 2 s{beside}",
                       "CONFIG SET appendfsync always, if turns must outlive power cuts")  # fmt: skip
    return bad(check, f"appendfsync {fsync}: a power cut loses what the kernel had not written, often 30 s",
               "CONFIG SET appendfsync always (or everysec)")  # fmt: skip


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
                       "more memory, or a shorter retention_s")  # fmt: skip
        return ok("redis.memory", shown)
    if used > ALMOST_FULL * most:
        return bad("redis.memory", f"{shown} of maxmemory's {most / 2**20:.0f} MiB: turns are refused at the bound",
                   "raise maxmemory, shorten retention_s, or acknowledge and complete what waits")  # fmt: skip
    return ok("redis.memory", f"{shown} of {most / 2**20:.0f} MiB")

"""Which turns Redis's settings can lose (I3): at a restart, and at a failover."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steno_cli.doctor.findings import Finding, bad, ok, warning

Facts = Mapping[str, Any]

STALLED_S = 5
"""Since a replica was last heard of, which should be each second."""


def restart(settings: Facts, info: Facts) -> Finding:
    """What a restart of this server loses, by its `CONFIG GET` and `INFO`."""
    check, fsync = "redis.restart", settings.get("appendfsync")
    if settings.get("appendonly") != "yes":
        lost = "all writes after the last snapshot" if settings.get("save") else "all data"
        too = ", and its replicas delete the same" if int(info.get("connected_slaves", 0)) else ""
        return bad(check, f"a restart loses {lost}{too}: Redis writes no append-only file (I3)",
                   "CONFIG SET appendonly yes; CONFIG SET appendfsync always; CONFIG REWRITE")  # fmt: skip
    if fsync == "always":
        return ok(check, "a restart or a power cut loses no turn that an agent has received (appendfsync always)")
    if fsync == "everysec":
        return warning(check, "a restart loses nothing, a power cut up to 2 s of agents' turns (appendfsync everysec)",
                       "CONFIG SET appendfsync always, if no power cut may lose a turn")  # fmt: skip
    return bad(check, f"a power cut loses what the kernel had not written, often 30 s of turns (appendfsync {fsync})",
               "CONFIG SET appendfsync always (or everysec)")  # fmt: skip


def failover(info: Facts, waited: int | None) -> Finding:
    """What a failover to a replica of this server loses, by its `INFO`.

    Args: waited: how many replicas each write of the proxy waits for (`redis_wait_replicas`); None: it can't be seen.
    """
    check = "redis.failover"
    replicas = [facts for name, facts in info.items() if re.fullmatch(r"slave\d+", name)]
    following = [facts for facts in replicas if facts["state"] == "online" and int(facts["lag"]) <= STALLED_S]
    stalled = [f"{facts['ip']}:{facts['port']}" for facts in replicas if facts not in following]
    if waited and len(following) < waited:
        gone = f"; stalled: {', '.join(stalled)}" if stalled else ""
        return bad(check, f"each write waits for {waited} replicas, but {len(following)} follow{gone}: writes get 503",
                   "start the replicas again, and run one more than the proxy waits for")  # fmt: skip
    if waited:
        return ok(
            check,
            f"a failover loses no turn that an agent has received: {waited} replicas get it first, {len(following)} follow",
        )
    if not replicas:
        return ok(check, "Redis has no replica: while it is away, requests get 503")
    advice = (
        "STENO_REDIS_WAIT_REPLICAS=1 at every proxy; CONFIG SET min-replicas-to-write 1 stops a primary that is cut off"
    )
    behind = int(info.get("master_repl_offset", 0)) - max(int(facts["offset"]) for facts in replicas)
    if not following:
        lost = f"{', '.join(stalled)} stalled, {behind} bytes behind"
        return bad(check, f"a failover loses turns that agents have received: {lost}", advice)
    known = "does not wait" if waited == 0 else "may not wait (it does not say)"
    return warning(
        check,
        f"a failover loses the newest turns that agents have received: the proxy {known} for {len(replicas)} replicas",
        advice,
    )

"""What Redis's settings keep of I3, in words: over a restart, and over a failover. A turn is in the store before it is seen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steno_cli.doctor.findings import Finding, bad, ok, warning

Facts = Mapping[str, Any]

STALLED_S = 5
"""Since a replica was last heard of, which should be each second."""


def restart(settings: Facts, info: Facts) -> Finding:
    """Of this server, by its `CONFIG GET` and `INFO`: it comes back with what is on its disk."""
    check, fsync = "redis.restart", settings.get("appendfsync")
    if settings.get("appendonly") != "yes":
        left = "what came after its last snapshot" if settings.get("save") else "everything"
        too = ", and has its replicas drop theirs" if int(info.get("connected_slaves", 0)) else ""
        return bad(check, f"loses {left}{too}: no append-only file (I3)",
                   "CONFIG SET appendonly yes; CONFIG SET appendfsync always; CONFIG REWRITE")  # fmt: skip
    if fsync == "always":
        return ok(check, "loses nothing that agents were told, also after a power cut (appendfsync always)")
    if fsync == "everysec":
        return warning(check, "loses nothing; after a power cut up to 2 s of turns that agents were told (appendfsync everysec)",
                       "CONFIG SET appendfsync always, if turns must outlive power cuts")  # fmt: skip
    return bad(check, f"after a power cut loses what the kernel had not written, often 30 s (appendfsync {fsync})",
               "CONFIG SET appendfsync always (or everysec)")  # fmt: skip


def failover(info: Facts, waited: int | None) -> Finding:
    """To one of its replicas, by its `INFO`.

    Args: waited: how many replicas each write of the proxy waits for (`redis_wait_replicas`); None: it can't be seen.
    """
    check = "redis.failover"
    replicas = [facts for name, facts in info.items() if re.fullmatch(r"slave\d+", name)]
    following = [facts for facts in replicas if facts["state"] == "online" and int(facts["lag"]) <= STALLED_S]
    stalled = [f"{facts['ip']}:{facts['port']}" for facts in replicas if facts not in following]
    if waited and len(following) < waited:
        gone = f"; {', '.join(stalled)} stalled" if stalled else ""
        return bad(check, f"each write waits for {waited} replicas and {len(following)} follow{gone}: writes get 503",
                   "bring the replicas back, and have one more than are waited for")  # fmt: skip
    if waited:
        return ok(
            check, f"loses nothing that agents were told: {waited} replicas have it first, {len(following)} follow"
        )
    if not replicas:
        return ok(check, "there is no replica to fail over to: while Redis is away, requests get 503")
    advice = (
        "STENO_REDIS_WAIT_REPLICAS=1 at every proxy; CONFIG SET min-replicas-to-write 1 stops a primary that is cut off"
    )
    behind = int(info.get("master_repl_offset", 0)) - max(int(facts["offset"]) for facts in replicas)
    if not following:
        return bad(check, f"loses turns that agents were told: {', '.join(stalled)} stalled {behind} bytes behind; nothing waits",
                   advice)  # fmt: skip
    known = "are not waited for" if waited == 0 else "may not be waited for (the proxy does not say)"
    return warning(
        check, f"loses turns that agents were told a moment before: {len(replicas)} replicas {known}", advice
    )

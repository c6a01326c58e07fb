"""The record of a worker in `GET /workers`: one definition for the hub, the REST API and its clients."""

from __future__ import annotations

import msgspec

from steno.contracts.wire.frames import Heartbeat, ModelCard


class Load(msgspec.Struct, frozen=True):
    """A worker's last heartbeat: `running` and `waiting` are counts of streams, `kv_used` a fraction of cache in 0..1;
    0 where the worker says what is none."""

    running: int
    waiting: int
    kv_used: float

    @classmethod
    def of(cls, beat: Heartbeat) -> Load:
        return cls(beat.running, beat.waiting, beat.kv_used if 0 <= beat.kv_used <= 1 else 0.0)


class WorkerView(msgspec.Struct, frozen=True):
    """One worker as this proxy sees it.

    load: its last heartbeat (all proxies' streams). in_flight: streams of this proxy on it.
    connected: its socket is up; a worker that is not may come back within the resume grace.
    behind: policies for which it gets no new turns: what it serves of them is not the version in force.
    suspect: the last impossible data that it sent; new turns go to other workers while these can take them; "": it is trusted.
    address: from where it dialled, as the socket shows it (behind a load balancer: the balancer's); "": over a Unix socket.
        None: from a proxy of an older version, which does not say.
    since: Unix time of the worker's arrival, in seconds. idle_s: seconds since it was last heard.
    """

    id: str
    models: list[ModelCard]
    load: Load
    in_flight: int
    max_streams: int
    connected: bool
    healthy: bool
    draining: bool
    since: float
    idle_s: float
    behind: list[str] = []
    suspect: str = ""
    address: str | None = None


class WorkerPage(msgspec.Struct, frozen=True):
    """`GET /workers`: all of them; a fleet fits in one page."""

    items: list[WorkerView]
    next_cursor: str | None = None

"""The Redis of a deployment: one server, or a primary and its replica that Sentinels watch; and what can be done to either."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import redis

from tests.support.machine.redis_server import RedisSentinel, RedisServer

DISK_BYTES = 96 * 2**20
START_S = 180.0
SERVICE = "steno"
SENTINELS = 3
DOWN_AFTER_S = 1.0
FULL_BYTES = 1_000_000


class Server(RedisServer):
    """On a disk of its own, where this machine lets one be mounted. Attributes: disk: that disk's folder, or None."""

    def __init__(self, disk: Path) -> None:
        self.disk: Path | None = disk
        self._one_at_a_time = threading.RLock()  # faults overlap
        disk.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
        if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
            self.disk = None
        options = ("--dir", str(self.disk)) if self.disk else ()
        super().__init__(options=(*options, "--enable-debug-command", "yes", "--save", "", "--loglevel", "warning"))

    def kill(self) -> None:
        with self._one_at_a_time:
            super().kill()

    def ensure(self) -> None:
        """Make it run, answer and take writes again. It is started again also if it ends while this runs."""
        with self._one_at_a_time:
            self._ensure()

    def _ensure(self) -> None:
        self.free_disk()
        self.resume()
        until = time.monotonic() + START_S
        while True:
            try:
                if self._process is None or self._process.poll() is not None:
                    self.start()
                with self.client() as client:
                    client.execute_command("CLIENT UNPAUSE")
                    client.config_set("maxmemory", 0)
                    client.config_set("appendfsync", "always")
                return
            except (redis.ConnectionError, redis.TimeoutError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def announce(self, port: int) -> None:
        """Announce this port to replicas and Sentinels as the server's own, also after a restart."""
        self._options = (*self._options, "--replica-announce-ip", "127.0.0.1", "--replica-announce-port", str(port))
        with self.client() as client:
            client.config_set("replica-announce-ip", "127.0.0.1")
            client.config_set("replica-announce-port", port)

    def fill_disk(self, *, gives_up: bool) -> None:
        """Fill the server's disk. gives_up: with appendfsync always, so that it ends; else with everysec: it refuses writes."""
        assert self.disk is not None
        with contextlib.suppress(redis.RedisError), self.client() as client:  # it may be away, by another fault
            client.config_set("appendfsync", "always" if gives_up else "everysec")
        with contextlib.suppress(OSError), (self.disk / "filler").open("wb") as filler:
            while True:
                filler.write(b"\0" * 65536)
                filler.flush()

    def free_disk(self) -> None:
        if self.disk is not None:
            (self.disk / "filler").unlink(missing_ok=True)

    def fill_memory(self) -> None:
        with contextlib.suppress(redis.RedisError), self.client() as client:
            client.config_set("maxmemory", FULL_BYTES)

    def hold(self, seconds: float) -> None:
        """It answers nobody for so long."""
        with contextlib.suppress(redis.RedisError), self.client() as client:
            client.execute_command("CLIENT PAUSE", int(seconds * 1000), "ALL")

    def close(self) -> None:
        super().close()
        if self.disk is not None:
            subprocess.run(["umount", "--lazy", str(self.disk)], capture_output=True)


class Store:
    """Args: watched: two servers and three Sentinels; else one server. Raises RuntimeError when something does not come up."""

    def __init__(self, folder: Path, *, watched: bool) -> None:
        self.servers = [Server(folder / f"redis-disk-{number}") for number in range(2 if watched else 1)]
        self._sentinels: list[RedisSentinel] = []
        self._ports: list[int] = []

    @property
    def watched(self) -> bool:
        return len(self.servers) > 1

    def watch(self, ports: Sequence[int]) -> None:
        """Make the second server a replica, and start Sentinels. Args: ports: by which clients and servers reach each server."""
        self._ports = list(ports)
        for server, port in zip(self.servers, ports, strict=True):
            server.announce(port)
        self.servers[1].follow(ports[0])
        self._sentinels = [
            RedisSentinel(ports[0], service=SERVICE, down_after_s=DOWN_AFTER_S) for _ in range(SENTINELS)
        ]
        for sentinel in self._sentinels:
            sentinel.knows(SERVICE, others=SENTINELS - 1, replicas=1)

    @property
    def url(self) -> str:
        """Of the Sentinels."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self._sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    @property
    def place(self) -> int:
        """Number of the server that the Sentinels name as the primary."""
        for sentinel in self._sentinels:
            with contextlib.suppress(redis.RedisError), redis.Redis(port=sentinel.port, socket_timeout=5) as client:
                return self._ports.index(client.sentinel_get_master_addr_by_name(SERVICE)[1])
        return 0

    @property
    def primary(self) -> Server:
        return self.servers[self.place]

    def switch(self) -> None:
        """Have the Sentinels make the replica the primary, though nothing is wrong; they may not be able to."""
        with contextlib.suppress(redis.RedisError), redis.Redis(port=self._sentinels[0].port) as client:
            client.execute_command("SENTINEL", "FAILOVER", SERVICE)

    def ensure(self) -> None:
        """All of them run and answer; a pair is a primary with its replica in step, and the Sentinels agree on which is which."""
        for server in self.servers:
            server.ensure()
        until = time.monotonic() + START_S
        while self.watched and (wrong := self._lacks()):
            if time.monotonic() > until:
                raise RuntimeError(f"Redis does not come to order: {wrong}")
            time.sleep(0.1)

    def _lacks(self) -> str:
        try:
            named = set()
            for sentinel in self._sentinels:
                with redis.Redis(port=sentinel.port, socket_timeout=5) as client:
                    named.add(client.sentinel_get_master_addr_by_name(SERVICE)[1])
            if len(named) > 1:
                return f"the Sentinels name {sorted(named)}"
            primary = self._ports.index(named.pop())
            said = []
            for server in (self.servers[primary], self.servers[1 - primary]):
                with server.client() as client:
                    said.append(client.info("replication"))
        except redis.RedisError as error:
            return repr(error)
        first, second = said
        follows = (second.get("master_port"), second.get("master_link_status")) == (self._ports[primary], "up")
        if (first["role"], second["role"]) == ("master", "slave") and follows and first["connected_slaves"] == 1:
            return ""
        return f"{first}, {second}"

    def close(self) -> None:
        for sentinel in self._sentinels:
            sentinel.close()
        for server in self.servers:
            server.close()

"""Three replicas, five workers (of two models) and Redis as processes, with a relay on every line between them, to be mistreated.

Lives in one event loop, where its relays run. Processes go on from one seed to the next, but for those that a seed ends; `heal`
puts everything back in order. Output of each goes to FOLDER/NAME.log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from tests.chaos.schedule import MODELS, OTHERS, REPLICAS, WORKERS
from tests.chaos.system.stores import Store
from tests.support.machine.tcprelay import TcpRelay
from tests.support.programs.ports import free_port
from tests.support.programs.stack import ROOT

PROXY = """--heartbeat-s 0.3 --silence-s 1.2 --resume-grace-s 0.8 --queue-s 20 --sweep-s 1 --shutdown-s 3 --keepalive-s 0.5
           --body-timeout-s 5 --host 127.0.0.1""".split()
START_S = 180.0
MOST_STARTS = 20
"""How often in a row a replica that ends at once is started again."""
CLOCK_JUMP_S = 8.0
"""How far a replica's clock jumps ahead: a lease that is granted meanwhile lasts so much longer."""
WAIT_S = 1.5


@dataclass
class Program:
    """One process that is started again and again. baseline: (fds, bytes resident) once it had settled."""

    name: str
    args: list[str]
    log: Path
    child: subprocess.Popen[bytes] | None = None
    starts: int = 0
    baseline: tuple[int, int] | None = None
    read: int = 0  # bytes of the log that have been looked at

    def __post_init__(self) -> None:
        self.read = self.log.stat().st_size if self.log.exists() else 0  # of an earlier deployment in the same folder

    @property
    def runs(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def start(self) -> None:
        if self.runs:
            return
        with self.log.open("ab") as out:
            self.child = subprocess.Popen(
                [sys.executable, *self.args], stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self.starts += 1
        self.baseline = None

    def signal(self, number: int) -> None:
        if self.runs:
            assert self.child is not None
            self.child.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.child is not None:
            self.child.wait()

    async def ended(self, within_s: float) -> bool:
        until = time.monotonic() + within_s
        while self.runs and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return not self.runs

    def usage(self) -> tuple[int, int]:
        """(open file descriptors, bytes resident)"""
        assert self.child is not None
        process = psutil.Process(self.child.pid)
        return process.num_fds(), process.memory_info().rss

    def new_log(self) -> str:
        """What it has written since last asked."""
        with self.log.open("rb") as file:
            file.seek(self.read)
            data = file.read()
        self.read += len(data)
        return data.decode(errors="replace")


class Deployment:
    """`async with Deployment(folder) as deployment:`. Raises RuntimeError naming what does not come up.

    Args: watched: Redis is a primary and its replica, with Sentinels, and every write waits for the replica.
        mutant: what is wrong with the replicas or the workers, by `chaos/mutants.py`.
        patience_s: how long programs wait: for streams to end on SIGTERM, for a silent worker, for a lost socket. None: short,
        so that faults take effect; on a busy machine replicas then take slow workers for lost ones.

    Attributes:
        agents: a relay per replica. links: a relay per worker and replica, at `worker * REPLICAS + replica`.
        lines: to Redis, a relay per replica; if watched, one per server, as everybody finds it.
        journals: what each worker has sampled (`chaos/journal.py`).
    """

    def __init__(
        self, folder: Path, *, watched: bool = False, mutant: str = "-", patience_s: float | None = None
    ) -> None:
        self.folder = folder
        self._mutant = mutant
        self._patience_s = patience_s
        folder.mkdir(parents=True, exist_ok=True)
        self.redis = Store(folder, watched=watched)
        self.ports = [free_port() for _ in range(REPLICAS)]
        self.agents: list[TcpRelay] = []
        self.lines: list[TcpRelay] = []
        self.links: list[TcpRelay] = []
        self.replicas: list[Program] = []
        self.workers: list[Program] = []
        self.journals: list[Path] = []
        self._stack = contextlib.AsyncExitStack()

    def _patience(self, *flags: str) -> list[str]:
        return [] if self._patience_s is None else [word for flag in flags for word in (flag, str(self._patience_s))]

    def _redis(self, replica: int) -> list[str]:
        if self.redis.watched:
            return ["--redis-url", self.redis.url, "--redis-wait-replicas", "1", "--redis-wait-s", str(WAIT_S)]
        return ["--redis-url", f"redis://127.0.0.1:{self.lines[replica].port}/0"]

    def line(self, replica: int) -> TcpRelay:
        """Between a replica and Redis; if watched, between everybody and the primary."""
        return self.lines[self.redis.place if self.redis.watched else replica]

    def url(self, replica: int) -> str:
        """As agents reach it, through their relay."""
        return f"http://127.0.0.1:{self.agents[replica].port}"

    def direct(self, replica: int) -> str:
        return f"http://127.0.0.1:{self.ports[replica]}"

    @property
    def programs(self) -> list[Program]:
        return [*self.replicas, *self.workers]

    async def __aenter__(self) -> Deployment:
        try:
            await self._begin()
        except BaseException:  # nobody leaves what was not entered
            await self._stack.aclose()
            raise
        return self

    async def _begin(self) -> None:
        enter = self._stack.enter_async_context
        self._stack.callback(self._close)
        servers = self.redis.servers if self.redis.watched else self.redis.servers * REPLICAS
        self.lines = [await enter(TcpRelay("127.0.0.1", server.port)) for server in servers]
        if self.redis.watched:
            await asyncio.to_thread(self.redis.watch, [line.port for line in self.lines])
        self.agents = [await enter(TcpRelay("127.0.0.1", port)) for port in self.ports]
        self.links = [await enter(TcpRelay("127.0.0.1", port)) for _ in range(WORKERS + OTHERS) for port in self.ports]
        for number, port in enumerate(self.ports):
            args = [
                "-m",
                "tests.chaos.system.replica",
                str(CLOCK_JUMP_S),
                self._mutant,
                "proxy",
                "--port",
                str(port),
                *self._redis(number),
            ]
            args += [
                "--archive",
                str(self.folder / f"archive-{self.ports[0]}"),
            ]  # one for all replicas: the default goes by the Redis URL, and each replica has its own relay to Redis
            args += [*PROXY, *self._patience("--shutdown-s", "--silence-s", "--resume-grace-s")]
            self.replicas.append(Program(f"r{number}", args, self.folder / f"r{number}.log"))
        for number in range(WORKERS + OTHERS):
            links = self.links[number * REPLICAS : (number + 1) * REPLICAS]
            dial = [word for link in links for word in ("--proxy", f"ws://127.0.0.1:{link.port}")]
            journal = self.folder / f"w{number}.sampled"
            args = ["-m", "tests.chaos.system.engine", "--worker-id", f"w{number}", "--journal", str(journal), *dial]
            args += ["--model", MODELS[number >= WORKERS], "--mutant", self._mutant, *self._patience("--drain-s")]
            self.journals.append(journal)
            self.workers.append(Program(f"w{number}", args, self.folder / f"w{number}.log"))
        await self.heal()

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _close(self) -> None:
        for program in self.programs:
            program.signal(signal.SIGCONT)
            program.signal(signal.SIGTERM)
        until = time.monotonic() + 8
        for program in self.programs:
            if program.child is not None:
                try:
                    program.child.wait(max(0.1, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    program.kill()
        self.redis.close()

    # -- order

    async def heal(self) -> None:
        """Bring everything back: each process runs, each relay passes data, each replica has all workers and Redis."""
        for relay in (*self.agents, *self.lines, *self.links):
            relay.delay_s, relay.cut_after_bytes, relay.accepting = 0.0, None, True
            relay.resume()
        await asyncio.to_thread(self.redis.ensure)
        for program in self.programs:
            program.signal(signal.SIGCONT)
            program.start()
        for replica in self.replicas:
            if not await self._listens(replica):
                raise RuntimeError(f"{replica.name} did not come up\n{replica.log.read_text()[-3000:]}")
            replica.signal(signal.SIGUSR1)
        await self._whole()

    async def _listens(self, replica: Program) -> bool:
        port = self.ports[self.replicas.index(replica)]
        until, most = time.monotonic() + START_S, replica.starts + MOST_STARTS
        while time.monotonic() < until and replica.starts < most:
            if not replica.runs:
                replica.start()  # its port may have been somebody's for a moment, or a drain has ended it
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return True
            await asyncio.sleep(0.05)
        return False

    async def _whole(self) -> None:
        until = time.monotonic() + START_S
        wrong = ""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            while time.monotonic() < until:
                for program in self.programs:
                    program.start()
                wrong = await self._lacks(http)
                if not wrong:
                    return
                await asyncio.sleep(0.05)
        raise RuntimeError(f"the deployment does not come to order: {wrong}")

    async def _lacks(self, http: aiohttp.ClientSession) -> str:
        for number in range(REPLICAS):
            try:
                async with http.get(self.direct(number) + "/readyz") as response:
                    if response.status != 200:
                        return f"r{number} is not ready: {await response.text()}"
                async with http.get(self.direct(number) + "/workers") as response:
                    items = (await response.json())["items"]
            except (aiohttp.ClientError, TimeoutError) as error:
                return f"r{number}: {error!r}"
            able = {one["id"] for one in items if one["connected"] and not one["draining"] and not one.get("behind")}
            if len(able) < WORKERS + OTHERS:
                return f"r{number} has {sorted(able)}: {items}"
        return ""

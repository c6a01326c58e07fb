"""Docker's and Podman's command line: the words of a command, and running it.

The command line and not the API: Podman needs no daemon by it, and both take the same words for all that is used here. What
differs stands in `ContainerEngine` and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from steno.contracts.errors import ConfigError
from steno_rollouts.trials.executor import CannotStart

RUN, TRIAL, LAUNCHER = "steno.run", "steno.trial", "steno.launcher"
"""Labels of every container. Who is left over is found by them."""
COMMAND_S = 120.0
BUILD_S = 3600.0
"""Of a build or a pull: images are large."""
LOOKS_S = 5.0
"""For the engine to say what there is. It may be busy, or its database locked, and neither says anything about a trial."""
LOOK_AGAIN_S = 0.5
REMOVALS = 20
"""Rounds in which a container must be gone."""
NOW_S = 30.0
"""For all of them to be gone at once: so long the launcher does nothing else, whatever its operator presses."""
PROCESSES = 1024
"""In a container."""
HOME = "/home/trial"
"""The user has no entry in the image's passwd, and what agents keep at home must be writable."""
ROOT_IS = 1000
"""Whom containers run as where these rollouts run as root."""
MOST_SAID = 600
"""Characters of what an engine says."""
_PROXIES = "HTTP_PROXY HTTPS_PROXY ALL_PROXY FTP_PROXY NO_PROXY".split()


class EngineError(CannotStart):
    """The engine refused, or is not there; the text is what it said last."""


@dataclass(frozen=True)
class Mount:
    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True)
class Container:
    """What is created. network: `none`, or `container:NAME`. named: variables that the engine's own environment carries, so
    that no key stands in a list of processes; given: others. home: where the image says none."""

    name: str
    image: str
    command: Sequence[str]
    labels: Mapping[str, str]
    network: str = "none"
    workdir: PurePosixPath | None = None
    mounts: Sequence[Mount] = ()
    named: Collection[str] = ()
    home: bool = True
    cpus: float = 1.0
    memory_mb: int = 128
    processes: int = PROCESSES


@dataclass(frozen=True)
class ContainerState:
    """Of a container. started: whether its command ever ran."""

    running: bool
    started: bool
    code: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ContainerState:
        return cls(
            bool(state["Running"]),
            not str(state["StartedAt"]).startswith("0001-"),
            int(state["ExitCode"]),
        )


@dataclass(frozen=True)
class ContainerEngine:
    """program: `docker` or `podman`. user: whom containers run as, also the owner of what they are given."""

    program: str
    is_podman: bool
    user: int = field(default_factory=lambda: os.geteuid() or ROOT_IS)
    group: int = field(default_factory=lambda: os.getegid() if os.geteuid() else ROOT_IS)

    @classmethod
    def named(cls, name: str) -> ContainerEngine:
        """Raises: ConfigError: it is not installed."""
        program = shutil.which(name)
        if program is None:
            raise ConfigError(f"executor: {name}: not found on PATH", field="executor")
        try:
            said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=COMMAND_S).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"executor: {program} --version: {error}", field="executor") from None
        return cls(program, "podman" in said.lower())  # Debian's package podman-docker calls itself docker

    def create_words(self, container: Container) -> list[str]:
        words = ["create", f"--name={container.name}"]
        words += [f"--label={name}={value}" for name, value in container.labels.items()]
        words += [
            "--init", f"--network={container.network}", f"--user={self.user}:{self.group}", "--cap-drop=ALL",
            "--security-opt=no-new-privileges", f"--cpus={container.cpus:g}", f"--memory={container.memory_mb}m",
            f"--memory-swap={container.memory_mb}m", f"--pids-limit={container.processes}", "--stop-timeout=0",
            "--log-driver=none",
        ]  # fmt: skip
        if self.is_podman:
            words.append("--http-proxy=false")
            if os.geteuid():  # whoever is in another's network is in its user namespace too
                joined = container.network if container.network.startswith("container:") else "keep-id"
                words.append(f"--userns={joined}")
        else:  # its configuration may name proxies, with their passwords
            words += [f"--env={name}=" for each in _PROXIES for name in (each, each.lower())]
        if container.home:
            words += [f"--env=HOME={HOME}", f"--tmpfs={HOME}:rw,exec,mode=1777"]
        words += [f"--env={name}" for name in container.named]
        for mount in container.mounts:
            words.append(f"--volume={mount.source.absolute()}:{mount.target}:{'rw' if mount.writable else 'ro'},z")
        if container.workdir is not None:
            words.append(f"--workdir={container.workdir}")
        program, *arguments = container.command
        return [*words, f"--entrypoint={program}", container.image, *arguments]

    async def create(self, container: Container, values: Mapping[str, str] | None = None) -> None:
        await self.run(*self.create_words(container), values=values)

    async def run(
        self, *words: str, values: Mapping[str, str] | None = None, limit_s: float = COMMAND_S, patient: bool = True
    ) -> str:
        """What the command printed. Cancelled: it is waited for first, since what it makes must be found; or ended, if not
        `patient`. Raises: EngineError."""
        process = await self._start(words, values, asyncio.subprocess.PIPE, asyncio.subprocess.PIPE)
        talking = asyncio.ensure_future(process.communicate())
        try:
            out, err = await asyncio.wait_for(asyncio.shield(talking), limit_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            if not patient or isinstance(error, TimeoutError):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await talking
            if isinstance(error, TimeoutError):
                raise EngineError(f"{self.program} {words[0]}: no answer in {limit_s:g} s") from None
            raise
        if process.returncode:
            raise EngineError(
                f"{self.program} {words[0]}: {_last_lines(err) or _last_lines(out) or process.returncode}"
            )
        return out.decode(errors="replace").strip()

    async def attach(self, name: str, stdout: Path, stderr: Path) -> asyncio.subprocess.Process:
        """Start a container; the process ends when the container does."""
        with stdout.open("ab") as out, stderr.open("ab") as err:
            return await self._start(("start", "--attach", name), None, out, err)

    async def stop(self, name: str, grace_s: float) -> None:
        await self.run("stop", "-t", str(math.ceil(grace_s)), name, limit_s=grace_s + COMMAND_S)

    async def state(self, name: str) -> ContainerState:
        return ContainerState.of(
            json.loads(await self.look("inspect", "--type=container", "--format={{json .State}}", name))
        )

    async def found(self, label: str) -> list[str]:
        """Ids of all containers that have a label (`NAME` or `NAME=VALUE`), running ones and others."""
        return (await self.look("ps", "--all", "--quiet", "--no-trunc", f"--filter=label={label}")).split()

    async def labelled(self, label: str) -> dict[str, dict[str, str]]:
        """All labels of these containers, by id."""
        found = {}
        for identity in await self.found(label):
            with contextlib.suppress(EngineError):  # gone meanwhile
                labels = await self.run("inspect", "--type=container", "--format={{json .Config.Labels}}", identity)
                found[identity] = dict(json.loads(labels))
        return found

    async def remove(self, identities: Collection[str]) -> None:
        """End and remove containers. One that is gone already is no error. Raises: EngineError: one of them is left."""
        left, why = list(identities), ""
        for _ in range(REMOVALS):
            for identity in list(left):
                try:
                    await self.run("rm", "--force", "--volumes", identity)
                    left.remove(identity)
                except EngineError as error:  # gone already; or another one, in its network, must go first
                    why = str(error)
            there = await self.look("ps", "--all", "--quiet", "--no-trunc") if left else ""
            left = [identity for identity in left if identity in there.split()]
            if not left:
                return
            await asyncio.sleep(0.1)  # another process may be at removing it
        raise EngineError(f"container {left[0][:12]} is left: {why}")

    async def look(self, *words: str) -> str:
        """As `run`, for what only reads; asked again for a while where the engine refuses. Raises: EngineError."""
        until = time.monotonic() + LOOKS_S
        while True:
            try:
                return await self.run(*words)
            except EngineError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)

    def remove_now(self, label: str) -> str:
        """Remove all containers with a label, blocking and without the event loop: for a caller that is cancelled a second time.

        Returns: why one is left; "": all are gone. Raises: EngineError: the engine can't be started, or does not answer in
        `NOW_S`."""
        until = time.monotonic() + NOW_S
        why = ""
        for _ in range(REMOVALS):
            listed = self._run_now(until, "ps", "--all", "--quiet", f"--filter=label={label}")
            found = listed.stdout.decode(errors="replace").split()
            if listed.returncode:
                why = f"{self.program} ps: {_last_lines(listed.stderr) or listed.returncode}"
            elif found:
                removed = self._run_now(until, "rm", "--force", "--volumes", *found)
                why = f"{self.program} rm: {_last_lines(removed.stderr) or removed.returncode}"
            else:
                return ""
        return why

    def _run_now(self, until: float, *words: str) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                [self.program, *words], capture_output=True, env=_own_environment(), timeout=until - time.monotonic()
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"{self.program} {words[0]}: no answer in {NOW_S:g} s") from None
        except OSError as error:
            raise EngineError(f"{self.program} {words[0]}: {error.strerror or error}") from None

    async def _start(
        self, words: Sequence[str], values: Mapping[str, str] | None, out: Any, err: Any
    ) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                self.program, *words,
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err,
                env=_own_environment() | dict(values or {}), start_new_session=True,
                cwd=tempfile.gettempdir(),  # Podman's conmon leaves a file `oom` where it is started
            )  # fmt: skip
        except OSError as error:
            raise EngineError(f"{self.program} {words[0]}: {error.strerror or error}") from None


def _own_environment() -> dict[str, str]:
    """Of the engine's processes, which need no key of ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STENO_")}


def _last_lines(output: bytes) -> str:
    """The last lines, which say why. Podman's own log of what it tried again is left out, where there is more."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith('time="')] or lines
    said = "; ".join(lines[-3:])
    return said if len(said) <= MOST_SAID else f"…{said[-MOST_SAID:]}"

"""A sandbox of Harbor's that is a pod. Agents, verifiers, steps and images are Harbor's; this is the pod and the ways into it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets as randomness
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities

from . import shell, streams
from .api import AlreadyThere, Api, Changed, NotThere
from .errors import (
    ApiRefused,
    ApiUnavailable,
    ImageNotPulled,
    PodError,
    PodGone,
    PodNotStarted,
    QuotaExceeded,
    StreamBroken,
)
from .manifest import ATTEMPT, Manifest, PodSandbox, pod, secret
from .states import PodState, state_of

LOOK_S = 0.2
ASK_S = 15.0
"""After which the cluster is asked, where what watches the pods has said nothing."""
CAUSE_S = (20.0, 4.0)
"""To find out why a connection broke: the limit in all, and the wait before each question to the cluster. A node reports a pod's
end some seconds after its container ended; and the keeper, which watches the pods, may be cut off as well."""
END_S = 10.0
"""Limit for ending the processes of a command that is given up."""
TRIES = 3
"""Tries at a transfer: it can be done again."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before a pod is created again, if a quota changed while the pod was counted."""
FULL_S = (1.0, 30.0)
"""First and longest pause before a pod is created again for which a quota has no room: hundreds may wait, and each asks."""


T = TypeVar("T")


class KubernetesEnvironment(BaseEnvironment):  # type: ignore[misc, unused-ignore]
    """Args: steno: `name`: of the trial, in names of pods; `marks`: its labels; `states`: folder that the keeper writes to;
    `where`, as `Api` takes it; `options`, as in `KubernetesOptions`. agent_variables: of the agent; they are in the Secret."""

    agent_variables: Mapping[str, str] = {}  # of a class that inherits this

    def __init__(self, *args: Any, session_id: str, steno: Mapping[str, Any], **more: Any) -> None:
        self._steno = steno
        self._options: Mapping[str, Any] = steno["options"]
        self._attempt = randomness.token_hex(4)
        which = blake2b(session_id.encode(), digest_size=4).hexdigest()
        self.pod_name = f"{steno['name']}-{which}-{self._attempt}"
        self._secrets = {} if "__verifier__" in session_id else dict(self.agent_variables)
        self._api: Api | None = None
        self._uid = ""
        super().__init__(*args, session_id=session_id, **more)

    @staticmethod
    def type() -> str:
        return "kubernetes"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, cpu_request=True, memory_limit=True, memory_request=True)

    def _validate_definition(self) -> None:
        if not self.task_env_config.docker_image:
            raise ValueError("environment.docker_image: missing: images are not built in a cluster")

    async def start(self, force_build: bool) -> None:
        """Raises: PodError."""
        until = time.monotonic() + self._options["start_timeout_s"]
        api = self._api = await Api.connected(self._steno["where"])
        manifest = pod(self._sandbox())
        made = await self._once_room(until, lambda: self._made(manifest))
        self._uid = made["metadata"]["uid"]
        if self._secrets:
            owned = secret(self.pod_name, self._secrets, made["metadata"], self._steno["marks"])
            with contextlib.suppress(AlreadyThere):  # an answer that was lost
                await self._once_room(until, lambda: api.create_secret(owned))
        await self._until_running(time.monotonic() + self._options["start_timeout_s"])
        done = await self.ensure_dirs(self._mount_targets())
        if done is not None and done.return_code:
            raise PodNotStarted(f"pod {self.pod_name}: its folders can't be made: {(done.stderr or '').strip()[-300:]}")
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """Raises: ApiRefused, ApiUnavailable: the pod is left; its deadline ends it."""
        if self._api is None:
            return
        try:
            if delete:
                await self._api.delete_pod(self.pod_name)
        finally:
            await self._api.close()
            self._api = None

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Raises: RuntimeError: it took longer than `timeout_sec`, and was ended. PodError."""
        mark = randomness.token_hex(8)
        lines = shell.script(
            command,
            env=self._merge_env(env),
            secrets=self._secrets_by_value(),
            cwd=cwd or self.task_env_config.workdir,
            user=self._resolve_user(user),
            mark=mark,
        )
        try:
            async with asyncio.timeout(timeout_sec):
                ran = await self._run(lines, emit=self._emit())
        except TimeoutError:
            await self._end(mark)
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._end(mark))
            raise
        return ExecResult(stdout=_text(ran.stdout), stderr=_text(ran.stderr), return_code=ran.code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Raises: PodError; RuntimeError: the pod could not take it."""
        await self._send(Path(source_path), lambda size: shell.write(target_path, size), f"upload {target_path}")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """As a tar. Raises: PodError; RuntimeError: the pod could not unpack it."""
        with tempfile.TemporaryDirectory(prefix="steno-tar-") as folder:
            packed = Path(folder) / "packed"
            await asyncio.to_thread(_pack, Path(source_dir), packed)
            await self._send(packed, lambda size: shell.unpack(target_dir, size), f"upload {target_dir}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Raises: PodError; RuntimeError: the pod has no such file."""
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".steno-", dir=target.parent) as folder:
            partial = Path(folder) / "partial"
            ran = await self._fetch(shell.read(source_path), partial, f"download {source_path}")
            size = int(ran.stderr.split()[0])
            if partial.stat().st_size != size:
                raise StreamBroken(f"download {source_path}: {partial.stat().st_size} of {size} bytes came")
            os.replace(partial, target)  # noqa: PTH105

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """As a tar. Raises: PodError; RuntimeError: the pod has no such folder, or no tar."""
        target = Path(target_dir)
        target.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
        with tempfile.TemporaryDirectory(prefix="steno-tar-") as folder:
            packed = Path(folder) / "packed"
            await self._fetch(shell.pack(source_dir), packed, f"download {source_dir}")
            await asyncio.to_thread(_unpack, packed, target)

    # -- the pod

    def _sandbox(self) -> PodSandbox:
        options = self._options
        return PodSandbox(
            name=self.pod_name,
            image=str(self.task_env_config.docker_image),
            attempt=self._attempt,
            marks=self._steno["marks"],
            deadline_s=options["deadline_s"],
            cpus=options["cpus"] or self._effective_cpus,
            memory_mb=options["memory_mb"] or self._effective_memory_mb,
            storage_mb=self._effective_storage_mb,
            secret=self.pod_name if self._secrets else None,
            node_selector=options["node_selector"],
            image_pull_secrets=tuple(options["image_pull_secrets"]),
            queue=options["queue"],
            template=options["template"],
        )

    async def _made(self, manifest: Manifest) -> Manifest:
        assert self._api is not None
        for pause in (*PAUSES_S, None):
            try:
                return await self._api.create_pod(manifest)
            except AlreadyThere:  # ours, if the answer to an earlier try was lost
                found = await self._api.pod(self.pod_name)
                if found["metadata"].get("labels", {}).get(ATTEMPT) != self._attempt:
                    raise
                return found
            except Changed:
                if pause is None:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError

    async def _once_room(self, until: float, make: Callable[[], Awaitable[T]]) -> T:
        """Raises: QuotaExceeded: a quota had no room until then, or never will."""
        pause, longest = FULL_S
        while True:
            try:
                return await make()
            except QuotaExceeded as error:
                if error.never:
                    raise
                left = until - time.monotonic()
                if left <= 0:
                    limit_s = self._options["start_timeout_s"]
                    raise QuotaExceeded(
                        f"{error}: it had no room within start_timeout_s = {limit_s:g} s (--environment-options)"
                    ) from None
                self.logger.info("%s; asked again", error)
            await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), left))  # not all at once
            pause = min(2 * pause, longest)

    async def _until_running(self, until: float) -> None:
        """Raises: PodError. Time in a queue does not count."""
        limit_s, image_s = self._options["start_timeout_s"], self._options["image_timeout_s"]
        given_up = None
        while True:
            state = await self._state()
            if state.running:
                return
            if (error := state.raised()) is not None:
                raise error
            if state.queued:
                until = time.monotonic() + limit_s
            if state.unpulled:
                given_up = given_up or time.monotonic() + image_s
                if time.monotonic() > given_up:
                    raise ImageNotPulled(f"{state.words} (tried for image_timeout_s = {image_s:g} s)")
            if time.monotonic() > until:
                raise PodNotStarted(
                    f"pod {self.pod_name} did not start within start_timeout_s = {limit_s:g} s (--environment-options): "
                    f"it waited for {state.waits}"
                )
            await asyncio.sleep(LOOK_S)

    async def _state(self) -> PodState:
        """As the keeper has written it; where that takes long, as the cluster says."""
        until = time.monotonic() + ASK_S
        while (state := self._written()) is None:
            await asyncio.sleep(LOOK_S)
            if time.monotonic() >= until:
                return await self._asked()
        return state

    async def _asked(self) -> PodState:
        """As the cluster says. Raises: ApiRefused, ApiUnavailable."""
        assert self._api is not None
        try:
            return state_of(await self._api.pod(self.pod_name))
        except NotThere:
            return PodState(self._uid, error="PodGone", words=f"pod {self.pod_name} is not there")

    def _written(self) -> PodState | None:
        try:
            return PodState.of(json.loads((Path(self._steno["states"]) / f"{self.pod_name}.json").read_text()))
        except FileNotFoundError:
            return None

    async def _over(self) -> PodError:
        """Why the pod is over, as soon as it is."""
        while True:
            state = self._written()
            if state is not None and (error := state.raised()) is not None:
                return error
            await asyncio.sleep(LOOK_S)

    async def _cause(self, over: asyncio.Future[PodError]) -> PodError | None:
        """Why a connection into the pod broke. None: the pod is not over, as far as anybody says."""
        with contextlib.suppress(TimeoutError, ApiRefused, ApiUnavailable):
            async with asyncio.timeout(CAUSE_S[0]):
                while not (await asyncio.wait({over}, timeout=CAUSE_S[1]))[0]:
                    if (error := (await self._asked()).raised()) is not None:
                        return error
        return over.result() if over.done() else None

    # -- the ways into it

    async def _run(self, lines: bytes, **how: Any) -> streams.Ran:
        """Raises: PodError: why it is over, where that is known."""
        if self._api is None:
            raise PodGone(f"pod {self.pod_name} is not started, or stopped")
        running = asyncio.ensure_future(streams.run(self._api, self.pod_name, lines, **how))
        over = asyncio.ensure_future(self._over())
        try:
            await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise over.result()
            try:
                return running.result()
            except (StreamBroken, NotThere) as broken:
                raise await self._cause(over) or broken from None
        finally:
            for task in (running, over):
                task.cancel()
            await asyncio.gather(running, over, return_exceptions=True)

    async def _end(self, mark: str) -> None:
        """End all processes of a command that is given up. Best effort."""
        with contextlib.suppress(PodError, TimeoutError):
            async with asyncio.timeout(END_S):
                await self._run(shell.script(shell.kill(mark)))

    async def _send(self, source: Path, command: Callable[[int], str], what: str) -> None:
        size = source.stat().st_size  # noqa: ASYNC240  # of this machine's disk

        async def send() -> streams.Ran:
            lines = shell.script(command(size), reads=True)
            return await self._run(lines, source=_pieces(source, size))

        _checked(await self._tried(send), what)

    async def _fetch(self, command: str, target: Path, what: str) -> streams.Ran:
        async def fetch() -> streams.Ran:
            with target.open("wb") as file:
                return await self._run(shell.script(command), sink=file.write)

        return _checked(await self._tried(fetch), what)

    async def _tried(self, transfer: Callable[[], Awaitable[streams.Ran]]) -> streams.Ran:
        for left in reversed(range(TRIES)):
            try:
                return await transfer()
            except StreamBroken:
                if not left:
                    raise
        raise AssertionError

    def _emit(self) -> streams.Output | None:
        callback = self._output_callback()
        if callback is None:
            return None

        async def emit(stream: int, piece: bytes) -> None:
            await callback(piece.decode(errors="replace"), "stdout" if stream == streams.STDOUT else "stderr")

        return emit

    def _secrets_by_value(self) -> dict[str, str]:
        """By the names of their files; of one value in several, one."""
        return {name: value for name, value in self._secrets.items() if value}


def _text(output: bytes) -> str:
    return output.decode(errors="replace")


def _checked(ran: streams.Ran, what: str) -> streams.Ran:
    if ran.code:
        said = _text(ran.stderr).strip()[-300:] or f"exit code {ran.code}"
        raise RuntimeError(f"{what}: {said}")
    return ran


async def _pieces(path: Path, size: int) -> AsyncIterator[bytes]:
    """So many bytes, and no more: it may grow meanwhile."""
    with path.open("rb") as file:
        while size > 0 and (piece := file.read(min(size, streams.PIECE))):
            size -= len(piece)
            yield piece


def _pack(source: Path, target: Path) -> None:
    def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    with tarfile.open(target, "w") as tar:
        for each in sorted(source.iterdir()):
            tar.add(each, each.name, filter=of_root)


def _unpack(source: Path, target: Path) -> None:
    with tarfile.open(source) as tar:
        tar.extractall(target, filter=transfer_tar_filter)

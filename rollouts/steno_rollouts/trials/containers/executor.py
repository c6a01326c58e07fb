"""Trials in containers: an `Executor` over Docker or Podman.

Of each trial there are, one after the other:

- a forwarder, which has a network of its own with a loopback in it and nothing else, and a Unix socket of these rollouts;
- the agent's container, in that network: what it can reach is the loopback, and through it the trial's own URLs (`forward.py`);
- once both are gone, the verifier's, without a network, if the task has `tests/`: a fresh one of the same image, with the working
  folder as the agent left it. `tests/` is only there.

The working folder is the same on this machine and in the containers, a mount that hides what the image has there. Nothing else of
this machine is writable, and nothing of its environment is inherited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from steno.contracts.errors import ConfigError, Unreachable
from steno.contracts.rest import Trial
from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials import workdir
from steno_rollouts.trials.command import VARIABLES, environment
from steno_rollouts.trials.containers.engine import (
    LAUNCHER,
    RUN,
    TRIAL,
    Container,
    ContainerEngine,
    EngineError,
    Mount,
)
from steno_rollouts.trials.containers.forward import SOCKET, Forward, Route
from steno_rollouts.trials.containers.images import Image, Images, failed
from steno_rollouts.trials.containers.launcher import Launcher
from steno_rollouts.trials.containers.sandbox import TEST_SCRIPT, Sandbox
from steno_rollouts.trials.executor import CannotStart, Executor, Exit, TrialJob
from steno_rollouts.trials.local import GRACE_S
from steno_rollouts.trials.reward import read_reward, written_reward

log = logging.getLogger(__name__)

PORT = 8080
"""Of the forwarder, inside."""
INSIDE = PurePosixPath("/run/steno")
"""Where containers find what these rollouts give them."""
TASK_FILE = INSIDE / "task.json"
TESTS = PurePosixPath("/tests")
REWARDS = PurePosixPath("/logs/verifier")
"""As in Harbor's tasks."""
RESERVED = (PurePosixPath("/"), TESTS, REWARDS, INSIDE)
"""What can't be an image's working folder: a mount hides the one or the other."""
_ABSENT = re.compile("no such file|could not (be found|find)", re.IGNORECASE)
READY_S = 60.0
"""For the forwarder to listen."""
AGAIN_S = 1.0
"""For a container that was stopped to end, before it is told so again."""
STOPS = 2
"""Of a container that runs: it may have started after the first."""
_OF_AGENTS = frozenset(name for name in VARIABLES if name.endswith(("_API_KEY", "_BASE_URL")))
"""What a verifier is not given."""


class ContainerExecutor(Executor):
    """An `Executor`. Args: sandboxes: of all tasks, by their names. forwarder: image with `python3`."""

    def __init__(
        self,
        engine: ContainerEngine,
        run_id: str,
        sandboxes: Mapping[str, Sandbox],
        forwarder: str,
        grace_s: float = GRACE_S,
    ) -> None:
        self._engine = engine
        self._run_id = run_id
        self._sandboxes = sandboxes
        self._forwarder = forwarder
        self._grace_s = grace_s
        self._images = Images(engine)
        self._launcher = Launcher.here()
        self._begun: asyncio.Task[None] | None = None
        self._refused: EngineError | None = None
        self._reached: set[str] = set()
        self._reaching = asyncio.Lock()
        self._program = resources.files(__package__).joinpath("forwarder.py").read_text()

    async def prepare(
        self, folder: Path, trial: Trial, task: Task, inherited: Mapping[str, str]
    ) -> tuple[Path, dict[str, str]]:
        """Nothing is inherited: what a trial needs is in its image."""
        if self._begun is None or failed(self._begun):
            self._begun = asyncio.create_task(self._begin())
        await asyncio.shield(self._begun)
        sandbox = self._sandboxes[task.task_id]
        image = await self._images.of(sandbox)
        if image.workdir in RESERVED:
            others = ", ".join(map(str, RESERVED))
            raise CannotStart(
                f"WORKDIR of the image: got {image.workdir}, must not be one of {others}, which Steno uses"
            )
        work, task_file = await workdir.written(workdir.prepare, folder, task, environment=sandbox.image is not None)
        if image.brings:
            await self._copy_out(image, folder.name, work)
        await asyncio.to_thread(self._give, work, task_file)
        inside = trial.model_copy(update={"urls": {name: _inside(url) for name, url in trial.urls.items()}})
        return work, environment({}, inside, task, Path(image.workdir), Path(TASK_FILE))

    async def run(self, job: TrialJob) -> Exit:
        """Raises: Unreachable: the proxy is not to be reached from the first sandbox; the others' would not reach it either."""
        sandbox, image = await self._where(job)
        try:
            if not job.url:
                async with self._ended_with(job.trial_id):
                    agent = self._container(job, "agent", image, sandbox, job.command, "none")
                    return await self._run_agent(job, agent)
            route = Route(job.url)
            async with (
                Forward(job.folder / "socket", route, (self._engine.user, self._engine.group)) as forward,
                self._ended_with(job.trial_id),
            ):
                forwarder = await self._start_forwarder(job, forward)
                await self._check_reach(job, route, forwarder)
                agent = self._container(job, "agent", image, sandbox, job.command, f"container:{forwarder}")
                return await self._run_agent(job, agent)
        except EngineError as error:
            return Exit(None, error=str(error))

    async def _run_agent(self, job: TrialJob, agent: Container) -> Exit:
        await asyncio.to_thread(self._give, *job.given.values())
        given = (Mount(path, inside) for inside, path in job.given.items())
        mounts = (*agent.mounts, Mount(job.folder / "task.json", str(TASK_FILE)), *given)
        agent = replace(agent, mounts=mounts, named=job.environment.keys())
        ended = await self._run(agent, job.environment, job.stdout, job.stderr, job.timeout_s)
        return replace(ended, image=f"sha256:{agent.image}")

    async def verify(self, job: TrialJob, played: bool) -> CommandOutcome | None:
        """The word of the task's tests, in a container of their own; of a task without any, the reward file's."""
        if not played:
            return None
        sandbox, image = await self._where(job)
        if sandbox.tests is None:
            return await asyncio.to_thread(written_reward, job.workdir)
        folder = job.folder / "verifier"
        try:
            await asyncio.to_thread(self._lay_out, folder, sandbox.tests)
        except OSError as error:
            raise RewardError(f"verifier: {error}") from None
        verifier = self._container(job, "verifier", image, sandbox, [str(TESTS / TEST_SCRIPT)], "none")
        given = {name: value for name, value in job.environment.items() if name not in _OF_AGENTS}
        mounts = (
            *verifier.mounts,
            Mount(job.folder / "task.json", str(TASK_FILE)),
            Mount(folder / "tests", str(TESTS)),
            Mount(folder / "rewards", str(REWARDS), writable=True),
        )
        verifier = replace(verifier, mounts=mounts, named=given.keys())
        try:
            async with self._ended_with(job.trial_id):
                ended = await self._run(
                    verifier, given, folder / "stdout.log", folder / "stderr.log", sandbox.verifier_timeout_s
                )
        except EngineError as error:
            raise RewardError(f"verifier: {error}") from None
        return await asyncio.to_thread(self._worth, ended, folder, sandbox)

    async def build(self, task: Task) -> None:
        """Make the task's image, if that is not there. One that can't be had is told of when a trial needs it."""
        with contextlib.suppress(CannotStart):
            await self._images.of(self._sandboxes[task.task_id])

    async def clear(self, folder: Path) -> None:
        """Raises: EngineError: something of the trial is left running."""
        found = await self._engine.found(f"{TRIAL}={folder.name}")
        if found:
            log.warning("%s: ending %d containers, left by rollouts that were killed", folder.name, len(found))
        await self._engine.remove(found)

    async def _begin(self) -> None:
        """Once; where it failed, again for the next trial. Raises: ConfigError: this engine won't do. EngineError: it refused, or
        does not answer."""
        if not self._engine.is_podman:
            options = json.loads(await self._engine.run("info", "--format={{json .SecurityOptions}}")) or []
            for word in ("rootless", "userns"):
                if any(f"name={word}" in option for option in options):
                    raise ConfigError(
                        f"executor: Docker runs with {word}, so containers could not write to what this user owns: "
                        "use Docker without it, or --executor podman",
                        field="executor",
                    )
        found = await self._engine.labelled(LAUNCHER)
        left = [identity for identity, labels in found.items() if self._launcher.has_left(labels)]
        if left:
            log.warning("ending %d containers, left by rollouts that were killed", len(left))
        await self._engine.remove(left)

    async def _where(self, job: TrialJob) -> tuple[Sandbox, Image]:
        assert job.task is not None
        sandbox = self._sandboxes[job.task.task_id]
        return sandbox, await self._images.of(sandbox)

    def _labels(self, trial_id: str) -> dict[str, str]:
        return {RUN: self._run_id, TRIAL: trial_id, LAUNCHER: self._launcher.label}

    def _container(
        self, job: TrialJob, role: str, image: Image, sandbox: Sandbox, command: Sequence[str], network: str
    ) -> Container:
        return Container(
            name=f"steno-{job.trial_id}-{role}",
            image=image.identity,
            command=command,
            labels=self._labels(job.trial_id),
            network=network,
            workdir=image.workdir,
            mounts=(Mount(job.workdir.resolve(), str(image.workdir), writable=True),),
            home=not image.home,
            cpus=sandbox.cpus,
            memory_mb=sandbox.memory_mb,
        )

    async def _start_forwarder(self, job: TrialJob, forward: Forward) -> str:
        image = await self._images.named(self._forwarder)
        name = f"steno-{job.trial_id}-forwarder"
        await self._engine.create(
            Container(
                name=name,
                image=image.identity,
                command=[*_PYTHON, self._program, "serve", str(PORT), str(INSIDE / SOCKET)],
                labels=self._labels(job.trial_id),
                mounts=(Mount(forward.folder.resolve(), str(INSIDE)),),
                processes=64,
            )
        )
        await self._engine.run("start", name)
        try:
            async with asyncio.timeout(READY_S):
                while not forward.heard.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(forward.heard.wait(), 1.0)
                        break
                    if not (state := await self._engine.state(name)).running:
                        raise EngineError(self._no_forwarder(f"ended with exit code {state.code}"))
        except TimeoutError:
            raise EngineError(self._no_forwarder(f"did not listen within {READY_S:g} s")) from None
        return name

    def _no_forwarder(self, what: str) -> str:
        return f"the forwarder (python3 in the image {self._forwarder}; --forwarder-image) {what}"

    async def _check_reach(self, job: TrialJob, route: Route, forwarder: str) -> None:
        async with self._reaching:
            if route.origin in self._reached:
                return
            ask = [*_PYTHON, self._program, "ask", str(PORT), route.health]
            try:
                await self._engine.run("exec", forwarder, *ask)
            except EngineError as error:
                said = str(error).partition(" exec: ")[2] or str(error)
                raise Unreachable(
                    f"the proxy can't be reached from the sandbox of {job.trial_id}: GET {route.origin}{route.health} from "
                    f"inside it failed (by 127.0.0.1:{PORT} there and container {forwarder}, passed on by these rollouts): "
                    f"{said}. Trials' URLs have this address: set the proxy's --public-url to one that this machine reaches"
                ) from None
            self._reached.add(route.origin)

    async def _run(
        self, container: Container, values: Mapping[str, str], stdout: Path, stderr: Path, timeout_s: float | None
    ) -> Exit:
        """Run a container to its end, or to its time limit. Cancelled: it gets its grace, as there."""
        await self._engine.create(container, values)
        attached = await self._engine.attach(container.name, stdout, stderr)
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await attached.wait()
                while (state := await self._engine.state(container.name)).running:
                    await self._engine.run(
                        "wait", container.name, limit_s=1e9, patient=False
                    )  # its output was lost, not it
        except TimeoutError:
            timed_out = True
            await self._stopped(container.name)
            while attached.returncode is None:  # one that had not started yet when it was told to stop runs on
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(attached.wait(), AGAIN_S)
                    break
                await self._stopped(container.name)
            state = await self._engine.state(container.name)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):  # its removal ends it
                await self._stopped(container.name)
            raise
        await attached.wait()
        if not state.started:
            return Exit(None, error=workdir.last_line(stderr) or f"{container.command[0]}: could not be started")
        return Exit(state.code, timed_out)

    async def _stopped(self, name: str) -> None:
        for _ in range(STOPS):
            await self._engine.stop(name, self._grace_s)
            if not (await self._engine.state(name)).running:
                return
        raise EngineError(f"container {name} was stopped, and runs on")

    @contextlib.asynccontextmanager
    async def _ended_with(self, trial_id: str) -> AsyncIterator[None]:
        """Nothing of the trial is left after this. An engine that refuses to remove it changes nothing of how the trial
        ended: one that ended well runs no more. What stays is removed by the next attempt, or the next start."""
        label = f"{TRIAL}={trial_id}"
        try:
            yield
        finally:
            try:
                await self._engine.remove(await self._engine.found(label))
            except EngineError as error:
                log.warning("%s: its containers may be left: %s", trial_id, error.message)
            except asyncio.CancelledError:  # a second time: nobody waits any more
                self._remove_now(trial_id, label)
                raise

    def _remove_now(self, trial_id: str, label: str) -> None:
        """An engine that hangs is asked once: all trials are cancelled together, and the launcher stands still meanwhile."""
        why = ""
        try:
            if self._refused is None:
                why = self._engine.remove_now(label)
        except EngineError as error:
            self._refused = error
        if self._refused is not None:
            why = self._refused.message
        if why:
            log.warning("%s: its containers may be left: %s", trial_id, why)

    async def _copy_out(self, image: Image, trial_id: str, work: Path) -> None:
        """What the image has in its working folder. Podman's builds make no folder for a WORKDIR alone."""
        name = f"steno-{trial_id}-copy"
        async with self._ended_with(trial_id):
            await self._engine.create(Container(name, image.identity, ["true"], self._labels(trial_id)))
            try:
                await self._engine.run("cp", f"{name}:{image.workdir}/.", str(work.absolute()))  # noqa: ASYNC240  # asks no disk
            except EngineError as error:
                if not _ABSENT.search(str(error)):
                    raise
        await asyncio.to_thread(workdir.without_rewards, work)

    def _lay_out(self, folder: Path, tests: Path) -> None:
        """What the verifier is given. New each time, and never seen by an agent."""
        workdir.remove(folder)
        (folder / "rewards").mkdir(parents=True)
        workdir.copy_whole(tests, folder / "tests", TEST_SCRIPT)
        self._give(folder / "tests", folder / "rewards")

    def _give(self, *paths: Path) -> None:
        """To the user of the containers, if these rollouts run as root; else it is the same user."""
        if os.geteuid():
            return
        for path in paths:
            os.lchown(path, self._engine.user, self._engine.group)
            if path.is_dir() and not path.is_symlink():
                for parent, folders, files in os.walk(path):
                    for name in (*folders, *files):
                        os.lchown(os.path.join(parent, name), self._engine.user, self._engine.group)  # noqa: PTH118

    def _worth(self, ended: Exit, folder: Path, sandbox: Sandbox) -> CommandOutcome:
        """The file that the tests wrote, or else their exit code. Raises: RewardError."""
        where = f"tests/{TEST_SCRIPT}"
        if ended.timed_out:
            raise RewardError(f"{where}: did not end within {sandbox.verifier_timeout_s:g} s")
        if ended.code is None:
            raise RewardError(f"{where}: {ended.error}")
        if (verdict := read_reward(folder / "rewards")) is not None:
            return verdict
        if ended.code > 125:  # not to be run, or ended by a signal
            said = workdir.last_line(folder / "stderr.log")
            raise RewardError(f"{where}: exit code {ended.code}" + (f": {said}" if said else ""))
        return CommandOutcome(EndReason.COMPLETED, 0.0 if ended.code else 1.0)


_PYTHON = ("python3", "-I", "-S", "-u", "-c")


def _inside(url: str) -> str:
    """A trial's address as its containers reach it."""
    return f"http://127.0.0.1:{PORT}{urlsplit(url).path}"

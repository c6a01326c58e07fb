"""The process that plays one attempt on a node of Ray's: `python -m steno_rollouts.on_node FD`, by `trials/ray/worker.py`.

It reads what to do from its standard input, in a parcel, and writes its answer to the file descriptor FD. Each further byte of
the input asks it to end: the first in good time, the second at once. So does the end of the input: whoever asked is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

LOCK_S = 0.2
"""Between two looks at whether another process has let go of a lock."""
LOOK_S = 20.0
"""Between two looks at whether the trial is still this attempt's: as often as launchers renew their claims."""
PATIENCE_S = 300.0
"""How long a proxy that is away is waited for. Not for ever, as the launcher does: it may be this node that does not reach it."""


def main() -> None:
    answering = int(sys.argv[1])
    os.set_inheritable(answering, False)
    if os.fork():  # leaves the family of Ray's worker, before anything costly is imported
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it, and trials would inherit that
    told = os.dup(0)
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    length = _exactly(told, 8)
    keys, request, archive, place = pickle.loads(_exactly(told, int.from_bytes(length, "big")))
    answer = asyncio.run(_until_told(told, _answered(pickle.loads(keys), pickle.loads(request), archive, place)))
    if answer is not None:
        with os.fdopen(answering, "wb") as file:
            file.write(pickle.dumps(answer))


def _exactly(descriptor: int, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = os.read(descriptor, count - len(found))
        if not piece:
            raise SystemExit(1)  # whoever asked is gone already
        found += piece
    return bytes(found)


async def _until_told(told: int, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` returns; None: it was told to end."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    asked = 0

    def hear() -> None:
        nonlocal asked
        words = os.read(told, 64)
        if not words:
            loop.remove_reader(told)
        asked += len(words) or 2
        if asked == 1:
            task.cancel()
            return
        for delay_s in (0.0, 0.1):  # a trial that is cancelled twice is ended at once
            loop.call_later(delay_s, task.cancel)

    loop.add_reader(told, hear)
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _answered(keys: Any, request: Any, archive: bytes | None, place: tuple[str, str]) -> Any:
    from steno.contracts.errors import StenoError
    from steno_rollouts.trials.ray.parcels import Answer

    node_id, address = place
    try:
        with Attempt(request, archive, node_id, address) as attempt:
            if request.do == "check":
                return await attempt.check()
            if request.do == "clear":
                await attempt.clear()
                return Answer(address)
            return await attempt.play(keys)
    except StenoError as error:
        return Answer(address, problem=(error.code, error.message))


class Attempt:
    """What a request means on this node. Its folders are below `work_dir`, in one of the node's own: several nodes may be of one
    machine."""

    def __init__(self, request: Any, archive: bytes | None, node_id: str, address: str) -> None:
        self._request = request
        self._archive = archive
        self._address = address
        self._place = request.settings.work_dir.absolute() / f"node-{node_id[:12]}"
        name = request.trial.session.trial_id
        if request.do == "check":
            name = f"{name}-{os.getpid()}"
        self._folder = self._place / name
        self._brought = self._place / f"{name}.brought"
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Attempt:
        """Raises: FolderInUse."""
        from steno_rollouts.trials import workdir

        self._held.enter_context(workdir.held(self._folder, self._request.trial.session.created_at))
        workdir.remove(self._brought)
        return self

    def __exit__(self, *_: object) -> None:
        from steno_rollouts.trials import workdir

        workdir.remove(self._brought)
        self._held.close()

    async def play(self, keys: Any) -> Any:
        """The attempt, and what came of it."""
        from steno_rollouts.calls.patience import AWAY, PatientClient
        from steno_rollouts.outcome import CommandOutcome, EndReason
        from steno_rollouts.trials import workdir
        from steno_rollouts.trials.executor import Exit
        from steno_rollouts.trials.play import Assignment, ExecutorPlayer
        from steno_rollouts.trials.ray.parcels import OF_A_NODE, Answer, bounded, last_part

        request, settings = self._request, self._request.settings
        prepared = await asyncio.to_thread(self._prepared)
        most = settings.ray_return_kb * 1024
        trial = request.trial.model_copy(update={"api_key": keys.agent})
        assignment = Assignment(trial, prepared.tasks[0], request.round, keys.harness)
        async with PatientClient(settings.proxy, keys.harness, patience_s=PATIENCE_S) as client:
            options = replace(prepared.options(), inherited=_inherited(os.environ))
            executor = prepared.executor(client)
            if prepared.engine is not None:
                async with _alone(settings.work_dir / "images.lock"):  # a group's trials come to a node at once
                    await executor.build(prepared.tasks[0])
            player = ExecutorPlayer(client, executor, options, prepared.reward)
            try:
                ended, outcome = await _while_its_own(client, trial.session, player.play(assignment, self._folder))
            except (OSError, *OF_A_NODE, *AWAY) as error:  # a full disk, say: as the runner has it of this machine's
                said = f"node {self._address}: {error}"
                ended, outcome = Exit(None, error=said), CommandOutcome(EndReason.START_FAILED, detail=said)
            except asyncio.CancelledError:
                await asyncio.to_thread(workdir.dispose, self._folder, settings.keeps == "all")
                raise
        stdout, stderr = (last_part(self._folder / f"{name}.log", most) for name in ("stdout", "stderr"))
        failed = outcome.failed(scored_together=settings.group_reward is not None)
        keep = settings.keeps == "all" or (settings.keeps == "failed" and failed)
        there = await asyncio.to_thread(workdir.dispose, self._folder, keep)
        ended = replace(ended, error=ended.error[:most])
        return Answer(
            self._address, ended, bounded(outcome, most), stdout, stderr, str(self._folder) if there else None
        )

    async def check(self) -> Any:
        """Whether a trial could run here. Raises: ConfigError, Unreachable."""
        from steno_rollouts.build import NO_KEYS
        from steno_rollouts.preflight import check_command, check_reach
        from steno_rollouts.trials.ray.parcels import Answer

        for url in dict.fromkeys((self._request.settings.proxy.rstrip("/"), self._request.public_url)):
            await check_reach(url)
        prepared = await asyncio.to_thread(self._prepared)
        await check_command(prepared)
        return Answer(self._address, warnings=tuple(said for said in prepared.warnings if said != NO_KEYS))

    async def clear(self) -> None:
        """End what a process that was killed has left."""
        prepared = await asyncio.to_thread(self._prepared)
        await prepared.executor().clear(self._folder)

    def _prepared(self) -> Any:
        """Raises: ConfigError."""
        from steno_rollouts.build import Prepared
        from steno_rollouts.trials.ray.parcels import unpack

        request = self._request
        task, harbor, settings = request.task, request.harbor, request.settings
        if self._archive is not None:
            folder = self._brought / task.folder.name
            unpack(self._archive, folder)
            task = replace(task, folder=folder)
        reward = None
        if request.reward is not None:
            name = settings.reward.rpartition(":")[2]
            reward = f"{request.reward.put(self._brought / 'reward')}:{name}"
        if request.agent is not None:
            harbor = replace(harbor, agent_file=request.agent.put(self._brought / "agent").absolute())
        here = {"executor": settings.ray_runner, "reward": reward, "private": [*settings.private, *_of_ray(os.environ)]}
        return Prepared.on_node(settings.model_copy(update=here), request.run_id, task, harbor)


async def _while_its_own(client: Any, session: Any, attempt: Coroutine[Any, Any, Any]) -> Any:
    """What `attempt` returns. It is ended as `interrupted` once its trial has another key: its launcher is cut off or hangs,
    another one has taken the trial over, and no turn of the attempt is recorded any more."""
    from steno_rollouts.outcome import CommandOutcome, EndReason
    from steno_rollouts.trials.executor import Exit
    from steno_rollouts.trials.play import unless_told

    detail = "the trial was taken over: its key is another one now"
    lost = Exit(None, error=detail), CommandOutcome(EndReason.INTERRUPTED, detail=detail)
    return await unless_told(attempt, _taken_over(client, session)) or lost


async def _taken_over(client: Any, session: Any) -> None:
    """Returns once the trial has another key."""
    from steno.contracts.errors import StenoError

    generation = session.key_generation
    while generation == session.key_generation:
        await asyncio.sleep(LOOK_S)
        with contextlib.suppress(StenoError):  # asked again: without an answer, nobody has taken it over
            generation = (await client.session(session.trial_id)).key_generation


@contextlib.asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    """One process of this machine at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_S)
        yield


def _inherited(environment: Any) -> dict[str, str]:
    """What trials inherit of this node's: nothing of Ray's, whose token opens the cluster."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}


def _of_ray(environment: Any) -> list[Path]:
    """Where Ray's sockets, logs and token lie."""
    sessions = Path(environment.get("RAY_TMPDIR") or "/tmp") / "ray"
    token = environment.get("RAY_AUTH_TOKEN_PATH")
    found = [Path.home() / ".ray", *sessions.glob("session_*/sockets"), *sessions.glob("session_*/logs")]
    return [*found, Path(token)] if token else found


if __name__ == "__main__":
    main()

"""The pods of these rollouts, through the process that keeps them (`pods/keeper.py`): started once, for all trials."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steno.contracts.errors import StenoError
from steno_rollouts.trials.containers.images import failed
from steno_rollouts.trials.containers.launcher import Launcher
from steno_rollouts.trials.harbor.interpreter import DRIVER, environment
from steno_rollouts.trials.harbor.kubernetes.options import KubernetesOptions
from steno_rollouts.trials.harbor.kubernetes.pods.heartbeats import LEASE_S
from steno_rollouts.trials.harbor.kubernetes.pods.manifest import LAUNCHER, RUN, TRIAL

log = logging.getLogger(__name__)

GONE_S = 120.0
"""How long a deleted pod may take to be gone."""
PAUSE_S = 30.0
"""Longest before a keeper that ended is started again."""
END_S = 15.0
"""For a keeper to end by itself."""


class PodsError(StenoError):
    """The pods of a trial can't be looked after. Never leaves these rollouts."""

    code = "pods"


class Fleet:
    """Args: python: that has Harbor. run_id: of these rollouts. lease_s: silence after which other launchers take this one for
    gone. gone_s: how long a deleted pod may take to be gone."""

    def __init__(
        self,
        python: Path,
        options: KubernetesOptions,
        run_id: str,
        launcher: Launcher | None = None,
        lease_s: float = LEASE_S,
        gone_s: float = GONE_S,
    ) -> None:
        self._python = python
        self._options = options
        self._run_id = run_id
        self._launcher = launcher or Launcher.here()
        self._lease_s = lease_s
        self._gone_s = gone_s
        self._folder = tempfile.TemporaryDirectory(prefix="steno-pods-")
        weakref.finalize(self, self._folder.cleanup)
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._begun: asyncio.Future[None] | None = None
        self._started = False
        self._pause = 1.0
        self._closed = False

    def of(self, trial_id: str, name: str) -> dict[str, Any]:
        """What `KubernetesEnvironment` is told. Args: name: Harbor's for the trial."""
        return {
            "name": name,
            "marks": {RUN: self._run_id, TRIAL: trial_id, LAUNCHER: self._launcher.name},
            "states": self._folder.name,
            "where": self._options.where,
            "options": self._options.model_dump(),
        }

    async def begun(self) -> None:
        """Start the keeper, once, and again if that failed; end pods of launchers that were killed on this machine. The keeper
        ends those of other launchers once they are silent, `clear` those of a claimed trial.

        Raises: PodsError: the cluster can't be asked, or refuses.
        """
        if self._begun is None or failed(self._begun):
            self._begun = asyncio.ensure_future(self._begin())
        await asyncio.shield(self._begun)

    async def clear(self, trial_id: str, *, wait: bool) -> list[str]:
        """End the pods of a trial that are these rollouts' own; with `wait` (they have claimed the trial), end all and wait until
        they are gone. Returns: with `wait`, pods that are not gone after `gone_s`: their node may be lost. Raises: PodsError."""
        await self.begun()
        found = await self._ask("clear", trial=trial_id, wait_s=self._gone_s if wait else None)
        left: list[str] = found["left"]
        if wait and (ended := found["ended"] - len(left)):
            log.warning("%s: ended %d pods that were left", trial_id, ended)
        if left:
            log.warning("%s: pod %s was deleted and is not gone after %g s", trial_id, left[0], self._gone_s)
        return left

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._folder.cleanup()

    async def _begin(self) -> None:
        if not self._started:
            try:
                self._start(asyncio.get_running_loop())
            except OSError as error:
                raise PodsError(f"the process that keeps the pods can't be started: {error}") from None
            self._started = True
        found: list[Mapping[str, Any]] = await self._ask("left")
        left = [each for each in found if self._launcher.knows_gone(each["marks"].get(LAUNCHER, ""))]
        if left:
            log.warning("ending %d pods, left by rollouts that were killed", len(left))
            await self._ask("end", pods=left)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._closed:
            return
        asked = Path(self._folder.name) / "request.json"
        request = {
            "do": "pods",
            "parent": os.getpid(),
            "answer": str(asked.with_name("answer.json")),
            "where": self._options.where,
            "launcher": self._launcher.name,
            "lease_s": self._lease_s,
            "states": self._folder.name,
        }
        asked.write_text(json.dumps(request), encoding="utf-8")
        with self._log.open("w") as said:
            process = subprocess.Popen(
                [self._python, "-I", DRIVER, asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
                text=True, env=environment(os.environ, self._python), cwd=self._folder.name, start_new_session=True,
            )  # fmt: skip
        self._process = process
        weakref.finalize(self, process.terminate)
        told = (
            weakref.WeakMethod(self._heard),
            weakref.WeakMethod(self._lost),
        )  # weak: else the thread would keep this object as long as the process lives
        threading.Thread(target=_listen, args=(process, loop, *told), daemon=True).start()

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "keeper.log"

    async def _ask(self, do: str, **more: Any) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            if self._process is None or self._process.stdin is None:
                raise PodsError("the process that keeps the pods is not running")
            self._process.stdin.write(json.dumps({"id": number, "do": do, **more}) + "\n")
            self._process.stdin.flush()
            return await answer
        except OSError as error:
            raise PodsError(f"the process that keeps the pods has ended: {error}") from None
        finally:
            self._waiting.pop(number, None)

    def _heard(self, line: str) -> None:
        said = json.loads(line)
        self._pause = 1.0
        if "said" in said:
            log.warning(said["said"])
            return
        answer = self._waiting.get(said["id"])
        if answer is None or answer.done():
            return
        if "error" in said:
            answer.set_exception(PodsError(said["error"]))
        else:
            answer.set_result(said["found"])

    def _lost(self) -> None:
        """The keeper has ended: start it again, unless `close` ended it."""
        if self._closed:
            return
        said = "it said nothing"
        with contextlib.suppress(OSError, IndexError):
            said = self._log.read_text(errors="replace").strip().splitlines()[-1]
        log.warning("the process that keeps the pods has ended, and is started again: %s", said)
        self._process = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(PodsError(f"the process that keeps the pods has ended: {said}"))
        self._start_later(asyncio.get_running_loop())

    def _start_later(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(self._pause, self._start_again, loop)
        self._pause = min(2 * self._pause, PAUSE_S)

    def _start_again(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._start(loop)
        except OSError as error:
            log.warning("the process that keeps the pods can't be started: %s; again in %g s", error, self._pause)
            self._start_later(loop)


def _listen(
    process: subprocess.Popen[str],
    loop: asyncio.AbstractEventLoop,
    heard: weakref.WeakMethod[Any],
    lost: weakref.WeakMethod[Any],
) -> None:
    """In a thread of its own, which ends with the process."""
    assert process.stdout is not None
    try:
        for line in process.stdout:
            loop.call_soon_threadsafe(_tell, heard, line)
        process.wait()
        loop.call_soon_threadsafe(_tell, lost)
    except RuntimeError:  # the loop has ended before
        pass


def _tell(method: weakref.WeakMethod[Any], *words: str) -> None:
    if (found := method()) is not None:
        found(*words)

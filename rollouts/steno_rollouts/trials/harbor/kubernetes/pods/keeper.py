"""One process for all sandboxes of these rollouts: it watches their pods, writes down for each what became of it, says that these
rollouts live, and ends the pods of those that do not any more.

Asked by lines of JSON on stdin, `{"id", "do", …}`, it answers `{"id", "found"}` or `{"id", "error"}` on stdout. `{"said"}` there
is for the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from .api import Api, Changed, TooOld
from .errors import ApiRefused, ApiUnavailable, PodError
from .heartbeats import RENEWED, Heartbeats
from .leases import LauncherLease
from .manifest import LAUNCHER, TRIAL, Manifest, label
from .states import PodState, state_of

LOOK_S = 0.5
PAUSE_S = 30.0
"""Longest pause between two watches that broke."""
END_S = 10.0
"""For the last word to the cluster."""


async def keep(request: Mapping[str, Any]) -> None:
    """Until stdin ends. Args: request: `where` as `Api` takes it, `launcher`, `lease_s`, `states`: folder to write to."""
    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), _own_stdin())
    keeper = Keeper(request)
    try:
        async with (
            asyncio.TaskGroup() as group
        ):  # an error that nobody thought of ends this process, which is begun again
            tasks = {group.create_task(keeper.watch()), group.create_task(keeper.beat())}
            while line := await reader.readline():
                task = group.create_task(keeper.answer(json.loads(line)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            for task in tasks:
                task.cancel()
    finally:
        await keeper.close()


class Keeper:
    def __init__(self, request: Mapping[str, Any]) -> None:
        self._where = request["where"]
        self._launcher = label(request["launcher"])
        self._selector = f"{LAUNCHER}={self._launcher}"
        self._lease_s: float = request["lease_s"]
        self._lease = LauncherLease(request["launcher"], self._lease_s)
        self._holding = asyncio.Lock()
        self._heartbeats = Heartbeats()
        self._without: set[str] = set()
        self._folder = Path(request["states"])
        self._seen: dict[str, Manifest] = {}
        self._written: dict[str, PodState] = {}
        self._trials: dict[str, str] = {}
        self._forgotten: set[str] = set()
        self._api: Api | None = None
        self._connecting = asyncio.Lock()

    async def watch(self) -> None:
        """Goes on from the last event after each break; lists anew where the server has forgotten it."""
        version, pause = "", LOOK_S
        while True:
            try:
                api = await self._connected()
                if not version:
                    version = await self._listed(api)
                async for event in api.watch(self._selector, version):
                    pod = event["object"]
                    version, pause = pod["metadata"]["resourceVersion"], LOOK_S
                    if event["type"] != "BOOKMARK":
                        self._note(pod, deleted=event["type"] == "DELETED")
            except TooOld:
                version = ""
            except (ApiUnavailable, ApiRefused) as error:
                print(f"{error}; again in {pause:g} s", file=sys.stderr, flush=True)
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_S)
            await asyncio.sleep(0.1)

    async def beat(self) -> None:
        """Renews the lease of these rollouts, and looks at those of others."""
        while True:
            try:
                api = await self._held()
                await self._end_left(api)
            except (ApiUnavailable, ApiRefused) as error:
                self._heartbeats.forget()
                print(error, file=sys.stderr, flush=True)
            await asyncio.sleep(self._lease_s / RENEWED)

    async def close(self) -> None:
        if self._api is None:
            return
        with contextlib.suppress(PodError, TimeoutError):
            async with asyncio.timeout(END_S):
                await self._lease.drop(self._api)
        await self._api.close()

    async def answer(self, asked: Mapping[str, Any]) -> None:
        ways = {"left": self.left, "end": self.end, "clear": self.clear}
        try:
            said = {"id": asked["id"], "found": await ways[asked["do"]](asked)}
        except PodError as error:
            said = {"id": asked["id"], "error": str(error)}
        print(json.dumps(said), flush=True)

    async def left(self, _: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All pods of rollouts in this namespace, whoever started them; before any of these rollouts' own is made."""
        api = await self._held()
        found, _version = await api.pods(LAUNCHER)
        self._without = {pod["metadata"]["labels"][LAUNCHER] for pod in found} - {self._launcher}
        return [_named(pod) for pod in found]

    async def end(self, asked: Mapping[str, Any]) -> int:
        api = await self._connected()
        for pod in asked["pods"]:
            await api.delete_pod(pod["name"], pod["uid"])
        return len(asked["pods"])

    async def clear(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """End the pods of a trial. With `wait_s` (these rollouts have claimed the trial): all, and wait until they are gone, or
        for so long. Else: their own. Returns: how many there were, and names of those left: an unreachable node keeps them."""
        trial = label(asked["trial"])
        api, selector = await self._connected(), f"{TRIAL}={trial}"
        if asked["wait_s"] is None:
            selector = f"{selector},{self._selector}"
        found, _version = await api.pods(selector)
        self._forget(trial, found)
        for pod in found:
            if not pod["metadata"].get("deletionTimestamp"):
                await api.delete_pod(pod["metadata"]["name"], pod["metadata"]["uid"])
        left = found if asked["wait_s"] is not None else []
        until = time.monotonic() + (asked["wait_s"] or 0.0)
        while left and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            left, _version = await api.pods(selector)
        return {"ended": len(found), "left": [pod["metadata"]["name"] for pod in left]}

    async def _held(self) -> Api:
        """Once the lease says that these rollouts live."""
        async with self._holding:
            api = await self._connected()
            await self._lease.hold(api)
            return api

    async def _end_left(self, api: Api) -> None:
        """End leases and pods of launchers that are heard of no more. Raises: ApiRefused, ApiUnavailable."""
        found = {each["metadata"]["labels"][LAUNCHER]: each["metadata"] for each in await api.leases(LAUNCHER)}
        found.pop(self._launcher, None)
        versions = dict.fromkeys(self._without, "") | {name: each["resourceVersion"] for name, each in found.items()}
        for launcher in self._heartbeats.gone(versions):
            self._without.add(launcher)  # until its pods are ended too
            if launcher in found:
                try:
                    await api.delete_lease(found[launcher]["name"], found[launcher])
                except Changed:  # it lives
                    self._without.discard(launcher)
                    continue
            left, _version = await api.pods(f"{LAUNCHER}={launcher}")
            for pod in left:
                await api.delete_pod(pod["metadata"]["name"], pod["metadata"]["uid"])
            self._without.discard(launcher)
            if left:
                words = (
                    f"ending {len(left)} pods of launcher {launcher}, which was not heard of for {self._lease_s:g} s"
                )
                print(json.dumps({"said": words}), flush=True)

    async def _connected(self) -> Api:
        async with self._connecting:
            if self._api is None:
                self._api = await Api.connected(self._where)
            return self._api

    async def _listed(self, api: Api) -> str:
        found, version = await api.pods(self._selector)
        names = {pod["metadata"]["name"] for pod in found}
        self._forgotten &= {pod["metadata"]["uid"] for pod in found}
        for name in set(self._seen) - names:
            self._note(self._seen[name], deleted=True)
        for pod in found:
            self._note(pod)
        return version

    def _note(self, pod: Manifest, *, deleted: bool = False) -> None:
        name, state = pod["metadata"]["name"], state_of(pod, deleted=deleted)
        if pod["metadata"]["uid"] in self._forgotten:
            if deleted:
                self._forgotten.discard(pod["metadata"]["uid"])
            return
        earlier = self._written.get(name)
        if deleted:
            if self._seen.pop(name, None) is None:
                return  # forgotten
        else:
            self._seen[name] = pod
        if earlier is not None and (earlier == state or earlier.error is not None):
            return  # the first error that was seen is the one that ended the pod
        self._written[name], self._trials[name] = state, pod["metadata"]["labels"][TRIAL]
        partial = self._folder / f".{name}"
        partial.write_text(json.dumps(state.json()))
        partial.replace(self._folder / f"{name}.json")

    def _forget(self, trial: str, found: list[Manifest]) -> None:
        """Forget all pods of a trial. Args: found: those that still exist: events about them, which come yet, are ignored."""
        self._forgotten |= {
            pod["metadata"]["uid"] for pod in found if pod["metadata"]["labels"][LAUNCHER] == self._launcher
        }
        for name in [name for name, of in self._trials.items() if of == trial]:
            if (pod := self._seen.pop(name, None)) is not None:
                self._forgotten.add(pod["metadata"]["uid"])
            del self._trials[name], self._written[name]
            (self._folder / f"{name}.json").unlink(missing_ok=True)


def _own_stdin() -> FileIO:
    """The pipe with the requests, moved away from stdin: a program that gives credentials inherits stdin and could read it."""
    mine = FileIO(os.dup(sys.stdin.fileno()))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return mine


def _named(pod: Manifest) -> dict[str, Any]:
    metadata = pod["metadata"]
    return {"name": metadata["name"], "uid": metadata["uid"], "marks": metadata.get("annotations", {})}

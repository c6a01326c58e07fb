"""Images of tasks: found by their name, or built once for each digest of what they are built from."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from steno_rollouts.trials.containers.engine import BUILD_S, ContainerEngine, EngineError
from steno_rollouts.trials.containers.sandbox import Sandbox, digest

log = logging.getLogger(__name__)

BUILT = "localhost/steno-task"
"""Names of images that are built here; their tag is the digest."""
WORKDIR = PurePosixPath("/work")
"""Where an image names no working folder."""


@dataclass(frozen=True)
class Image:
    """identity: what containers are made from, also when the name means another image by then. workdir: the trial's working
    folder; brings: whether the image has files there. home: whether it says where home is."""

    identity: str
    workdir: PurePosixPath
    brings: bool
    home: bool

    @classmethod
    def of(cls, identity: str, config: Mapping[str, object]) -> Image:
        given = PurePosixPath(str(config.get("WorkingDir") or "/"))
        own = given != PurePosixPath("/")
        variables = config.get("Env")
        home = any(str(each).startswith("HOME=") for each in variables) if isinstance(variables, list) else False
        return cls(identity, given if own else WORKDIR, own, home)


class Images:
    """Each image once, however many trials ask for it at a time. A pull that failed is tried again for whoever asks later: a
    registry refuses for a while. A build that failed is not."""

    def __init__(self, engine: ContainerEngine) -> None:
        self._engine = engine
        self._found: dict[str | Path, asyncio.Task[Image]] = {}

    async def of(self, sandbox: Sandbox) -> Image:
        """Raises: EngineError: it can't be built, or is not to be had."""
        source = sandbox.image or sandbox.context
        assert source is not None
        return await self.named(source)

    async def named(self, source: str | Path) -> Image:
        finding = self._found.get(source)
        if finding is None or (isinstance(source, str) and failed(finding)):
            finding = self._found[source] = asyncio.create_task(self._find(source))
        return await asyncio.shield(finding)

    async def _find(self, source: str | Path) -> Image:
        if isinstance(source, Path):
            name = f"{BUILT}:{await asyncio.to_thread(digest, source)}"
            making = ["build", f"--tag={name}", str(source)]
        else:
            name, making = source, ["pull", source]
        if not await self._is_there(name):
            log.info("%s: %s", making[0], source)
            try:
                await self._engine.run(*making, limit_s=BUILD_S, patient=False)
            except EngineError as error:
                raise EngineError(f"image {source}: {error}") from None
        (found,) = json.loads(await self._engine.run("image", "inspect", name))
        return Image.of(str(found["Id"]).removeprefix("sha256:"), found["Config"] or {})

    async def _is_there(self, name: str) -> bool:
        try:
            await self._engine.run("image", "inspect", name)
        except EngineError:
            return False
        return True


def failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)

"""What Harbor left on this machine of a trial, found by its name: containers, networks and images of Docker or Podman."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Self

from steno_rollouts.trials.containers.engine import ContainerEngine, EngineError

log = logging.getLogger(__name__)

PROJECT = "com.docker.compose.project"
"""Label of all that Harbor starts with a compose program."""
_NAMED = re.compile(rf"{re.escape(PROJECT)}[:=]([\w.-]+)")


@dataclass(frozen=True)
class Leftovers:
    """engine: None: sandboxes are elsewhere, and their provider ends what nobody asks for any more."""

    engine: ContainerEngine | None

    @classmethod
    def of(cls, environment: str) -> Self:
        """Raises: ConfigError: the engine is not installed."""
        return cls(ContainerEngine.named(environment) if environment in ("docker", "podman") else None)

    async def remove(self, name: str) -> None:
        """Of the trial that Harbor calls `name`, and of its verifiers. Raises: EngineError: a container is left."""
        if self.engine is None:
            return
        listed = await self.engine.look(
            "ps", "--all", "--no-trunc", f"--filter=label={PROJECT}", "--format={{.ID}} {{.Labels}}"
        )
        found = [line.partition(" ")[0] for line in listed.splitlines() if _project(line).startswith(name)]
        if found:
            log.warning("%s: ending %d containers that Harbor left", name, len(found))
            await self.engine.remove(found)
        for what in ("network", "image"):
            await self._remove_named(what, name)

    async def _remove_named(self, what: str, name: str) -> None:
        assert self.engine is not None
        form = "--format={{.Name}}" if what == "network" else "--format={{.Repository}}:{{.Tag}}"
        for each in (await self.engine.look(what, "ls", form)).split():
            if each.removeprefix("localhost/").startswith(name):
                try:
                    await self.engine.run(what, "rm", each)
                except EngineError as error:  # another trial's build goes on from it: it costs nothing
                    log.debug("%s: %s", each, error)


def _project(line: str) -> str:
    """Docker writes labels as `name=value,`, Podman as `name:value `."""
    found = _NAMED.search(line)
    return found[1] if found else ""

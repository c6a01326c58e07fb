"""The Ray cluster that trials run on: who is in it, and one task of Ray's for each attempt. Imports Ray when it is joined."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from steno.config.extras import how_to_install, missing
from steno.contracts.errors import ConfigError
from steno_rollouts.config import RolloutSettings
from steno_rollouts.trials.ray.worker import on_node

ADDRESS = "RAY_ADDRESS"
_REMOTE = ("ray://", "http://", "https://")


@dataclass(frozen=True)
class Node:
    """node_id: Ray's. resources: all that it has, by name."""

    node_id: str
    address: str
    resources: Mapping[str, float]

    def room(self, wanted: Mapping[str, float]) -> int | None:
        """How many trials fit on it at a time, were nothing else there. None: any number."""
        asked = {name: amount for name, amount in wanted.items() if amount}
        if not asked:
            return None
        return int(min(self.resources.get(name, 0.0) / amount + 1e-9 for name, amount in asked.items()))


class RayCluster:
    """Args: settings: which cluster, and what a trial takes of it."""

    def __init__(self, settings: RolloutSettings) -> None:
        """Raises: ConfigError: Ray is not installed, or the address is not one of a cluster's."""
        if missing(["ray"]) is not None:
            raise ConfigError(
                f"executor: got 'ray', and Ray is not installed: {how_to_install('ray')}", field="executor"
            )
        given = settings.ray_address or os.environ.get(ADDRESS, "")
        if given.startswith(_REMOTE):
            name = "ray_address" if settings.ray_address else ADDRESS
            raise ConfigError(
                f"{name}: got {given!r}, must be HOST:PORT of the cluster's head, or auto; from outside of the cluster: "
                "ray job submit -- steno rollout …",
                field="ray_address",
            )
        self._settings = settings
        self._ray: Any = None
        self._function: Any = None

    @property
    def wanted(self) -> dict[str, float]:
        """What a trial takes, by Ray's names."""
        return {"CPU": self._settings.ray_cpus, **self._settings.ray_resources}

    @property
    def where(self) -> str:
        return f"Ray {self._ray.__version__} at {self._ray.get_runtime_context().gcs_address}"

    def join(self) -> None:
        """Once; Ray's own rule says which cluster, where no address was given. Blocking. Raises: ConfigError."""
        if self._ray is not None:
            return
        import ray

        if not ray.is_initialized():
            try:
                with _without_keys():
                    ray.init(
                        address=self._settings.ray_address,
                        runtime_env=self._settings.ray_runtime_env or None,
                        log_to_driver=False,
                        logging_level="WARNING",
                    )
            except Exception as error:  # Ray raises what it likes, also of its own machinery
                said = (str(error).strip().splitlines() or [""])[0]
                raise ConfigError(
                    f"ray_address: {self._settings.ray_address or os.environ.get(ADDRESS) or 'unset'}: Ray can't be joined: "
                    f"{type(error).__name__}: {said}",
                    field="ray_address",
                ) from error
        # Only these rollouts start anything again: no retries, not of a lost worker, not for want of memory.
        self._function = ray.remote(max_retries=0, retry_exceptions=False)(on_node)
        self._ray = ray

    def nodes(self) -> list[Node]:
        """Those that are alive."""
        return [
            Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def kept(self, value: bytes) -> Any:
        """A reference, to be given to several tasks. Blocking."""
        return self._ray.put(value)

    def start(
        self, name: str, keys: bytes, request: bytes, clear: bytes, folder: Any, node_id: str | None = None
    ) -> Any:
        """A task of Ray's: `worker.on_node`. Args: node_id: there, without waiting for room; None: wherever there is room."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node_id is not None:
            placed = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
        else:
            placed = {
                "num_cpus": self._settings.ray_cpus,
                "resources": dict(self._settings.ray_resources),
                "scheduling_strategy": "SPREAD",
            }
        return self._function.options(name=name, **placed).remote(keys, request, clear, folder)

    def cancel(self, started: Any, *, force: bool = False) -> None:
        self._ray.cancel(started, force=force)

    def gone(self, error: BaseException) -> bool:
        """Whether it says that a node is no longer there, which Ray tells of some seconds late."""
        exceptions = self._ray.exceptions
        kinds = (exceptions.TaskUnschedulableError, exceptions.NodeDiedError, exceptions.WorkerCrashedError)
        return isinstance(error, kinds)

    def lost(self, error: BaseException) -> str | None:
        """What to say if an attempt may have run, and nobody knows how far; None: `error` says that it never began."""
        exceptions = self._ray.exceptions
        if isinstance(error, (exceptions.RuntimeEnvSetupError, exceptions.TaskUnschedulableError)):
            return None
        if isinstance(error, exceptions.RayTaskError):
            cause = error.cause
            if type(cause).__name__ in ("ModuleNotFoundError", "ImportError"):
                return None
            return f"{type(cause).__name__}: {cause}"
        return in_a_line(error)


def in_a_line(error: BaseException) -> str:
    """Its kind and its words, at most 400 characters of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:400]}"


@contextlib.contextmanager
def _without_keys() -> Iterator[None]:
    """Where there is no cluster, Ray starts one of this machine, whose processes inherit this environment, as trials see."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("STENO_")}
    try:
        yield
    finally:
        os.environ.update(kept)

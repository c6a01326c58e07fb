"""What can be checked of rollouts with Harbor before anything runs: interpreter, agent, kind of sandbox, tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno_rollouts.config import RolloutSettings
from steno_rollouts.tasks.selection import TaskSelection
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.harbor.interpreter import DOWNLOAD_S, HarborPython, ask
from steno_rollouts.trials.harbor.kubernetes.options import KubernetesOptions
from steno_rollouts.trials.harbor.pointing import OWN, POINTINGS, RELEASE, Pointing
from steno_rollouts.trials.harbor.tasks import STEPS, VERIFIERS, harbor_folders, harbor_tasks

KUBERNETES = "kubernetes"
"""Kind of sandbox that Harbor does not bring."""
SHARED = (
    "their verifier runs in the sandbox that their agent had, where an agent can cheat it "
    "(declare artifacts, or give --artifacts)"
)


@dataclass(frozen=True)
class HarborPlan:
    """What trials are run with. agent_file: of an agent that Harbor does not bring; its class is then `agent`. kubernetes: None:
    sandboxes are of a kind that Harbor brings."""

    python: HarborPython
    agent: str
    agent_file: Path | None
    pointing: Pointing
    kubernetes: KubernetesOptions | None = None


def harbor_plan(
    settings: RolloutSettings, source: str, selection: TaskSelection
) -> tuple[HarborPlan, list[Task], list[str]]:
    """Returns: the plan, the tasks, and what the operator must be told. Raises: ConfigError."""
    python = HarborPython.found(settings.harbor_python)
    if settings.environment not in {KUBERNETES, *python.environments}:
        allowed = ", ".join(sorted({KUBERNETES, *python.environments}))
        raise ConfigError(f"environment: got {settings.environment!r}, must be one of {allowed}", field="environment")
    plan = _with_agent(python, settings.agent or "")
    if settings.environment == KUBERNETES:
        plan = replace(plan, kubernetes=_kubernetes(python, settings))
    folders = harbor_folders(Path(source)) if Path(source).exists() else _downloaded(python, source, settings)
    tasks = selection.chosen(harbor_tasks(folders, settings.hide))
    if not tasks:
        raise ConfigError(f"harbor: {source} has no task", field="harbor")
    if plan.kubernetes is not None:
        _check_images(tasks)
    shared = [task.task_id for task in tasks if "shared" in modes(task, settings)]
    warnings = [f"{len(shared)} of {len(tasks)} tasks ({shared[0]}): {SHARED}"] if shared else []
    if python.version != RELEASE:
        warnings.append(f"Harbor {python.version}: Steno was checked with the agents of Harbor {RELEASE}")
    return plan, tasks, warnings


def _kubernetes(python: HarborPython, settings: RolloutSettings) -> KubernetesOptions:
    if not python.kubernetes:
        raise ConfigError(
            f"harbor_python: {python.python} has no kubernetes-asyncio, which environment kubernetes needs "
            "(pip install 'kubernetes-asyncio>=36.1,<37')",
            field="harbor_python",
        )
    if settings.allow_only_proxy:
        raise ConfigError(
            "allow_only_proxy: can't be given with environment kubernetes: a NetworkPolicy holds pods back "
            "(networkPolicy.sandboxes of the chart)",
            field="allow_only_proxy",
        )
    return KubernetesOptions.of(settings.environment_options)


def _check_images(tasks: list[Task]) -> None:
    """Nothing is built in a cluster. Raises: ConfigError."""
    for task in tasks:
        environment = task.fields.get("environment")
        if not isinstance(environment, Mapping) or not environment.get("docker_image"):
            raise ConfigError(
                f"harbor: task {task.task_id!r}: environment.docker_image is missing in its task.toml: with environment "
                "kubernetes images are not built, but pulled",
                field="harbor",
            )


def modes(task: Task, settings: RolloutSettings) -> list[str]:
    """Where the verifier of each step runs, or of the task: `separate` or `shared`. The driver writes it into the task."""
    steps: list[Mapping[str, Any]] = task.fields.get(STEPS) or [task.fields]
    artifacts = bool(settings.artifacts or task.fields.get("artifacts") or settings.verifier == "separate")
    sections = [task.hidden.get(VERIFIERS, {}).get(step.get("name"), {}) for step in steps]
    default = _verifier_mode(task.hidden.get("verifier", {}))
    return [
        _verifier_mode(section) or default or ("separate" if artifacts or step.get("artifacts") else "shared")
        for step, section in zip(steps, sections, strict=True)
    ]


def _verifier_mode(verifier: Mapping[str, Any]) -> str | None:
    """As Harbor reads a section `verifier`."""
    return verifier.get("environment_mode") or ("separate" if "environment" in verifier else None)


def _with_agent(python: HarborPython, agent: str) -> HarborPlan:
    file, _, name = agent.rpartition(":")
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise ConfigError(f"agent: {file}: no such file", field="agent")
        return HarborPlan(python, name, Path(file).absolute(), OWN)
    if agent not in python.agents:
        raise ConfigError(
            f"agent: got {agent!r}, must be FILE.py:Class or one of Harbor's: {', '.join(sorted(python.agents))}",
            field="agent",
        )
    pointing = POINTINGS.get(agent)
    if pointing is None:
        raise ConfigError(
            f"agent: {agent}: not supported: Harbor {python.version} has it, and Steno was checked with {RELEASE}",
            field="agent",
        )
    if pointing.refused is not None:
        raise ConfigError(f"agent: {agent} can't be pointed at the proxy: {pointing.refused}", field="agent")
    return HarborPlan(python, agent, None, pointing)


def _downloaded(python: HarborPython, name: str, settings: RolloutSettings) -> list[Path]:
    registry = None if settings.harbor_registry is None else str(settings.harbor_registry.absolute())
    try:
        found = ask(python.python, {"do": "dataset", "name": name, "registry": registry}, DOWNLOAD_S)
    except ConfigError as error:
        said = error.message.partition(": ")[2]
        raise ConfigError(
            f"harbor: {name}: no such folder, and no data set that Harbor finds: {said}", field="harbor"
        ) from None
    return [Path(folder) for folder in found["folders"]]

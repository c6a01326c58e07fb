"""What can be checked of rollouts with verifiers before anything runs: its release, the environment, its agents, its tasks.

What is asked of verifiers is asked here, in `serving.py`, `executor.py` and `outcome.py`, by names that its own programs use. It
is imported when it is needed: it takes seconds, and 370 MB.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from steno.contracts.errors import ConfigError
from steno.contracts.json_limits import storable
from steno_rollouts.config import RolloutSettings
from steno_rollouts.tasks.selection import TaskSelection
from steno_rollouts.tasks.task import Task, check_hidden, divided
from steno_rollouts.trials.verifiers.outcome import REWARD

RELEASE = "0.4.0"
"""Of verifiers, that Steno was checked with."""
AROUND_S = 3600.0
"""Seconds of a trial beside those that verifiers gives its agent: for sandboxes to start, and to score."""
UNCONFINED = (
    "runs as processes of this machine, not isolated: it can read your files and this process's memory "
    "(runtime.type subprocess)"
)


@dataclass(frozen=True)
class VerifiersPlan:
    """What trials are run with. config: verifiers' own, of the environment. given: its tasks, by the names of ours."""

    config: Any
    given: Mapping[str, Any]
    version: str

    def environment(self) -> Any:
        """A new `Env`. It may serve once. Blocking."""
        return _loaders().load_environment(self.config)


def verifiers_plan(
    settings: RolloutSettings, taskset: str, selection: TaskSelection
) -> tuple[VerifiersPlan, list[Task], list[str]]:
    """Takes `STENO_…` out of this process's environment, which agents inherit where they are processes of this machine.

    Returns: the plan, the tasks, and what the operator must be told. Raises: ConfigError.
    """
    for name in [name for name in os.environ if name.startswith("STENO_")]:
        del os.environ[name]
    loaders = _loaders()
    config = _config(loaders, {**settings.verifiers_options, "taskset": _taskset(settings, taskset)})
    agents = _agents(config)
    warnings = _check_agents(settings, agents)
    if len(agents) > 1:
        config = _named(config, agents)
    given: dict[str, Any] = {}
    try:
        source = loaders.load_environment(config).taskset
        _check_bounded(settings, taskset, source.bounded)
        tasks = selection.chosen(_tasks(source, settings.hide, config, agents, given))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # whatever a taskset raises while it loads
        raise ConfigError(f"verifiers: {taskset}: {type(error).__name__}: {error}", field="verifiers") from error
    if not tasks:
        raise ConfigError(f"verifiers: {taskset} has no task", field="verifiers")
    check_hidden(settings.hide, {name for task in tasks for name in task.hidden})
    version = _version()
    if version != RELEASE:
        warnings.append(f"verifiers {version}: Steno was checked with verifiers {RELEASE}")
    return VerifiersPlan(config, {task.task_id: given[task.task_id] for task in tasks}, version), tasks, warnings


def _loaders() -> Any:
    try:
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise ConfigError(
            f"verifiers: can't be imported here ({error}): install it beside Steno (pip install verifiers=={RELEASE})",
            field="verifiers",
        ) from None
    return loaders


def _version() -> str:
    try:
        return importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:  # a checkout
        return "of an unknown release"


def _taskset(settings: RolloutSettings, taskset: str) -> dict[str, Any]:
    given = settings.verifiers_options.get("taskset", {})
    if not isinstance(given, dict) or given.get("id", taskset) != taskset:
        raise ConfigError(
            f"verifiers_options: taskset: got {given!r}, must be a table of its options; its id is --verifiers",
            field="verifiers_options",
        )
    return {**given, "id": taskset}


def _config(loaders: Any, options: dict[str, Any]) -> Any:
    try:
        return loaders.resolve_env_config(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise _wrong(".".join(map(str, first["loc"])) or "env", first["msg"]) from None
    except (Exception, SystemExit) as error:  # as its loaders say what they can't find, or what a package raises
        kind = "" if isinstance(error, ImportError | ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"verifiers: {kind}{error}", field="verifiers") from error


def _agents(config: Any) -> dict[str, Any]:
    from verifiers.v1.configs.agent import agent_config_fields

    found: dict[str, Any] = agent_config_fields(config)
    again = {"retries": config.retries, **{f"{name}.retries": agent.retries for name, agent in found.items()}}
    for where, retries in again.items():
        if retries.max_retries or any(rule.max_retries for rule in retries.rules):
            raise _wrong(where, "must be 0: a trial holds one attempt (--retries starts others)")
    return found


def _check_agents(settings: RolloutSettings, agents: Mapping[str, Any]) -> list[str]:
    """Returns: what the operator must be told. Raises: ConfigError."""
    from verifiers.v1.utils.prime import ensure_prime_auth

    if settings.reward_key != REWARD and settings.reward_key not in agents:
        raise ConfigError(
            f"reward_key: got {settings.reward_key!r}, must be {REWARD}, or an agent of this environment: {', '.join(agents)}",
            field="reward_key",
        )
    if len(agents) > 1 and settings.is_given("agent_model"):
        raise ConfigError(
            f"agent_model: can't be given with several agents: {', '.join(agents)} ask by their own names",
            field="agent_model",
        )
    for name, agent in agents.items():
        if agent.model is not None and agent.client is None:
            raise _wrong(
                f"{name}.model",
                f"got {agent.model!r} without a client: the policy would answer by that name; leave it out, or give "
                "client as well",
            )
        if agent.runtime.type == "prime":
            try:
                ensure_prime_auth()
            except SystemExit as error:
                raise _wrong(
                    f"{name}.runtime.type", f"got {agent.runtime.type}, which needs a login: {error}"
                ) from None
    warnings = []
    if local := [name for name, agent in agents.items() if agent.runtime.type == "subprocess"]:
        warnings.append(f"{', '.join(local)}: {UNCONFINED}")
    played = [name for name, agent in agents.items() if agent.client is None]
    if len(played) > 1:
        warnings.append(
            f"the policy plays {', '.join(played)}, and each of their calls is trained unless the trainer's train_models "
            "names the ones to train"
        )
    return warnings


def _named(config: Any, agents: Mapping[str, Any]) -> Any:
    """Each agent that the policy plays asks for the model by the agent's name."""
    return config.model_copy(
        update={
            name: agent.model_copy(update={"model": name}) for name, agent in agents.items() if agent.client is None
        }
    )


def _check_bounded(settings: RolloutSettings, taskset: str, bounded: bool) -> None:
    if bounded:
        return
    if settings.limit is None:
        raise ConfigError(f"limit: missing: {taskset} has tasks without end (--limit)", field="limit")
    for name in ("filter", "shuffle_seed"):
        if settings.is_given(name):
            raise ConfigError(f"{name}: can't be given: {taskset} has tasks without end", field=name)


def _tasks(
    source: Iterable[Any], hide: Collection[str], config: Any, agents: Mapping[str, Any], given: dict[str, Any]
) -> Iterator[Task]:
    """Args: given: gets verifiers' tasks."""
    from verifiers.v1 import TaskData

    for each in source:
        name = each.data.id or each.data.name
        task_id = _free(name or str(each.data.idx), given)
        fields = {**json.loads(each.data.model_dump_json(exclude_defaults=True)), "task_id": task_id}
        if name:
            fields.pop("idx", None)  # it moves with the rows before it, and a group's task must stay as it is
        try:
            storable(fields)
        except ValueError as error:
            raise ConfigError(f"verifiers: task {task_id}: {error}", field="verifiers") from None
        # What a taskset adds to a task's data is what scores it: an answer, tests.
        own = {key for key in fields if key not in TaskData.model_fields and key != "task_id"}
        shown, hidden = divided(fields, {*own, *hide})
        given[task_id] = each
        yield Task(task_id, shown, hidden, timeout_s=_timeout_s(each, config, agents))


def _free(name: str, taken: Collection[str]) -> str:
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found


def _timeout_s(task: Any, config: Any, agents: Mapping[str, Any]) -> float | None:
    """Beyond what verifiers lets an episode take, whose end it scores; None: it is not known."""
    if config.timeout.episode is not None:
        return float(config.timeout.episode) + AROUND_S
    [*limits] = (agent.timeout.rollout or task.data.timeout.agent for agent in agents.values())
    return float(limits[0]) + AROUND_S if len(limits) == 1 and limits[0] is not None and not config.id else None


def _wrong(where: str, what: str) -> ConfigError:
    return ConfigError(f"verifiers_options: {where}: {what}", field="verifiers_options")

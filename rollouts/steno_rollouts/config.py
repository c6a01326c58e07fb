"""The settings of rollouts: one frozen tree, checked at load. `STENO_ROLLOUT_*` in the environment."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from steno.config.keys import ShownKey
from steno.config.settings import PROXY_HELP, ProxyUrl, Settings, SettingsConfigDict, admin_key_here, proxy_here
from steno.contracts.errors import ConfigError
from steno.contracts.records import TRIAL_ID, USUALLY_DIFFER, ForkOf, MayDiffer
from steno.contracts.rest import MOST_TRIALS, RUN_KEY
from steno_rollouts.tasks.selection import Filter

IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*", re.ASCII)
"""Names of images. It matches no option of a container engine (`--x`)."""


_OF_HARBOR = frozenset(
    "harbor_python harbor_registry agent agent_model agent_options agent_in_image environment environment_options verifier "
    "artifacts reward_key allow_only_proxy resume_steps".split()
)
_OF_BOTH = frozenset(("agent_model", "reward_key"))
"""Of Harbor's, what verifiers has as well."""
_NOT_OF_VERIFIERS = frozenset("confine private grace_s reward_timeout_s forwarder_image".split())
_OF_RAY = frozenset("ray_address ray_runner ray_cpus ray_resources ray_runtime_env ray_return_kb".split())
_RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that Ray names by options of their own."""


class RolloutSettings(Settings):
    """What `steno rollout` runs with."""

    model_config = SettingsConfigDict(env_prefix="STENO_ROLLOUT_")

    # -- what is run
    tasks: Path | None = Field(
        None,
        description="a folder of task folders (instruction.md, task.toml), one task folder, a .jsonl or .parquet file, or a data "
        "set saved by Hugging Face's datasets",
    )
    split: str | None = Field(None, description="split of a data set that has several, such as train")
    filter: list[str] = Field(
        default_factory=list,
        description="tasks to take: FIELD=GLOB, FIELD!=GLOB, or GLOB for the task's name; all must match, but of several = on "
        "one field one is enough",
    )
    limit: int | None = Field(
        None, ge=1, description="most tasks to take: the first, or those that shuffle_seed draws if it is set"
    )
    command: list[str] = Field(
        default_factory=list,
        description="command, run once per trial; {field} is replaced by the task's field, which STENO_TASK_FIELD has too",
    )
    group_size: int = Field(
        8, ge=1, le=MOST_TRIALS, description="trials of each task, whose rewards are centred together"
    )
    spare_trials: int = Field(
        0,
        ge=0,
        description="trials of a group beyond group_size: once that many have a reward, its other trials are ended",
    )
    epochs: int = Field(1, ge=1, description="times that each task is rolled out")
    shuffle_seed: int | None = Field(
        None, description="seed to shuffle the tasks of each epoch, and to draw those of limit; unset: no shuffling"
    )
    hide: list[str] = Field(
        default_factory=list, description="task field that is hidden from trials, such as an answer"
    )
    run: str | None = Field(
        None, min_length=1, max_length=128,
        description="run that these groups belong to; the name of an earlier run continues it; unset: a new run",
    )  # fmt: skip
    fork_of: str | None = Field(
        None,
        description="TRIAL_ID/TURN_ID of an ended trial: new trials get its recorded answers up to that turn, then sampled ones",
    )
    fork_resample: bool = Field(False, description="sample the turn of fork_of anew too")
    fork_may_differ: list[MayDiffer] = Field(
        default_factory=lambda: list(USUALLY_DIFFER),
        description="parts of requests that may differ from the recorded trial",
    )
    purpose: Literal["train", "eval"] = Field("train", description="groups for evaluation are never trained")

    # -- how
    proxy: ProxyUrl = Field(default_factory=proxy_here, description=PROXY_HELP)
    key: ShownKey = Field(
        default_factory=admin_key_here,
        description="key of the run (steno runs key RUN), which is enough, or an admin key; unset: STENO_ADMIN_KEY",
    )
    in_flight: int = Field(8, ge=1, le=65536, description="trials that run at a time")
    sequential: bool = Field(False, description="one trial at a time, one group after the other")
    groups_per_step: int | None = Field(
        None,
        ge=1,
        description="groups that the trainer takes per step; if set, no more groups are in hand than it can use in time",
    )
    max_staleness_steps: int = Field(
        1, ge=0, description="the trainer's max_staleness_steps; limits the groups in hand"
    )
    timeout_s: float | None = Field(
        None, gt=0, allow_inf_nan=False,
        description="time limit of a trial (Harbor: each step), in seconds; unset: agent.timeout_sec of its task.toml, else 3600",
    )  # fmt: skip
    grace_s: float = Field(5.0, ge=0, description="seconds between SIGTERM and SIGKILL")
    executor: Literal["local", "docker", "podman", "ray"] = Field(
        "local",
        description="what trials run in: processes of this machine, containers of Docker or Podman, or nodes of a Ray cluster",
    )
    image: str | None = Field(
        None, description="image of tasks that bring neither environment/Dockerfile nor a field image"
    )
    cpus: float | None = Field(
        None, ge=0.01, allow_inf_nan=False,
        description="processors of a trial's container; unset: environment.cpus of its task.toml, else 1",
    )  # fmt: skip
    memory_mb: int | None = Field(
        None,
        ge=16,
        description="memory of a trial's container; unset: environment.memory_mb of its task.toml, else 2048",
    )
    forwarder_image: str = Field(
        "docker.io/library/python:3.12-alpine",
        description="image with python3; runs beside each container and passes its requests on",
    )
    confine: Literal["auto", "require", "off"] = Field(
        "auto",
        description="hide your processes and keys from trials, by bubblewrap; auto: if bubblewrap works, else a warning",
    )
    private: list[Path] = Field(
        default_factory=list, description="more files and folders that confined trials find empty"
    )
    retries: int = Field(1, ge=0, le=100, description="further attempts at a trial that fails before its first turn")
    stop_after_failures: int = Field(
        5,
        ge=0,
        description="stop after this many trials in a row that fail before their first turn; 0: never",
    )

    # -- on Ray
    ray_address: str | None = Field(
        None,
        min_length=1,
        description="HOST:PORT of the Ray cluster's head, or auto; unset: RAY_ADDRESS, else as Ray finds one",
    )
    ray_runner: Literal["local", "docker", "podman"] = Field(
        "local",
        description="what trials run in on their node: its processes, or containers; with --harbor, Harbor's sandboxes",
    )
    ray_cpus: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="processors that a trial takes of what its node has in Ray"
    )
    ray_resources: dict[str, float] = Field(
        default_factory=dict, description='other resources that a trial reserves in Ray: {"sandbox": 1}'
    )
    ray_runtime_env: dict[str, Any] = Field(
        default_factory=dict,
        description='Ray\'s runtime environment: {"working_dir": "."} sends this folder to the nodes. Ray shows it: no keys',
    )
    ray_return_kb: int = Field(
        1024,
        ge=1,
        le=1024 * 1024,
        description="most KiB that a node sends back of a trial's outcome, and of each of its output files (the end of the file)",
    )

    # -- with Harbor
    harbor: str | None = Field(
        None,
        min_length=1,
        description="run Harbor's tasks with its agents and sandboxes: a folder of tasks, or a data set as NAME@VERSION",
    )
    harbor_python: Path | None = Field(
        None, description="python that has Harbor (3.12 or newer); unset: the one that runs this"
    )
    harbor_registry: Path | None = Field(
        None, description="file of a registry of data sets, as Harbor has them; unset: Harbor's own registry"
    )
    agent: str | None = Field(
        None, min_length=1, description="agent of Harbor's, by its name there, or of your own: FILE.py:Class"
    )
    agent_model: str = Field(
        "policy",
        pattern=r"^[\w./-]+$",
        description="name by which the agent asks for the model; one that no worker has served means the default policy",
    )
    agent_options: dict[str, Any] = Field(
        default_factory=dict, description='the agent\'s own options in Harbor: {"max_turns": 20}'
    )
    agent_in_image: bool = Field(
        False, description="the tasks' images have the agent: it is looked for there, and not installed"
    )
    environment: str = Field(
        "docker",
        min_length=1,
        description="kind of sandbox: kubernetes, or one of Harbor's: docker, podman, modal, daytona, e2b, gke and more",
    )
    environment_options: dict[str, Any] = Field(
        default_factory=dict, description="options of that kind of sandbox in Harbor"
    )
    verifier: Literal["auto", "separate"] = Field(
        "auto",
        description="where Harbor's verifiers run; auto: where the task says, else in a fresh sandbox if there are artifacts; "
        "separate: where the task says, else always in a fresh sandbox",
    )
    artifacts: list[str] = Field(
        default_factory=list,
        description="path in the agent's sandbox that is copied into the verifier's fresh one, beside the task's own artifacts",
    )
    reward_key: str = Field(
        "reward",
        min_length=1,
        description="the trial's reward: with harbor, its name among those of the task's verifier; with the library "
        "verifiers, the agent whose reward it is; other rewards are metrics",
    )
    allow_only_proxy: bool = Field(
        False, description="let agents in Harbor's sandboxes reach the proxy's host and nothing else"
    )
    resume_steps: bool = Field(
        False, description="in tasks of several steps, an agent goes on in the conversation it had"
    )

    # -- with verifiers
    verifiers: str | None = Field(
        None, min_length=1, description="run tasks of verifiers, by the id of a taskset that is installed here"
    )
    verifiers_options: dict[str, Any] = Field(
        default_factory=dict,
        description='the rest of its environment\'s configuration: {"agent": {"runtime": {"type": "docker"}}}',
    )

    # -- what it is worth
    reward: str | None = Field(
        None, description="FILE.py:function that scores a trial; unset: reward.json or reward.txt in its working folder"
    )
    group_reward: str | None = Field(
        None,
        description="FILE.py:function that scores a group's trials together, once all have ended; it is told their own rewards",
    )
    timeout_reward: float | None = Field(
        None, ge=-1e6, le=1e6,
        description="reward of a trial that reaches its time limit and has no other reward; unset: it is not trained",
    )  # fmt: skip
    reward_timeout_s: float = Field(300.0, gt=0, description="time limit of a reward function, in seconds")
    results: Path | None = Field(None, description="file to which each ended trial is appended as a line of JSON")

    # -- what the proxy does with it
    sampling: dict[str, Any] = Field(
        default_factory=dict, description='fields of the sampling law that override the agent\'s: {"temperature": 1.0}'
    )
    max_turns: int | None = Field(None, ge=1, description="most turns of a trial")
    max_tokens: int | None = Field(None, ge=1, description="most tokens that a trial may sample")
    deadline_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds after which a group goes to the trainer, complete or not"
    )

    # -- what is kept
    work_dir: Path = Field(
        default_factory=lambda: Path(tempfile.gettempdir()) / f"steno-rollouts-{os.getuid()}",
        description="folder of the trials' folders; default: steno-rollouts-UID in the folder of temporary files (UID: yours, as "
        "`id -u` says it)",
    )
    keep: Literal["failed", "all", "none"] | None = Field(
        None, description="trials whose folders are kept after they end; unset: failed, with --harbor all"
    )
    progress_s: float = Field(10.0, gt=0, description="seconds between two lines of progress if there is no terminal")

    @field_validator("filter")
    @classmethod
    def _are_filters(cls, value: list[str]) -> list[str]:
        for text in value:
            try:
                Filter.of(text)
            except ConfigError as error:
                raise ValueError(error.message.removeprefix("filter: ")) from None
        return value

    @field_validator("fork_of")
    @classmethod
    def _is_turn(cls, value: str | None) -> str | None:
        trial_id, _, turn_id = (value or "").partition("/")
        if value is not None and not (re.fullmatch(TRIAL_ID, trial_id) and 0 < len(turn_id) <= 64):
            raise ValueError(f"got {value!r}, must be TRIAL_ID/TURN_ID, as `steno sessions show TRIAL_ID` names turns")
        return value

    @field_validator("image", "forwarder_image")
    @classmethod
    def _is_image(cls, value: str | None) -> str | None:
        if value is not None and not IMAGE.fullmatch(value):
            raise ValueError(f"got {value!r}, must be the name of an image, such as docker.io/library/python:3.12")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.purpose == "eval" and self.groups_per_step is not None:
            raise ValueError(
                "groups_per_step can't be given with purpose 'eval': groups for evaluation are never trained"
            )
        if self.purpose == "eval" and self.spare_trials:
            raise ValueError(
                "spare_trials can't be given with purpose 'eval': the trials that take longest would count less"
            )
        if self.trials_of_group > MOST_TRIALS:
            raise ValueError(
                f"spare_trials: got {self.spare_trials}, must be at most {MOST_TRIALS - self.group_size}: a group of "
                f"{self.group_size} and its spare trials are {MOST_TRIALS} at most"
            )
        for name in ("image", "cpus", "memory_mb"):
            if self.runner == "local" and getattr(self, name) is not None:
                field = "ray_runner" if self.executor == "ray" else "executor"
                raise ValueError(
                    f"{name}: is for containers, and {field} is 'local' ({self.flag(field)} docker or podman)"
                )
        self._check_ray()
        self._check_source()
        if self.runner != "local" and ":" in str(self.work_dir):
            raise ValueError(f"work_dir: got {str(self.work_dir)!r}: a path with a colon can't be mounted")
        if self.is_run_key and self.run is None:
            raise ValueError("run: missing, and key is the key of one run: name that run (--run)")
        return self

    def _check_ray(self) -> None:
        if self.executor != "ray":
            if given := self._given(_OF_RAY):
                raise ValueError(f"{given[0]}: is for trials on Ray (--executor ray)")
            return
        for name, amount in self.ray_resources.items():
            if name in _RAYS_OWN or not name:
                raise ValueError(
                    f"ray_resources: got {name!r}, must be a resource that nodes were given by name (ray start --resources)"
                )
            if not 0 < amount < float("inf") or (amount > 1 and amount != int(amount)):
                raise ValueError(f"ray_resources: {name}: got {amount:g}, must be a whole number, or between 0 and 1")

    def _check_source(self) -> None:
        """Where tasks come from, and what is for tasks from there alone."""
        if self.harbor is None and self.verifiers is None and self.tasks is None:
            raise ValueError(
                "tasks: missing: give a folder or a file (--tasks), or tasks of Harbor's (--harbor) or verifiers' (--verifiers)"
            )
        of_harbor = _OF_HARBOR - _OF_BOTH if self.verifiers else _OF_HARBOR
        if self.harbor is None and (given := self._given(of_harbor)):
            raise ValueError(f"{given[0]}: is for Harbor's tasks (--harbor)")
        if self.verifiers is None and self.is_given("verifiers_options"):
            raise ValueError("verifiers_options: is for verifiers' tasks (--verifiers)")
        if (engine := "harbor" if self.harbor else "verifiers" if self.verifiers else None) is None:
            return
        without = {"tasks": self.tasks, "split": self.split, "command": self.command, "reward": self.reward}
        if self.harbor:
            without["verifiers"] = self.verifiers
        for name, value in without.items():
            if value:
                raise ValueError(f"{name}: can't be given with {engine}, which brings its own")
        if self.verifiers:
            for name in self._given(_NOT_OF_VERIFIERS):
                if name == "reward_timeout_s" and self.group_reward:
                    continue
                if (name, getattr(self, name)) != ("confine", "off"):
                    raise ValueError(
                        f"{name}: can't be given with verifiers: what its agents run in is chosen by --verifiers-options"
                    )
            if self.executor != "local":
                raise ValueError(
                    f"executor: got {self.executor!r}: with verifiers, what an agent runs in is chosen by "
                    "--verifiers-options (agent.runtime.type)"
                )
            return
        self._check_harbor()

    def _check_harbor(self) -> None:
        if self.runner != "local":
            field = "ray_runner" if self.executor == "ray" else "executor"
            raise ValueError(f"{field}: got {self.runner!r}: with harbor, sandboxes are chosen by --environment")
        if self.executor == "ray" and self.environment == "kubernetes":
            raise ValueError(
                "environment: got 'kubernetes', and executor is 'ray': pods run wherever their cluster has room"
            )
        if self.agent is None:
            raise ValueError("agent: missing: name one of Harbor's agents (--agent)")

    def is_given(self, name: str) -> bool:
        """Whether a field is not as by default: a file that `--print-config` wrote has all fields."""
        default = type(self).model_fields[name].get_default(call_default_factory=True, validated_data={})
        return name in self.model_fields_set and getattr(self, name) != default

    def _given(self, names: frozenset[str]) -> list[str]:
        return sorted(name for name in names if self.is_given(name))

    @property
    def runner(self) -> Literal["local", "docker", "podman"]:
        """What a trial runs in, on whichever machine."""
        return self.ray_runner if self.executor == "ray" else self.executor

    @property
    def keeps(self) -> Literal["failed", "all", "none"]:
        """Which trial folders stay: `keep`; if it is unset, all with Harbor, else those of failed trials."""
        return self.keep or ("failed" if self.harbor is None else "all")

    @property
    def forked_from(self) -> ForkOf | None:
        """The recorded turn that every trial is forked at; None: trials are not forked."""
        if self.fork_of is None:
            return None
        trial_id, _, turn_id = self.fork_of.partition("/")
        return ForkOf(trial_id=trial_id, turn_id=turn_id, resample=self.fork_resample, may_differ=self.fork_may_differ)

    @property
    def is_run_key(self) -> bool:
        """Whether the key is of one run; else it is an admin key, if there is one."""
        return self.key is not None and self.key.get_secret_value().startswith(RUN_KEY)

    @property
    def trials_of_group(self) -> int:
        return self.group_size + self.spare_trials

    @property
    def trials_at_once(self) -> int:
        return 1 if self.sequential else self.in_flight

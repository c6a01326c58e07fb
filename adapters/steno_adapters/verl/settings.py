"""What agents in verl are run with: the settings of `steno rollout`, of which verl decides some.

They are found in a file (YAML), in the environment (`STENO_VERL_…`, and `PROXY_SERVER_URL`), and on verl's command line
(`+steno.timeout_s=600`); what comes later counts. Keys are not taken from the command line, which verl prints and tracks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from steno.config.keys import ShownKey
from steno.config.settings import SettingsConfigDict
from steno.contracts.errors import ConfigError
from steno.contracts.runs.train_models import ModelNames
from steno_rollouts.config import RolloutSettings

PROXY_VARIABLE = "PROXY_SERVER_URL"
OF_VERL = {
    "group_size": "actor_rollout_ref.rollout.n",
    "epochs": "trainer.total_epochs",
    "shuffle_seed": "data.shuffle",
    "sequential": "verl's batches",
    "purpose": "verl's validation",
    "groups_per_step": "data.train_batch_size",
    "max_staleness_steps": "trainer.v1.sampler",
    "stop_after_failures": "on_failure",
    "deadline_s": "timeout_s",
    "sampling": "actor_rollout_ref.rollout",
    "fork_of": "nothing of verl's",
    "results": "verl's own logs",
}
"""Settings of `steno rollout` that mean nothing here, and what decides it instead."""


class VerlSettings(RolloutSettings):
    """Of an agent loop in verl."""

    model_config = SettingsConfigDict(env_prefix="STENO_VERL_")

    proxy: str = Field("", description=f"URL of the proxy; {PROXY_VARIABLE} too; unset: one is started in the job")
    key: ShownKey = Field(None, description="admin key of the proxy, or the key of `run`")
    eval_tasks: Path | None = Field(
        None, description="tasks of verl's validation, in the same forms; unset: they are among `tasks`"
    )
    worker_key: ShownKey = Field(None, description="the workers' key of the proxy")
    in_flight: int = Field(64, ge=1, le=65536, description="trials that run at a time in each agent-loop worker")
    branches: Literal["all", "main"] = Field(
        "all",
        description="rows of a trial that forked: all of its branches, or the one with the most sampled tokens, the rest counted",
    )
    train_models: ModelNames = Field(
        default_factory=list,
        description="calls that are trained, by the model name that the agent asked for, with * and ?; unset: all",
    )
    on_failure: Literal["leave_out", "fail_group"] = Field(
        "leave_out", description="a trial that failed is a gap in its group, or makes verl discard the group"
    )
    model_name: str = Field("policy", pattern=r"^[\w./-]{1,200}$", description="name by which agents see the model")

    @classmethod
    def found(cls, file: Path | None, command_line: Mapping[str, Any]) -> Self:
        """Raises: ConfigError, which names where a bad value is from."""
        for name in cls._secrets():
            if command_line.get(name) is not None:
                raise ConfigError(
                    f"{cls.flag(name)}: verl prints and tracks its command line: set {cls.variable(name)}, or give a file "
                    f"that has it as {cls.flag(name)}_file",
                    field=name,
                )
        return cls.load(dict(command_line), file)

    def in_job(self, proxy: str, key: str | None, work_dir: Path) -> Self:
        """These, where the job's proxy runs. Args: proxy, key: its own; key None: it asks for none."""
        shown = SecretStr(key) if key is not None else None
        return self.model_copy(update={"proxy": proxy, "key": shown, "work_dir": work_dir})

    @classmethod
    def flag(cls, key: str) -> str:
        return f"+steno.{key}"

    @classmethod
    def _read_environment(cls) -> dict[str, Any]:
        url = os.environ.get(PROXY_VARIABLE, "").strip()
        return ({"proxy": url} if url else {}) | super()._read_environment()

    @field_validator("proxy")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError(f"got {value!r}, must be http(s)://HOST[:PORT][/PREFIX], or nothing")
        return value

    @model_validator(mode="after")
    def _is_verls(self) -> Self:
        for name, instead in OF_VERL.items():
            if name in self.model_fields_set:
                raise ValueError(f"{name}: can't be given here: {instead} decides it")
        if self.eval_tasks is not None and self.harbor is not None:
            raise ValueError("eval_tasks: can't be given with harbor: give one data set that has all of them")
        if self.verifiers is not None:
            raise ValueError("verifiers: can't be given here: with verl, trials are commands or Harbor's")
        if self.group_reward is not None:
            raise ValueError("group_reward: can't be given here: verl wants a row's reward once its trial has ended")
        if self.spare_trials:
            raise ValueError("spare_trials: can't be given here: verl wants a row of each trial of a group")
        if self.key is not None and not self.proxy:
            raise ValueError("key: is of a proxy that runs already: give its URL as proxy")
        return self

"""verl's manager of agent loops, which looks at the configuration before anything is started.

`actor_rollout_ref.rollout.agent.agent_loop_manager_class=steno_adapters.verl.manager.StenoAgentLoopManager`. Without it the same
is said by the first session, and the embedded proxy belongs to the first agent-loop worker instead of the trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf

from steno.contracts.errors import ConfigError
from steno_adapters.verl import seam
from steno_adapters.verl.checks import check_config
from steno_adapters.verl.job import facts_of, job
from steno_adapters.verl.loop import command_line
from steno_adapters.verl.settings import VerlSettings

TARGET = "steno_adapters.verl.loop.RemoteAgentLoop"


class StenoAgentLoopManager(seam.AgentLoopManagerTQ):
    """As verl's. facts: of the job. Raises: ConfigError: settings, or verl's configuration, are not what they should be."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        settings = settings_of(config)
        check_config(config, settings.branches)
        seam.let_padding_be_logged()
        keys = [key.get_secret_value() if key is not None else None for key in (settings.key, settings.worker_key)]
        name = str(config.trainer.get("experiment_name", "verl"))
        self._job = job(name, settings.run, settings.proxy, *keys)  # lives as long as this object
        try:
            self.facts = facts_of(self._job)
        except ray.exceptions.RayError as error:
            raise ConfigError(f"proxy: {error}", field="proxy") from error
        super().__init__(config, *args, **kwargs)


def settings_of(config: Any) -> VerlSettings:
    """Of the agent loop that is registered under `agent_loop_config_path`. Raises: ConfigError: none is."""
    path = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
    entries = OmegaConf.load(path) if path else []
    for entry in entries:
        if entry.get("_target_") == TARGET:
            file = entry.get("settings")
            return VerlSettings.found(Path(file) if file else None, command_line(config))
    raise ConfigError(
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path: got {path}, must be a file with an entry whose _target_ is "
        f"{TARGET}",
        field="agent_loop_config_path",
    )

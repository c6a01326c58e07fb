"""Runs where Harbor does: makes each agent as its row says, and prints where it would ask. On stdin: rows by agent; on stdout:
for each, its key and address, or what it lacks."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.factory import AgentFactory
from harbor.models.trial.config import AgentConfig

found: dict[str, Any] = {"names": AgentFactory.registered_names()}
for name, row in json.load(sys.stdin).items():
    try:
        config = AgentConfig(name=name, **row)
        agent = AgentFactory.create_agent_from_config(config, logs_dir=Path(tempfile.mkdtemp()))
        connection = agent.model_connection
        found[name] = {
            "declared": agent.MODEL_CONNECTION is not None,
            "url": connection.configured_base_url,
            "key": connection.api_key,
            "options": agent.options.model_dump(mode="json", exclude_unset=True) if agent.options else {},
            "env": agent.extra_env,
            "model": agent.model_name,
        }
    except ModuleNotFoundError as error:
        found[name] = {"lacks": error.name}
print(json.dumps(found))

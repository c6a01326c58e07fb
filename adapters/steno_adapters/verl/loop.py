"""`RemoteAgentLoop`: one session of verl's, played by an agent that knows nothing of it.

- name: steno
  _target_: steno_adapters.verl.loop.RemoteAgentLoop
  settings: /data/agents.yaml        # of `steno rollout`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from steno.contracts.errors import BadRequest, StenoError
from steno_adapters.verl import seam
from steno_adapters.verl.agent_host import AgentHost, PlayedSession
from steno_adapters.verl.checks import check_session, forced_law
from steno_adapters.verl.prompt_groups import PromptGroups, PromptSession
from steno_adapters.verl.settings import VerlSettings

log = logging.getLogger(__name__)
_groups = PromptGroups()
_host: asyncio.Task[AgentHost] | None = None
"""`_groups` and `_host` are the whole process': verl makes a `RemoteAgentLoop` for each session."""


class TrialFailed(StenoError):
    """A session has no row to train."""

    code = "trial_failed"


class RemoteAgentLoop(seam.AgentLoopBase):
    """As verl's agent loops are. Args: settings: a file of settings (`VerlSettings`)."""

    def __init__(
        self, trainer_config: Any, server_manager: Any, tokenizer: Any, settings: str | None = None, **_: Any
    ) -> None:
        # Not the base's: it makes a builder of prompts, and prompts are rendered where agents' requests are.
        self._config = trainer_config.config
        self._servers = server_manager
        self._tokenizer = tokenizer
        self._file = settings

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[Any]:
        """Rows of the session, the last with the most trained tokens; none: it failed, and its group goes on without.

        Args: kwargs: the fields of the prompt's row, `uid` and `session_id` among them.
        Raises: StenoError: the session failed, and verl's group is to fail; or it can't be run here at all.
        """
        check_session(kwargs.keys())
        uid = str(_plain(kwargs["uid"]))
        group, index = _groups.come(uid)  # before the first await
        host: AgentHost | None = None
        played: PlayedSession | None = None
        try:
            await asyncio.sleep(0)  # so that sibling sessions begin too, even if no await below suspends
            host = await host_here(self._config, self._file, self._servers, self._tokenizer)
            validate = await seam.is_validation(uid)
            step = _plain(kwargs.get("global_steps"))
            session = PromptSession(
                uid=uid,
                group=group,
                index=index,
                task=host.task(task_name(kwargs.get("extra_info")), validate=validate),
                law=forced_law(sampling_params, validate=validate),
                validate=validate,
                step=None if step is None else int(step),
                waiting=_groups.open,
            )
            played = await host.play(session)
        finally:
            none_has_any = _groups.leave(uid, group, rows=played is not None and bool(played.rows.rows))
            if host is not None and not group.open:
                await asyncio.shield(host.end_rest(group))
        if played.rows.rows:
            return outputs(played)
        left = ", ".join(f"{tokens} tokens {reason}" for reason, tokens in sorted(played.rows.untrained.items()))
        why = played.result.detail or left or played.result.end_reason
        message = f"prompt {uid}: trial {played.result.trial_id} has no rows: {why}"
        log.warning("%s", message)
        if host.fails_groups or none_has_any:
            raise TrialFailed(message)
        return []


async def host_here(config: Any, file: str | None, servers: Any, tokenizer: Any) -> AgentHost:
    """This process' host, which is made at the first call. One that could not be made is tried again by the next prompt."""
    global _host
    failed = _host is not None and _host.done() and (_host.cancelled() or _host.exception() is not None)
    if _host is None or failed:
        settings = VerlSettings.found(Path(file) if file else None, command_line(config))
        _host = asyncio.create_task(AgentHost.begun(config, settings, servers, tokenizer))
    return await asyncio.shield(_host)


def command_line(config: Any) -> Mapping[str, Any]:
    """What stands under `steno` in verl's configuration: `+steno.NAME=VALUE`."""
    given = config.get("steno") or {}
    return given if isinstance(given, dict) else OmegaConf.to_container(given, resolve=True)


def task_name(extra_info: Any) -> str:
    """Raises: BadRequest: the row does not say which task it is."""
    found = _plain(extra_info)
    name = found.get("task_id") if isinstance(found, Mapping) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(
            f"extra_info.task_id: got {name!r}, must be the name of a task: make the file by `steno tasks parquet`",
            field="extra_info.task_id",
        )
    return name


def outputs(played: PlayedSession) -> list[Any]:
    """verl's outputs of a session, which share nothing that can be changed."""
    result, rows = played.result, played.rows.rows
    made = []
    for row in rows:
        oldest, newest = row.steps
        extra = {
            "reward_extra_info": {
                "steno_turns": result.turns,
                "steno_rows": len(rows),
                "steno_failed": int(result.failed),
            },
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "steno_trial_id": result.trial_id,
        }
        made.append(
            seam.AgentLoopOutput(
                prompt_ids=row.prompt_ids,
                response_ids=row.response_ids,
                response_mask=row.mask,
                response_logprobs=row.logprobs,
                reward_score=played.reward,
                num_turns=result.turns,
                metrics=seam.AgentLoopMetrics(generate_sequences=result.wall_s),
                extra_fields=extra,
            )
        )
    return made


def _plain(value: Any) -> Any:
    """Rows come as numpy's and tensordict's objects too."""
    for name in ("item", "data"):
        inner = getattr(value, name, None)
        if inner is not None and not isinstance(value, str | bytes | Mapping):
            return inner() if callable(inner) else inner
    return value

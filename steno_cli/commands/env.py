"""`steno env AGENT TRIAL`: what points a known agent at a trial, as shell lines to `eval`, or as JSON.

Standard output is nothing but `export` lines and comments, so that `eval "$(steno env …)"` is safe; the agent's key is among
them, since that is what they are for.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import httpx
import typer

from steno.contracts.errors import ConfigError
from steno.contracts.records import TRIAL_ID
from steno_cli.agents import AGENTS, NO_KEY, AgentSetup, AgentTarget
from steno_cli.commands.sessions import Key, KeyFile, Url
from steno_cli.terminal.connection import ClientSettings, connect
from steno_cli.terminal.http_proxies import direct

log = logging.getLogger(__name__)
AgentName = StrEnum("AgentName", {name.upper().replace("-", "_"): name for name in AGENTS})  # type: ignore[misc]


def env(
    agent: Annotated[AgentName, typer.Argument(help="One of the agents that are known here.", show_choices=True)],
    trial_id: Annotated[str, typer.Argument(metavar="TRIAL", help="Id of the trial; it is registered if it is new.")],
    model: Annotated[str, typer.Option(help="Name that the agent asks for; any will do, it is recorded.")] = "policy",
    agent_key: Annotated[
        str | None,
        typer.Option(
            help="The trial's own key, if known: the proxy is then not asked, so --proxy must be the agents' port."
        ),
    ] = None,
    context_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most tokens of prompt and answer, for agents that compact by it; unset: the model's."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of shell lines.")] = False,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Print what points a known agent at a trial: `eval "$(steno env claude-code my-trial)"`."""
    trial = target(trial_id, model, agent_key, url, key, key_file)
    if context_tokens is not None:
        trial = replace(trial, context_tokens=context_tokens)
    found = AGENTS[agent.value].setup(trial)
    found = replace(found, variables=found.variables | direct(trial.urls["openai"], os.environ))
    if as_json:
        shown = {name: getattr(found, name) for name in ("variables", "command", "files", "instead")}
        typer.echo(json.dumps(shown, ensure_ascii=False, indent=2))
    else:
        typer.echo(shell(found), nl=False)


def target(
    trial_id: str, model: str, agent_key: str | None, url: str | None, key: str | None, key_file: str | None
) -> AgentTarget:
    """Where the trial is, and its key: from the proxy, which registers it, unless the key is given.

    Raises: ConfigError: also where the trial has ended. StenoError: as the client.
    """
    if agent_key is not None:
        if not re.fullmatch(TRIAL_ID.strip("^$"), trial_id):
            raise ConfigError(
                f"trial id: got {trial_id[:128]!r}, must be at most 128 letters, digits, '.', '_' and '-'"
            )
        settings = ClientSettings.load({"proxy": url}, None)
        return AgentTarget(trial_id, urls(settings.proxy, trial_id), agent_key, model)
    with connect(url, key, key_file) as steno:
        trial = steno.register(trial_id)
    if trial.session.status != "open":
        raise ConfigError(
            f"trial {trial_id} has ended ({trial.session.status}) and takes no more turns: give another id"
        )
    base_url = ClientSettings.load({"proxy": url}, None).proxy
    places = (urls(base_url, trial_id)["openai"], trial.urls["openai"])
    context_tokens = served_context(places, trial.api_key or NO_KEY, model)
    return AgentTarget(trial_id, trial.urls, trial.api_key or NO_KEY, model, context_tokens)


def served_context(places: Sequence[str], agent_key: str, model: str) -> int | None:
    """Context of the model that the trial will be served by, in tokens: of that name, else the smallest, since it may be any.

    Args: places: base URLs of the trial; the next is asked where one is not served (404), as on a control port.
    None: nothing is served yet, or the list can't be had here.
    """
    try:
        for base_url in places:
            answer = httpx.get(f"{base_url}/models", headers={"authorization": f"Bearer {agent_key}"}, timeout=10)
            if answer.status_code != 404:
                break
    except httpx.HTTPError as error:
        log.warning("the models can't be listed, so no context is set: %s", error)
        return None
    if answer.status_code != 200:
        log.warning("the models can't be listed, so no context is set: status %d", answer.status_code)
        return None
    served = {found["id"]: found["max_model_len"] for found in answer.json()["data"]}
    return served.get(model) or min(served.values(), default=None)


def urls(base_url: str, trial_id: str) -> dict[str, str]:
    """As the proxy answers at registration (`rest.Trial`)."""
    base = f"{base_url.rstrip('/')}/{trial_id}"
    return {"openai": f"{base}/v1", "anthropic": base, "gemini": base}


def shell(setup: AgentSetup) -> str:
    """`export` lines; the command and the files as comments."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in setup.variables.items()]
    for name, content in setup.files.items():
        lines += [f"# in {name}:", *_commented(content)]
    if setup.command:
        lines += ["# then:", *_commented(setup.command)]
    for name, content in setup.instead.items():
        lines += [f"# or, without the rest, in {name}:", *_commented(content)]
    return "\n".join(lines) + "\n"


def _commented(text: str) -> list[str]:
    return [f"#   {line}".rstrip() for line in text.splitlines()]

"""What `steno env` prints can be evaluated by a shell, read by a program, and says the same either way."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from steno.contracts.errors import ConfigError
from steno_cli.agents import AGENTS, AgentTarget
from steno_cli.commands.env import shell, urls
from steno_cli.main import app
from steno_proxy.config.settings import ProxySettings
from steno_rollouts.trials.harbor.pointing import POINTINGS, Addresses

runner = CliRunner()
URL = "https://proxy.example:8443/rl"
ODD = AgentTarget("t.1", urls(URL, "t.1"), "sk-steno-'$(touch x)`\"\\", "a model; with 'quotes'")
"""A model name and a key that no shell may take apart."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("STENO_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def bash(script: str) -> bytes:
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, env={"PATH": os.environ["PATH"]}, check=True
    )
    assert done.stderr == b""
    return done.stdout


@pytest.mark.parametrize("name", AGENTS)
def test_evaluated_it_sets_the_variables_and_does_nothing_else(name: str) -> None:
    setup = AGENTS[name].setup(ODD)
    seen = dict(line.split("=", 1) for line in bash(shell(setup) + "env -0").decode().split("\0") if "=" in line)
    assert {variable: seen.get(variable) for variable in setup.variables} == setup.variables
    assert seen.keys() - setup.variables.keys() <= {"PATH", "PWD", "SHLVL", "_"}


@pytest.mark.parametrize("name", AGENTS)
def test_the_trial_and_the_key_are_in_it(name: str) -> None:
    setup = AGENTS[name].setup(ODD)
    whole = " ".join([*setup.variables.values(), setup.command, *setup.files.values()])
    assert f"{URL}/t.1" in whole
    assert any(ODD.key in value or json.dumps(ODD.key)[1:-1] in value for value in setup.variables.values())
    assert ODD.key not in setup.command, "a command line can be read by everybody on a machine"


@pytest.mark.parametrize("name", [name for name, agent in AGENTS.items() if agent.setup(ODD).command])
def test_a_command_is_one_line_of_shell_that_takes_the_task_from_a_variable(name: str) -> None:
    setup = AGENTS[name].setup(ODD)
    program, rest = setup.command.split(" ", 1)
    words = bash(f"TASK='do  it'\n{program}() {{ printf '%s\\0' \"$@\"; }}\n{setup.command}").decode().split("\0")[:-1]
    assert any(word.endswith("do  it") for word in words)
    if "quotes" in rest:
        assert any(word.endswith("a model; with 'quotes'") for word in words)


@pytest.mark.parametrize("name", AGENTS)
def test_files_are_of_the_kind_that_their_names_say(name: str) -> None:
    setup = AGENTS[name].setup(ODD)
    read = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
    for file, content in (setup.files | setup.instead).items():
        found = read[file.rpartition(".")[2]](content)
        assert isinstance(found, dict) and content.endswith("\n")
    if name == "codex":
        assert found["model"] == ODD.model and found["model_providers"]["steno"]["base_url"] == f"{URL}/t.1/v1"


@pytest.mark.parametrize("name", AGENTS)
def test_steno_proxy_starts_in_a_shell_that_has_an_agents_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in AGENTS[name].setup(ODD).variables.items():
        monkeypatch.setenv(variable, value)
    assert ProxySettings.load({}, None).admin_key is None


def test_opencode_is_told_the_context_where_it_is_known() -> None:
    """Without it, it never compacts."""
    setup = AGENTS["opencode"].setup(replace(ODD, context_tokens=24_000))
    for config in (setup.variables["OPENCODE_CONFIG_CONTENT"], setup.instead["opencode.json"]):
        assert json.loads(config)["provider"]["steno"]["models"][ODD.model]["limit"] == {
            "context": 24_000,
            "output": 6_000,
        }
    assert "limit" not in AGENTS["opencode"].setup(ODD).variables["OPENCODE_CONFIG_CONTENT"]
    words = ["env", "opencode", "t.1", "--agent-key", "k", "--proxy", URL, "--context-tokens", "9000", "--json"]
    found = json.loads(runner.invoke(app, words).stdout)
    assert '"context": 9000' in found["variables"]["OPENCODE_CONFIG_CONTENT"]


def test_claude_code_is_told_the_context_where_it_is_known_and_leaves_room() -> None:
    """Without it, it takes a million for granted. It keeps 33,000 tokens free: told of less, it would compact all the time."""
    name, claude = "CLAUDE_CODE_MAX_CONTEXT_TOKENS", AGENTS["claude-code"]
    assert claude.setup(replace(ODD, context_tokens=131_072)).variables[name] == "131072"
    assert claude.setup(replace(ODD, context_tokens=64_000)).variables[name] == "64000"
    assert name not in claude.setup(replace(ODD, context_tokens=32_768)).variables
    assert name not in claude.setup(ODD).variables


def test_claude_code_has_all_its_tools_in_each_request_and_none_that_only_its_provider_runs() -> None:
    setup = AGENTS["claude-code"].setup(ODD)
    assert setup.variables["ENABLE_TOOL_SEARCH"] == "false"
    assert " --disallowedTools WebSearch --" in setup.command, "what follows must not be taken for one more tool"
    harbor = POINTINGS["claude-code"].agent(Addresses(ODD.urls, ODD.key), "m")["env"]
    shared = setup.variables.keys() & harbor.keys()
    assert {key: harbor[key] for key in shared} == {key: setup.variables[key] for key in shared}
    assert harbor.keys() == shared, "Harbor names the model itself"


def test_opencode_asks_for_no_title() -> None:
    assert " --title steno " in AGENTS["opencode"].setup(ODD).command


def test_json_says_the_same_as_the_shell_lines() -> None:
    words = ["env", "gemini-cli", "t.1", "--agent-key", "k", "--proxy", URL, "--model", "m"]
    plain, machine = runner.invoke(app, words), runner.invoke(app, [*words, "--json"])
    assert (plain.exit_code, machine.exit_code) == (0, 0), plain.output
    setup = AGENTS["gemini-cli"].setup(AgentTarget("t.1", urls(URL, "t.1"), "k", "m"))
    assert plain.stdout == shell(setup)
    found = json.loads(machine.stdout)
    assert (found["variables"], found["command"]) == (setup.variables, setup.command)
    assert (found["files"], found["instead"]) == (setup.files, setup.instead)


@pytest.mark.parametrize(
    ("http_proxy", "url", "hosts"),
    [
        ("http://proxy.example:3128", "http://127.0.0.1:8000", "a,localhost,127.0.0.1,::1"),
        ("http://proxy.example:3128", URL, None),
        ("", "http://127.0.0.1:8000", None),
    ],
)
def test_what_is_started_in_that_shell_asks_no_http_proxy_for_this_machine(
    http_proxy: str, url: str, hosts: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", http_proxy)
    monkeypatch.setenv("NO_PROXY", "a")
    words = ["env", "openai", "t.1", "--agent-key", "k", "--proxy", url]
    printed, machine = runner.invoke(app, words).stdout, json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    seen = dict(line.split("=", 1) for line in bash(printed + "env -0").decode().split("\0") if "=" in line)
    for name in ("no_proxy", "NO_PROXY"):
        assert seen.get(name) == machine["variables"].get(name) == hosts


def test_an_agent_that_is_not_known_and_an_id_that_is_none_are_wrong_usage() -> None:
    unknown = runner.invoke(app, ["env", "emacs", "t", "--agent-key", "k"])
    assert unknown.exit_code == 2 and "claude-code" in unknown.output
    odd = runner.invoke(app, ["env", "codex", "a/b", "--agent-key", "k"])
    assert isinstance(odd.exception, ConfigError) and "trial id: got 'a/b'" in str(odd.exception)

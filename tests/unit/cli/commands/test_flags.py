"""Flags come from settings, and `--print-config` shows what is in effect."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from steno.config.settings import Settings
from steno.contracts.errors import ConfigError
from steno_cli.commands.evaluate import EvaluateSettings
from steno_cli.commands.tasks import CheckSettings
from steno_cli.main import app
from steno_cli.terminal.flags import default_text, settings_command
from steno_proxy.config.settings import ProxySettings
from steno_rollouts.config import RolloutSettings
from steno_trainer.run_config import RunSettings
from steno_worker.config import WorkerSettings

runner = CliRunner()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("STENO_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def printed(*words: str) -> dict[str, Any]:
    done = runner.invoke(app, [*words, "--print-config"] if "--" not in words else list(words))
    assert done.exit_code == 0, done.output
    values: dict[str, Any] = yaml.safe_load(done.stdout)
    return values


@pytest.mark.parametrize(("program", "settings"), [("proxy", ProxySettings), ("worker", WorkerSettings)])
def test_every_setting_has_its_flag_in_the_help(program: str, settings: type[ProxySettings | WorkerSettings]) -> None:
    shown = runner.invoke(app, [program, "--help"]).stdout
    for name in settings.model_fields:
        if name != "engine_args":
            assert "--" + name.replace("_", "-") in shown
    assert "--admin-key-file" in shown or program == "worker"


def test_a_list_of_bounded_numbers_is_shown_as_numbers() -> None:
    shown = runner.invoke(app, ["evaluate", "--help"]).stdout
    assert next(line for line in shown.splitlines() if "--pass-at" in line).split()[2] == "INTEGER"


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        (ProxySettings, {}),
        (WorkerSettings, {}),
        (RunSettings, {"model": "m"}),
        (RolloutSettings, {"tasks": "t", "command": ["true"]}),
        (EvaluateSettings, {"tasks": "t", "command": ["true"]}),
    ],
)
def test_each_default_is_what_its_flag_takes_as_the_help_has_it(
    settings: type[Settings], given: dict[str, Any]
) -> None:
    """`--betas` took nothing at all."""
    ran: list[Settings] = []
    program = typer.Typer()
    program.command()(settings_command(settings, ran.append))
    defaults = settings.load(given, None)
    needed = [
        f"{settings.flag(name)}={value[0] if isinstance(value, list) else value}" for name, value in given.items()
    ]
    for name, field in settings.model_fields.items():
        value, shown = getattr(defaults, name), default_text(field)
        if not shown or name in given or isinstance(value, bool):
            continue
        texts = shown.split(", ") if isinstance(value, list) else [shown]
        done = runner.invoke(program, [*(f"{settings.flag(name)}={text}" for text in texts), *needed])
        assert done.exit_code == 0, (name, done.exception, done.output)
        assert getattr(ran[-1], name) == value


@pytest.mark.parametrize("text", ["0.8,0.9", " 0.8, 0.9", "[0.8, 0.9]"])
def test_the_numbers_of_a_tuple_stand_between_commas_or_in_json(text: str) -> None:
    assert printed("train", "--model", "m", "--betas", text)["betas"] == [0.8, 0.9]
    shown = runner.invoke(app, ["train", "--help"]).stdout
    assert next(line for line in shown.splitlines() if "--betas" in line).split()[2] == "NUMBER,NUMBER"


@pytest.mark.parametrize(
    ("text", "says"), [("0.9", "Field required"), ("a,b", "valid number"), ("[0.9", "not valid JSON")]
)
def test_a_tuple_that_is_none_is_refused_by_its_flag(text: str, says: str) -> None:
    refused = runner.invoke(app, ["train", "--model", "m", "--betas", text, "--print-config"])
    assert isinstance(refused.exception, ConfigError)
    assert refused.exception.message.startswith("--betas") and says in refused.exception.message


def test_flags_become_settings_and_secrets_are_masked(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("hunter2")
    values = printed("proxy", "--port", "81", "--admin-key-file", str(secret), "--redis-url", "redis://u:hunter2@h/0")
    assert values["port"] == 81
    assert "hunter2" not in str(values) and values["admin_key"]


def test_a_list_is_repeated_and_what_follows_two_dashes_goes_to_the_engine() -> None:
    words = ["--proxy", "ws://a:1", "--proxy", "ws://b:1", "--print-config", "--", "--max-num-seqs", "4"]
    values = printed("worker", *words)
    assert values["proxy"] == ["ws://a:1", "ws://b:1"]
    assert values["engine_args"] == ["--max-num-seqs", "4"]


def test_what_is_left_to_the_engine_is_printed_as_left_to_it() -> None:
    """A 64 in the printed file would bind vLLM, which runs as many as its max_num_seqs says."""
    assert printed("worker", "--engine", "vllm", "--model", "m")["max_streams"] is None
    assert printed("worker", "--max-streams", "64")["max_streams"] == 64


def test_print_config_says_where_values_come_from_and_is_a_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STENO_PORT", "82")
    done = runner.invoke(app, ["proxy", "--keepalive-s", "5", "--print-config"])
    lines = done.stdout.splitlines()
    assert "port: 82  # STENO_PORT" in lines
    assert "keepalive_s: 5.0  # --keepalive-s" in lines
    assert 'host: "127.0.0.1"  # default' in lines
    file = tmp_path / "steno.yaml"
    file.write_text(done.stdout)
    monkeypatch.delenv("STENO_PORT")
    assert printed("proxy", "--config", str(file))["port"] == 82


@pytest.mark.parametrize("words", [["train", "--model", "m"], ["rollout", "--tasks", "t", "--", "true"]])
def test_what_every_program_reads_in_the_environment_is_named_as_the_source(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STENO_PROXY", "http://elsewhere:9")
    monkeypatch.setenv("STENO_ADMIN_KEY", "abc")
    lines = runner.invoke(app, [words[0], "--print-config", *words[1:]]).stdout.splitlines()
    assert 'proxy: "http://elsewhere:9"  # STENO_PROXY' in lines
    assert 'key: "**********"  # STENO_ADMIN_KEY' in lines
    shown = runner.invoke(app, [words[0], "--print-config", "--proxy", "http://h", *words[1:]]).stdout
    assert 'proxy: "http://h"  # --proxy' in shown.splitlines()
    assert 'proxy: ["http://elsewhere:9"]  # STENO_PROXY' in runner.invoke(app, ["worker", "--print-config"]).stdout
    monkeypatch.delenv("STENO_PROXY")
    lines = runner.invoke(app, [words[0], "--print-config", *words[1:]]).stdout.splitlines()
    assert 'proxy: "http://127.0.0.1:8000"  # default' in lines


@pytest.mark.parametrize(
    ("program", "settings", "words"),
    [
        (["rollout"], RolloutSettings, ["--tasks", "t", "--", "true"]),
        (["rollout"], RolloutSettings, ["--harbor", "h", "--agent", "codex"]),
        (["rollout"], RolloutSettings, ["--verifiers", "v", "--confine", "off"]),
        (["evaluate"], EvaluateSettings, ["--tasks", "t", "--model", "m", "--", "true"]),
        (["tasks", "check"], CheckSettings, ["--tasks", "t", "--", "true"]),
    ],
)
def test_what_print_config_prints_means_the_same_as_a_config_file(
    program: list[str], settings: type[RolloutSettings], words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "printed.yaml"
    done = runner.invoke(app, [*program, "--print-config", *words])
    file.write_text(done.stdout)
    found = settings.load({}, file)
    assert found.resolved() == yaml.safe_load(done.stdout)
    assert found.keeps == ("all" if found.harbor else "failed")
    assert not found.is_given("proxy") and not found.is_given("filter")


def test_numbers_of_free_dictionaries_are_printed_as_yaml_has_them() -> None:
    sampling = {"a": 1e-05, "b": -1.5e-05, "c": 1e16, "d": 0.5, "e": 3, "f": 'the "1e-05"', "g": "1e-05"}
    words = ["--tasks", "t", "--sampling", json.dumps(sampling), "--print-config", "--", "true"]
    assert printed("rollout", *words)["sampling"] == sampling


def test_a_bad_value_names_the_flag_and_runs_nothing() -> None:
    ran: list[ProxySettings] = []
    program = typer.Typer()
    program.command()(settings_command(ProxySettings, ran.append))
    done = runner.invoke(program, ["--port", "many"])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.message.startswith("--port: Input should be a valid integer")
    assert ran == []


def test_the_settings_reach_what_is_run() -> None:
    ran: list[ProxySettings] = []
    program = typer.Typer()
    program.command()(settings_command(ProxySettings, ran.append))
    assert runner.invoke(program, ["--port", "83"]).exit_code == 0
    assert [settings.port for settings in ran] == [83]

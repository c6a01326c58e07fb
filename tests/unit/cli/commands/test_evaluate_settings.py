"""Settings of `steno evaluate` that are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from steno.contracts.errors import ConfigError
from steno_cli.commands.evaluate import EvaluateSettings
from steno_cli.main import app


def test_a_k_of_pass_at_k_that_is_none_is_refused_by_name() -> None:
    for k in ("0", "-1"):
        with pytest.raises(ConfigError, match=r"--pass-at at pass_at\.1: Input should be greater than or equal to 1"):
            EvaluateSettings.load({"tasks": "t", "command": ["a"], "pass_at": ["2", k]}, None)


def test_words_for_the_engine_that_no_shell_would_take_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match='engine_args: got "--chat-template \'x": no closing quotation'):
        EvaluateSettings.load({"tasks": "t", "command": ["a"], "model": "m", "engine_args": "--chat-template 'x"}, None)


def test_only_what_can_be_given_has_a_flag(tmp_path: Path) -> None:
    """`--spare-trials 1` was always refused: trials of an evaluation are all counted."""
    shown = CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout
    assert "--group-size" in shown and "--spare-trials" not in shown
    file = tmp_path / "rollout.yaml"  # one that `steno rollout` shares
    file.write_text("tasks: t\ncommand: [a]\nspare_trials: 0\n")
    assert EvaluateSettings.load({}, file).spare_trials == 0
    file.write_text("tasks: t\ncommand: [a]\nspare_trials: 1\n")
    with pytest.raises(ConfigError, match="spare_trials can't be given with purpose 'eval'"):
        EvaluateSettings.load({}, file)

"""Settings of `steno evaluate` that are refused before anything is started."""

from __future__ import annotations

import pytest

from steno.contracts.errors import ConfigError
from steno_cli.commands.evaluate import EvaluateSettings


def test_a_k_of_pass_at_k_that_is_none_is_refused_by_name() -> None:
    for k in ("0", "-1"):
        with pytest.raises(ConfigError, match=r"--pass-at at pass_at\.1: Input should be greater than or equal to 1"):
            EvaluateSettings.load({"tasks": "t", "command": ["a"], "pass_at": ["2", k]}, None)


def test_words_for_the_engine_that_no_shell_would_take_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match='engine_args: got "--chat-template \'x": no closing quotation'):
        EvaluateSettings.load({"tasks": "t", "command": ["a"], "model": "m", "engine_args": "--chat-template 'x"}, None)

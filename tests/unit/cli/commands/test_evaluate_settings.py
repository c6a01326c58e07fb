"""Settings of `steno evaluate` that are refused before anything is started."""

from __future__ import annotations

import pytest

from steno.contracts.errors import ConfigError
from steno_cli.commands.evaluate import EvaluateSettings


def test_words_for_the_engine_that_no_shell_would_take_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match='engine_args: got "--chat-template \'x": no closing quotation'):
        EvaluateSettings.load({"tasks": "t", "command": ["a"], "model": "m", "engine_args": "--chat-template 'x"}, None)

"""A trial's words and variables."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.errors import ConfigError
from steno.contracts.records import Session
from steno.contracts.rest import Trial
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.command import MAX_VARIABLE_BYTES, check_command, environment, fill
from tests.support.sources import ROOT

URLS = {"openai": "http://p/t/v1", "anthropic": "http://p/t", "gemini": "http://p/t"}


def variables(task: Task, inherited: dict[str, str] | None = None, key: str | None = "trial-key") -> dict[str, str]:
    session = Session(trial_id="g.0", group_id="g", created_at=0, updated_at=0)
    trial = Trial(session=session, urls=URLS, api_key=key)
    return environment(inherited or {}, trial, task, Path("/w"), Path("/f.json"))


def filled(words: list[str], **fields: Any) -> list[str]:
    task = Task("t", fields)
    check_command(words, [task])
    return fill(words, task, variables(task))


def test_fields_stand_in_words_and_braces_that_mean_something_else_stay() -> None:
    assert filled(["a {x}", "{y.z}", "{y}"], x="q", y={"z": 1}) == ["a q", "1", '{"z": 1}']
    assert filled(["${x}", "{{x}}", '{"json": 1}', "{}", "{1}"]) == ["${x}", "{x}", '{"json": 1}', "{}", "{1}"]
    assert filled(["--base={OPENAI_BASE_URL}", "{STENO_TRIAL_ID}"]) == ["--base=http://p/t/v1", "g.0"]
    assert filled(["{x}"], x="{y}") == ["{y}"]  # what a task says is never read as a template


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the command of a trial"),
        (["{nope} {x} {y.z}"], "{nope}, {y.z}: task 't' has no such field; it has x, y"),
        (["{OPENAI_API_KEY}"], "would show the key to every process: use the variable $OPENAI_API_KEY"),
    ],
)
def test_what_can_not_be_filled_is_said_before_anything_runs(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        filled(words, x="1", y={"a": None})


def test_a_trial_inherits_no_providers_key_and_none_of_stenos_settings() -> None:
    inherited = {
        "PATH": "/bin",
        "STENO_ADMIN_KEY": "k",
        "ANTHROPIC_AUTH_TOKEN": "a",
        "OPENAI_API_KEY": "o",
        "OPENAI_API_BASE": "b",
    }
    found = variables(Task("t", {"task_id": "t", "my-field": [1]}), inherited)
    assert found == {
        "PATH": "/bin", "OPENAI_BASE_URL": "http://p/t/v1", "OPENAI_API_KEY": "trial-key", "ANTHROPIC_BASE_URL": "http://p/t",
        "ANTHROPIC_API_KEY": "trial-key", "GOOGLE_GEMINI_BASE_URL": "http://p/t", "GEMINI_API_KEY": "trial-key",
        "STENO_TRIAL_ID": "g.0", "STENO_GROUP_ID": "g", "STENO_WORKDIR": "/w", "STENO_TASK_FILE": "/f.json",
        "STENO_TASK_TASK_ID": "t", "STENO_TASK_MY_FIELD": "[1]",
    }  # fmt: skip
    assert variables(Task("t", {}), key=None)["OPENAI_API_KEY"] == "none"


def test_the_names_of_an_agents_parts_are_set_as_the_page_on_training_says() -> None:
    page = (ROOT / "docs" / "training.md").read_text().partition("### Only some of the calls")[2]
    line = next(line for line in page.splitlines() if line.startswith("steno rollout "))
    task = Task("t", {})
    given = variables(task, {"PATH": "/usr/bin:/bin", "CLAUDE_CODE_SUBAGENT_MODEL": "main"})
    *command, agent = fill(shlex.split(line.partition(" -- ")[2]), task, given)
    assert agent == "$PWD/run-agent.sh", "only the first word of a command is looked for where it was said"
    seen = subprocess.run([*command, "env"], env=given, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"ANTHROPIC_MODEL=main", "CLAUDE_CODE_SUBAGENT_MODEL=explorer", "ANTHROPIC_BASE_URL=http://p/t"} <= {*seen}


def test_a_field_too_long_for_a_variable_is_in_the_file_only() -> None:
    assert "STENO_TASK_PATCH" not in variables(Task("t", {"patch": "x" * (MAX_VARIABLE_BYTES + 1)}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"a-b": 1, "a_b": 2}, "'a_b' and 'a-b' would both be STENO_TASK_A_B"),
        ({"file": 1}, "'file' and 'the task file' would both be STENO_TASK_FILE"),
        ({"x": "a\0b"}, "'x' contains a NUL byte"),
    ],
)
def test_fields_that_make_no_variable_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_command(["true"], [Task("t", fields)])


def test_a_word_that_would_have_a_nul_is_named_before_anything_runs() -> None:
    """Inside a variable's JSON it is six letters."""
    fields = {"metadata": {"x": "a\0b", "y": "q"}}
    assert filled(["{metadata.y}", "{metadata}"], **fields) == ["q", r'{"x": "a\u0000b", "y": "q"}']
    with pytest.raises(ConfigError, match=r"task 't': 'metadata\.x' contains a NUL byte"):
        filled(["{metadata.y}", "-{metadata.x}"], **fields)

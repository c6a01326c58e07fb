"""mini-swe-agent from PyPI, unmodified, through real proxy, worker and engine: ten tool calls, one exact conversation.

`STENO_AGENTS_VENV` names the virtual environment it is installed in (made by `.ci/run`).
"""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agents.mini_script import COMMANDS
from tests.support.stack import Stack, running

pytestmark = pytest.mark.agents

SCRIPT = Path(__file__).with_name("mini_script.py")


def run_mini(
    stack: Stack, trial_id: str, folder: Path, task: str = "Fix the bug in src/calc.py"
) -> subprocess.CompletedProcess[str]:
    mini = Path(os.environ["STENO_AGENTS_VENV"]) / "bin/mini"
    home = folder / "home"
    home.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OPENAI_API_KEY": "none",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "TERM": "dumb",
    }
    return subprocess.run(
        [
            str(mini),
            "-y",
            "--exit-immediately",
            "-l",
            "0",
            "-m",
            "openai/policy",
            "--model-class",
            "litellm",
            "-c",
            "mini.yaml",
            "-c",
            f"model.model_kwargs.api_base={stack.base_url(trial_id)}",
            "-t",
            task,
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


def prompt_ids(turns: list[dict[str, Any]], turn: dict[str, Any]) -> list[int]:
    """The whole prompt of a turn, put together from the record."""
    by_id = {each["turn_id"]: each for each in turns}
    parent = by_id.get(turn["parent_id"])
    return ([] if parent is None else prompt_ids(turns, parent) + parent["completion_ids"]) + turn["new_prompt_ids"]


def test_an_unmodified_mini_swe_agent_finishes_ten_tool_calls_and_every_token_is_on_record(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with running(
        tmp_path / "logs", ["--engine", "scripted", "--script", f"{SCRIPT}:reply", "--context-tokens", "100000"]
    ) as stack:
        done = run_mini(stack, "mini-1", work)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + stack.logs()
        assert (work / "src/calc.py").read_text() == "def add(a, b):\n    return a + b\n"
        session = stack.get("/sessions/mini-1")
        turns = stack.turns("mini-1")
    assert session["counts"]["turns"] == len(turns) == len(COMMANDS)
    assert "synthetic" in session["marks"]
    assert [turn["fork_reason"] for turn in turns] == [None] * len(turns)
    assert [turn["finish_reason"] for turn in turns] == ["tool_calls"] * len(turns)
    for before, turn in itertools.pairwise(turns):
        assert turn["parent_id"] == before["turn_id"]
        whole = prompt_ids(turns, before) + before["completion_ids"]
        assert prompt_ids(turns, turn)[: len(whole)] == whole  # I2
        assert turn["prompt_tokens"] == len(prompt_ids(turns, turn))


@pytest.mark.parametrize(("word", "tokens", "code"), [("REFUSED", 0, "no_worker"), ("CUT", 12, "engine_failed")])
def test_a_request_that_failed_is_asked_again_and_only_the_good_answer_is_trained(
    tmp_path: Path, word: str, tokens: int, code: str
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    worker = ["--engine", "scripted", "--script", f"{SCRIPT}:reply", "--context-tokens", "100000"]
    with running(tmp_path / "logs", worker) as stack:
        done = run_mini(stack, "again", work, f"Fix the bug in src/calc.py {word}")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + stack.logs()
        turns = stack.turns("again")
    assert (work / "src/calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    [failed] = [turn for turn in turns if turn["partial"]]
    assert failed["error"].startswith(code) and len(failed["completion_ids"]) == tokens
    assert failed["delivered"] == 0, "an answer in one piece is delivered whole or not at all"
    main = [turn for turn in turns if turn is not failed]
    assert len(main) == len(COMMANDS)
    assert [turn["parent_id"] for turn in main[1:]] == [turn["turn_id"] for turn in main[:-1]]
    again = main[3]
    assert (again["retry_of"], failed["superseded_by"]) == (failed["turn_id"], again["turn_id"])

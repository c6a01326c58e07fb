"""What is shown, and what is written down, of trials that end."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from proxy.contracts.errors import ConfigError
from trainer_bridge.rollouts.outcome import TrialResult
from trainer_bridge.rollouts.progress import MAX_SHOWN_FAILURES, Progress
from trainer_bridge.rollouts.results import ResultsFile, ended_trials


def result(trial: int, reward: float | None = None, reason: str = "timeout", **more: object) -> TrialResult:
    fields = {"attempts": 1, "completion_tokens": 50, **more}
    return TrialResult("r", "g", f"g.{trial}", "t", "epoch-0", "aborted", reason, reward, **fields)  # type: ignore[arg-type]


def test_a_line_says_how_far_how_well_and_what_failed() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out), trials=6, clock=lambda: 0.0)
    for trial in range(4):
        progress.trial_started(f"g.{trial}")
    progress.trial_ended(result(0, 1.0, "completed"))
    progress.trial_ended(result(1, 0.5, "completed"))
    progress.trial_ended(result(2, detail="ended after 3 s", folder="/kept"))
    progress.trial_ended(result(5, 0.0, "completed", earlier=True, attempts=0, completion_tokens=999))
    progress.held_back(True)
    assert progress.stats.line(75.0) == (
        "4/6 trials, 1 of them earlier, 1 running, 0 groups, mean reward 0.500, 1 failed (timeout 1), 2 tokens/s, 1:15, "
        "held back: the trainer has all it can use in time"
    )
    assert out.getvalue() == "g.2: timeout ended after 3 s (see /kept)\n"


def test_failures_are_shown_up_to_a_bound_and_cancelled_trials_not() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out), clock=lambda: 0.0)
    for trial in range(MAX_SHOWN_FAILURES + 5):
        progress.trial_ended(result(trial))
        progress.trial_ended(result(trial, reason="cancelled"))
    lines = out.getvalue().splitlines()
    assert len(lines) == MAX_SHOWN_FAILURES + 1 and lines[-1] == "further failures are counted only"
    assert progress.stats.reasons == {"timeout": 25, "cancelled": 25}


def test_a_results_file_has_each_trial_once_over_several_starts(tmp_path: Path) -> None:
    path = tmp_path / "out" / "results.jsonl"
    with ResultsFile(path, ended_trials(path)) as file:
        file.trial_ended(result(0, 1.0))
    with path.open("a") as torn:
        torn.write('{"trial_id": "g.')
    known = ended_trials(path)
    assert known == {"g.0": result(0, 1.0)}
    with ResultsFile(path, known) as file:
        file.trial_ended(result(0, 1.0, earlier=True))
        file.trial_ended(result(1))
    assert [json.loads(row)["trial_id"] for row in path.read_text().splitlines()] == ["g.0", "g.1"]
    assert set(ended_trials(path)) == {"g.0", "g.1"}


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("hello\nthere\n")
    with pytest.raises(ConfigError, match="line 1: no result of a trial"):
        ended_trials(path)
    with pytest.raises(ConfigError, match="Is a directory"):
        ResultsFile(tmp_path, frozenset())

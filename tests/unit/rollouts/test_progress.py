"""What is shown, and what is written down, of trials that end."""

from __future__ import annotations

import io
import json
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from steno.contracts.errors import ConfigError
from steno_rollouts.outcome import CommandOutcome, EndReason, TrialResult
from steno_rollouts.reporting.progress import MAX_SHOWN_FAILURES, ProgressPrinter
from steno_rollouts.reporting.results import ResultsFile, ended_trials
from steno_rollouts.trials.executor import Exit
from steno_rollouts.trials.runner import FailedTrial


def result(trial: int, reward: float | None = None, reason: str = "timeout", **more: object) -> TrialResult:
    fields = {"attempts": 1, "completion_tokens": 50, **more}
    return TrialResult("r", "g", f"g.{trial}", "t", "epoch-0", "aborted", reason, reward, **fields)  # type: ignore[arg-type]


def test_spare_trials_are_counted_apart_and_are_no_failures() -> None:
    out = io.StringIO()
    progress = ProgressPrinter(Console(file=out), trials=2, groups=1, clock=lambda: 0.0)
    progress.trial_started("g.0")
    progress.trial_ended(result(0, reason="spare"))
    progress.trial_ended(result(1, reason="spare", attempts=0))
    assert progress.line() == (
        "2/2 trials, 0 running, 1/1 groups, mean reward -, 0 failed, 100,000 tokens/s, 0:00, 2 spare"
    )
    assert out.getvalue() == ""


def test_a_line_says_how_far_how_well_and_what_failed() -> None:
    out = io.StringIO()
    now = 0.0
    progress = ProgressPrinter(Console(file=out), trials=6, groups=2, clock=lambda: now)
    for trial in range(4):
        progress.trial_started(f"g.{trial}")
    progress.trial_ended(result(0, 1.0, "completed"))
    progress.trial_ended(result(1, 0.5, "completed"))
    progress.trial_ended(result(2, detail="ended after 3 s", folder="/kept"))
    progress.trial_ended(result(5, 0.0, "completed", earlier=True, attempts=0, completion_tokens=999))
    progress.held_back("no trainer has been seen")
    now = 75.0
    progress.held_back("its trainer was heard of")
    assert progress.line() == (
        "4/6 trials, 1 of them earlier, 1 running, 1/2 groups, mean reward 0.500, 1 failed (timeout 1), 2 tokens/s, 1:15, "
        "held back for 75 s: its trainer was heard of"
    )
    assert out.getvalue() == "g.2: timeout ended after 3 s (see /kept)\nheld back: no trainer has been seen\n"
    progress.held_back(None)
    assert "held back" not in progress.line()
    failed = FailedTrial(
        SimpleNamespace(trial=SimpleNamespace(session=SimpleNamespace(trial_id="g.3"))),  # type: ignore[arg-type]
        CommandOutcome(EndReason.EXIT_CODE, detail="exit code 127"), 0.0, 1, Exit(127), Path("/kept"),
    )  # fmt: skip
    progress.trial_failed(failed)
    assert "0 running" in progress.line() and "1 failed before their first turn, still open" in progress.line()
    progress.trial_ended(result(3, reason="exit_code"))
    assert "5/6 trials" in progress.line() and "0 running" in progress.line() and "still open" not in progress.line()
    assert out.getvalue().splitlines()[2:] == ["g.3: failed before its first turn: exit code 127 (see /kept)"]


def test_trials_that_wait_for_their_groups_do_not_run_and_have_not_failed() -> None:
    out = io.StringIO()
    progress = ProgressPrinter(Console(file=out), clock=lambda: 0.0)
    for trial in range(2):
        progress.trial_started(f"g.{trial}")
    progress.trial_waits(result(0, awaits_reward=True))
    progress.trial_waits(result(2, awaits_reward=True, earlier=True, attempts=0))
    assert "0 trials, 1 running" in progress.line() and "0 failed" in progress.line()
    assert progress.line().endswith("1 wait to be scored with their groups"), "those that these rollouts have run"
    for ended in (result(0, 1.0, "completed"), result(1, 0.0, "completed"), result(2, 0.5, "completed", earlier=True)):
        progress.trial_ended(ended)
    assert "3 trials, 1 of them earlier, 0 running" in progress.line() and "wait" not in progress.line()
    assert out.getvalue() == ""


def test_failures_are_shown_up_to_a_bound_and_cancelled_trials_not() -> None:
    out = io.StringIO()
    progress = ProgressPrinter(Console(file=out), clock=lambda: 0.0)
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


def test_a_whole_last_line_without_its_newline_stays_in_a_results_file(tmp_path: Path) -> None:
    """As an editor leaves it, or a kill exactly before the newline."""
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(json.dumps(result(trial, 1.0).row()) for trial in range(2)))
    for start in range(2):
        known = ended_trials(path)
        with ResultsFile(path, known) as file:
            for earlier in known.values():
                file.trial_ended(earlier)
            file.trial_ended(result(2 + start))
    assert [json.loads(row)["trial_id"] for row in path.read_text().splitlines()] == ["g.0", "g.1", "g.2", "g.3"]


def test_a_file_of_something_else_is_refused_also_without_its_last_newline(tmp_path: Path) -> None:
    """Else it is once results have been appended to it."""
    path = tmp_path / "results.jsonl"
    path.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"results: .*, line 1: not the result of a trial"):
        ended_trials(path)


def test_lines_that_do_not_fit_are_written_once_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultsFile(path, {}) as file:
        file.trial_ended(result(0, 1.0))
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1])
        )  # as a full disk: it takes a part
        try:
            file.trial_ended(result(1))
            assert set(ended_trials(path)) == {"g.0"} and path.read_bytes().endswith(b"\n")
            with (
                pytest.raises(ConfigError, match="1 trials are not in it; they are on record"),
                ResultsFile(path, {}) as other,
            ):
                other.trial_ended(result(3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        file.trial_ended(result(2))
    assert list(ended_trials(path)) == ["g.0", "g.1", "g.2"]


@pytest.mark.parametrize("text", ["a\u2028b\u2029c\x85d\x0be\x1cf\r\ng", "\ud800", "café", "\x00"])
def test_whatever_a_reward_function_says_is_a_line_that_can_be_read_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, {}) as file:
        file.trial_ended(result(0, detail=text))
        file.trial_ended(result(1))
    assert ended_trials(path) == {"g.0": result(0, detail=text), "g.1": result(1)}


def test_lines_as_an_older_release_wrote_them_are_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    rows = [result(trial, detail="a\u2028b\x85é") for trial in range(2)]
    whole = "".join(json.dumps(row.row(), ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(whole + whole[: whole.index("é".encode()) + 1])  # a kill cut off the last one, in a character
    assert ended_trials(path) == {"g.0": rows[0], "g.1": rows[1]}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (b"hello\nthere\n", "line 1: not the result of a trial"),
        (b"{}\nthere", "line 1: not the result of a trial"),
        (b"[" * 100_000 + b"\n", "line 1: not the result of a trial"),
        ("naïve\n".encode("latin-1"), "line 1: not UTF-8"),
        ("hello\n".encode("utf-16"), "line 1: not UTF-8"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, written: bytes, said: str) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(written)
    with pytest.raises(ConfigError, match=f"results: {path}, {said}"):
        ended_trials(path)


def test_a_folder_is_no_results_file(tmp_path: Path) -> None:
    for read in (ended_trials, lambda path: ResultsFile(path, frozenset())):
        with pytest.raises(ConfigError, match=f"results: {tmp_path}: Is a directory"):
            read(tmp_path)
    assert ended_trials(None) == ended_trials(tmp_path / "none") == {}

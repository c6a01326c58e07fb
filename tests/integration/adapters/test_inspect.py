"""`inspect eval --model steno/…`, as its users run it: Inspect in an environment of its own, a proxy and a worker that run."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from steno import Session
from steno.client.client import Client
from tests.integration.rollouts.conftest import ADMIN, SCRIPT, until_served
from tests.support.programs.processes import until
from tests.support.programs.stack import ROOT, Stack, running
from tests.support.programs.variables import without_settings

pytestmark = pytest.mark.agents

PINS = ROOT / "requirements" / "inspect.txt"


CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steno"
NAME = f"inspect-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]}"
VENV = Path(os.environ.get("STENO_TEST_INSPECT_VENV") or CACHE / NAME)
"""As .ci/run makes it."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    proxy = ["--admin-key", ADMIN, "--worker-key", "worker-key"]
    with without_settings(), running(tmp_path_factory.mktemp("stack"), None, proxy=proxy) as found:
        found.start_worker("--engine", "scripted", "--script", f"{SCRIPT}:reply", "--key", "worker-key")
        until_served(found)
        yield found


def installed(folder: Path) -> str:
    """A path on which Inspect finds the checkout, with its entry points, as if it were installed."""
    info = folder / "steno-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["inspect_ai"]
    lines = "".join(f"{name} = {where}\n" for name, where in points.items())
    (info / "entry_points.txt").write_text(f"[inspect_ai]\n{lines}")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steno\nVersion: 0.1.0\n")
    return os.pathsep.join(map(str, (folder, ROOT, ROOT / "adapters")))


def evaluation(stack: Stack, folder: Path, task: str, *options: str) -> subprocess.Popen[str]:
    inspect = VENV / "bin" / "inspect"
    file = Path(__file__).with_name("inspect_task.py")
    words = [str(inspect), "eval", f"{file}@{task}", "--model", "steno/policy", "--display", "plain"]
    return subprocess.Popen(
        [*words, "--log-dir", str(folder / "logs"), *options],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": installed(folder / "path"), "STENO_PROXY": stack.url, "STENO_ADMIN_KEY": ADMIN},
    )  # fmt: skip


def evaluate(stack: Stack, folder: Path, *options: str, code: int = 0) -> str:
    with evaluation(stack, folder, "notes", *options) as inspect:
        try:
            said, _ = inspect.communicate(timeout=240)
        finally:
            inspect.kill()
    assert inspect.returncode == code, said
    return said


def test_samples_are_trials_epochs_are_groups_and_scores_are_rewards(stack: Stack, tmp_path: Path) -> None:
    options = ("--epochs", "2", "--no-fail-on-error", "-M", "run=notes", "-M", "purpose=train", "-M", "score=includes")
    said = evaluate(stack, tmp_path, *options)
    with Client(stack.url, ADMIN) as client:
        found = [session for session in client.sessions() if session.run_id == "notes"]
        ends: dict[str, list[tuple[str, float | None, str]]] = {}
        for session in found:
            assert session.group_id is not None
            group = client.group(session.group_id)
            assert (group.size, group.purpose) == (2, "train")
            end = (session.status, session.reward, session.end_reason or "")
            ends.setdefault(str(group.task["task_id"]), []).append(end)
            turns = list(client.turns(session.trial_id))
            assert [turn.fork_reason for turn in turns] == [None] * len(turns), "one conversation, continuous"
            assert len(turns) == (1 if group.task["task_id"] == "burned" else 3)
        assert ends["found"] == [("completed", 1.0, "completed")] * 2, said
        assert ends["missed"] == [("completed", 0.0, "completed")] * 2
        assert (
            ends["burned"]
            == [("aborted", None, "sample_error: RuntimeError('notes/none.txt: the note is burned')")] * 2
        )
        assert {session.metrics.get("match") for session in found if session.reward} == {1.0}
        assert all(
            sample.completions for session in found if session.reward for sample in client.samples(session.trial_id)
        )
    assert len({session.group_id for session in found}) == 3


def test_a_score_that_was_not_chosen_is_no_reward_and_evaluations_are_not_trained(stack: Stack, tmp_path: Path) -> None:
    evaluate(stack, tmp_path, "--sample-id", "found", "-M", "run=undecided")
    with Client(stack.url, ADMIN) as client:
        (session,) = [each for each in client.sessions() if each.run_id == "undecided"]
        assert (session.status, session.reward) == ("completed", None)
        assert session.end_reason == "no_reward: no score chosen (-M score=NAME); there are includes, match"
        assert session.group_id is not None and client.group(session.group_id).purpose == "eval"
    said = evaluate(stack, tmp_path / "again", "--sample-id", "found", "-M", "purpose=tain", code=1)
    assert "purpose: got 'tain', must be eval or train" in said


def test_an_eval_that_an_error_ends_leaves_no_trial_open(stack: Stack, tmp_path: Path) -> None:
    """Inspect begins no more samples then, and says no end of the task: a trainer would wait for the others."""
    said = evaluate(stack, tmp_path, "--sample-id", "burned", "--epochs", "4", "--max-samples", "1", "-M", "run=failed")
    with Client(stack.url, ADMIN) as client:
        found = [each for each in client.sessions() if each.run_id == "failed"]
        assert [each.status for each in found] == ["aborted"] * 4, said
        assert "not_played" in {each.end_reason for each in found}, "not each of them was played"


def test_an_eval_that_is_stopped_leaves_no_trial_open(stack: Stack, tmp_path: Path) -> None:
    """By Ctrl-C: Inspect cancels its samples, and what it calls at the end."""
    with (
        Client(stack.url, ADMIN) as client,
        evaluation(stack, tmp_path, "endless", "--epochs", "4", "--max-samples", "2", "-M", "run=stopped") as inspect,
    ):

        def trials() -> list[Session]:
            return [each for each in client.sessions() if each.run_id == "stopped"]

        try:
            until(lambda: sum(each.counts.turns for each in trials()) == 2, "two samples wait")
            inspect.send_signal(signal.SIGINT)
            said, _ = inspect.communicate(timeout=240)
        finally:
            inspect.kill()
        assert sorted((each.status, each.counts.turns) for each in trials()) == [
            ("aborted", n) for n in (0, 0, 1, 1)
        ], said

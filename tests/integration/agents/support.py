"""What the tests of agents' own programs have in common: a scripted stack, a place to work, a run without a human, and how the
record is read."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from steno.contracts.records import OPEN
from tests.support.programs.stack import Stack, running

Turn = dict[str, Any]
TASK_S = 300
"""Seconds that an agent may take for a task, on a machine that does other things as well."""
READS_S = 6.0
"""For an agent to have on its disk what is on record of an answer. The answers in which it is killed are held up for longer."""

NOON = f"Etc/GMT{time.gmtime().tm_hour - 12:+d}"
"""A time zone where it is about noon: agents write the date into their prompts, and at midnight begin a new branch."""


@contextlib.contextmanager
def scripted(folder: Path, script: Path, context_tokens: int = 200_000) -> Iterator[Stack]:
    """A proxy and a worker whose engine says what `reply` in this file says."""
    worker = ["--engine", "scripted", "--script", f"{script}:reply", "--context-tokens", str(context_tokens)]
    with running(folder, worker) as stack:
        yield stack


def npm_programs() -> Path:
    return Path(os.environ["STENO_AGENTS_NPM"]) / "node_modules/.bin"


def places(folder: Path, *, git: bool = False, goes_on: bool = False) -> tuple[Path, Path]:
    """`folder/work` and `folder/home`, new unless the agent goes on there. git: the first is a repository."""
    work, home = folder / "work", folder / "home"
    work.mkdir(exist_ok=goes_on)
    home.mkdir(exist_ok=goes_on)
    if git:
        subprocess.run(["git", "init", "-q", str(work)], check=True)
    return work, home


def run(
    command: str | Sequence[str], work: Path, home: Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """An agent, to its end, in an environment with nothing but this. command: words, or a line of shell."""
    words, environment = _prepared(command, home, variables)
    return subprocess.run(
        words, cwd=work, env=environment, capture_output=True, text=True, timeout=TASK_S, stdin=subprocess.DEVNULL
    )


def run_and_kill(
    command: str | Sequence[str], work: Path, home: Path, variables: Mapping[str, str], due: Callable[[], bool]
) -> None:
    """Run an agent as `run` does, and kill it with all that it has started, READS_S after `due` is true. Raises: AssertionError:
    it ended before `due` was true."""
    words, environment = _prepared(command, home, variables)
    child = subprocess.Popen(
        words, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + TASK_S
    try:
        while not due():
            assert child.poll() is None, f"it ended by itself: {child.returncode}"
            assert time.monotonic() < until, "it was never time to kill it"
            time.sleep(0.05)
        time.sleep(READS_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def is_answering(stack: Stack, trial_id: str, thought: str) -> bool:
    """Whether the turn that thought this is on record and not over. Name one that is held up: any other is so for a moment."""
    with contextlib.suppress(httpx.HTTPError, KeyError):
        return any(
            turn["finish_reason"] == OPEN and turn["reply"].get("reasoning_content") == thought
            for turn in stack.turns(trial_id)
        )
    return False


def _prepared(
    command: str | Sequence[str], home: Path, variables: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    words = ["bash", "-c", command] if isinstance(command, str) else list(command)
    return words, {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "TZ": NOON, **variables}


def output(done: subprocess.CompletedProcess[str], stack: Stack | None = None) -> str:
    """For a failed test: the ends of what it and the product printed."""
    return done.stdout[-3000:] + done.stderr[-3000:] + (stack.logs() if stack is not None else "")


def errors_of(stack: Stack, trial_id: str) -> str:
    """For a failed test: how this trial's turns failed; of a fork that was asked something else, both texts."""
    return "\n".join(f"{turn['turn_id']}: {turn['error']}" for turn in stack.turns(trial_id) if turn.get("error"))


def is_fixed(work: Path) -> bool:
    """Whether the task is done that most of these tests set."""
    return (work / "src/calc.py").read_text() == "def add(a, b):\n    return a + b\n"


def prompt_ids(turns: list[Turn], turn: Turn) -> list[int]:
    """The whole prompt of a turn, put together from the record."""
    by_id = {each["turn_id"]: each for each in turns}
    parent = by_id.get(turn["parent_id"])
    return ([] if parent is None else prompt_ids(turns, parent) + parent["completion_ids"]) + turn["new_prompt_ids"]


def fork(stack: Stack, origin: str, turn: Turn, trial_id: str) -> None:
    """End a trial, and register one that begins with it up to this turn."""
    ended = httpx.post(f"{stack.url}/sessions/{origin}/complete", json={"reward": 1.0}, timeout=60)
    assert ended.status_code == 200, ended.text
    spec = {"fork_of": {"trial_id": origin, "turn_id": turn["turn_id"]}}
    made = httpx.post(f"{stack.url}/sessions/{trial_id}", json=spec, timeout=60)
    assert made.status_code == 200, made.text


def check_forked(origin: list[Turn], turns: list[Turn], last: Turn) -> None:
    """Check a forked trial: up to the turn of the fork it was answered with its origin's turns, which have the same ids. One turn
    goes on from there: it was sampled, and its prompt begins with these ids."""
    theirs = {turn["turn_id"]: turn for turn in origin}
    told = [turn for turn in turns if turn["replayed"] is not None]
    assert last["turn_id"] in {turn["turn_id"] for turn in told} <= theirs.keys()
    for turn in told:
        whole = theirs[turn["turn_id"]]
        assert prompt_ids(turns, turn) == prompt_ids(origin, whole) + whole["completion_ids"]
        assert not turn["completion_ids"] and turn["replayed"] == len(whole["completion_ids"])
    [after] = [turn for turn in turns if turn["parent_id"] == last["turn_id"]]
    assert after["replayed"] is None and after["completion_ids"] and after["fork_reason"] is None
    prefix = prompt_ids(origin, last) + last["completion_ids"]
    assert prompt_ids(turns, after)[: len(prefix)] == prefix


def branch(turns: list[Turn], leaf: Turn) -> list[Turn]:
    """From the root to this turn."""
    by_id = {turn["turn_id"]: turn for turn in turns}
    path = [leaf]
    while path[-1]["parent_id"]:
        path.append(by_id[path[-1]["parent_id"]])
    return path[::-1]


def main_branch(turns: list[Turn]) -> list[Turn]:
    """The one that ends with the script's last words."""
    [leaf] = [turn for turn in turns if turn["reply"]["content"] == "All done."]
    return branch(turns, leaf)


def check_continuous(turns: list[Turn], dialect: str) -> None:
    """I2, for every turn that continues one."""
    by_id = {turn["turn_id"]: turn for turn in turns}
    for turn in turns:
        assert turn["dialect"] == dialect
        assert turn["prompt_tokens"] == len(prompt_ids(turns, turn))
        if turn["parent_id"]:
            before = by_id[turn["parent_id"]]
            whole = prompt_ids(turns, before) + before["completion_ids"]
            assert prompt_ids(turns, turn)[: len(whole)] == whole

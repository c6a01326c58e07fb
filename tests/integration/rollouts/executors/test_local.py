"""Commands as processes of this machine: nothing of them is left, whatever they do."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from steno_rollouts.trials import local
from steno_rollouts.trials.executor import CannotStart, Exit, TrialJob
from steno_rollouts.trials.local import LocalExecutor
from tests.unit.rollouts.nobody import as_nobody, become_nobody

OWN_GROUP = "timeout 600 sh -c 'echo $$ > child.pid; exec sleep 600'"
"""`timeout` makes a process group, in the session that it is started in."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Ends what a failing test has left."""
    (tmp_path / "work").mkdir()
    yield tmp_path
    for path in (tmp_path / "work").glob("*.pid"):
        if alive(path):
            os.kill(int(path.read_text()), 9)


def job(folder: Path, *command: str, timeout_s: float | None = 120.0) -> TrialJob:
    return TrialJob("g.0", command, {"PATH": os.environ["PATH"], "X": "y"}, folder, folder / "work", timeout_s)


def alive(path: Path) -> bool:
    """Whether the process whose number is in the file runs."""
    try:
        return (
            Path(f"/proc/{path.read_text().strip()}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            != "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


async def appears(path: Path) -> None:
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(0.02)


async def until(path: Path) -> None:
    async with asyncio.timeout(60):
        while not path.exists() or not path.read_text().strip():
            await asyncio.sleep(0.02)


async def gone(path: Path) -> None:
    async with asyncio.timeout(60):
        while alive(path):
            await asyncio.sleep(0.02)


async def test_output_goes_to_files_and_the_exit_code_comes_back(folder: Path) -> None:
    ended = await LocalExecutor().run(job(folder, "sh", "-c", 'echo "$X in $PWD"; echo bad >&2; exit 7'))
    assert ended == Exit(7)
    assert (folder / "stdout.log").read_text() == f"y in {folder / 'work'}\n"
    assert (folder / "stderr.log").read_text() == "bad\n"
    assert (await LocalExecutor().run(job(folder, "sh", "-c", "kill -9 $$"))).code == -9


async def test_a_command_that_is_not_there_says_so(folder: Path) -> None:
    ended = await LocalExecutor().run(job(folder, "no-such-command"))
    assert ended.code is None and "no-such-command: No such file" in ended.error


async def test_what_a_command_leaves_behind_is_ended_with_it(folder: Path) -> None:
    ended = await LocalExecutor().run(job(folder, "sh", "-c", "sleep 600 & echo $! > child.pid"))
    assert ended == Exit(0)
    await gone(folder / "work" / "child.pid")


async def test_a_process_may_have_any_name(folder: Path) -> None:
    """The kernel cuts it after 15 bytes, here in the middle of a character."""
    program = folder / "work" / ("a" * 14 + "é.sh")
    program.write_text("#!/bin/sh\necho $$ > child.pid\nsleep 600\n")
    program.chmod(0o755)
    command = f"'{program}' & until [ -s child.pid ]; do sleep 0.02; done"
    assert await LocalExecutor().run(job(folder, "sh", "-c", command)) == Exit(0)
    await gone(folder / "work" / "child.pid")
    assert not (folder / "pid").exists()


async def test_what_a_command_leaves_behind_in_another_process_group_is_ended_with_it(folder: Path) -> None:
    ended = await LocalExecutor().run(
        job(folder, "sh", "-c", f"{OWN_GROUP} &\nuntil [ -s child.pid ]; do sleep 0.05; done")
    )
    assert ended == Exit(0)
    await gone(folder / "work" / "child.pid")


async def test_at_its_time_limit_other_process_groups_may_clean_up_as_well(folder: Path) -> None:
    agent = "trap 'trap \"\" TERM; echo bye; exit' TERM; echo $$ > child.pid; while :; do sleep 0.05; done"
    shell = 'trap "wait; exit 3" TERM; timeout 600 sh -c "$AGENT" & wait'
    work = dataclasses.replace(job(folder, "sh", "-c", shell), environment={"PATH": os.environ["PATH"], "AGENT": agent})
    running = asyncio.create_task(LocalExecutor(grace_s=30).run(work))
    await until(folder / "work" / "child.pid")
    running.cancel()
    await asyncio.wait({running})
    assert (folder / "stdout.log").read_text() == "bye\n"
    assert not alive(folder / "work" / "child.pid")


async def test_at_its_time_limit_a_command_may_clean_up_and_is_then_ended_with_its_children(folder: Path) -> None:
    polite = "trap 'echo bye; exit 3' TERM; sleep 600 & echo $! > child.pid; touch up; wait"
    ended = await LocalExecutor(grace_s=60).run(job(folder, "sh", "-c", polite, timeout_s=10))
    assert ended == Exit(3, timed_out=True)
    assert (folder / "stdout.log").read_text() == "bye\n"
    await gone(folder / "work" / "child.pid")


async def test_a_shell_is_told_before_its_children(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its `wait` ends with its child, and it goes on. Of many, since which number came first was up to the numbers."""
    kill = os.kill

    def slow(pid: int, number: int) -> None:
        kill(pid, number)
        time.sleep(0.02)

    monkeypatch.setattr(local.os, "kill", slow)
    polite = "trap 'echo told; exit 3' TERM; sleep 600 & touch up; wait; echo went on"
    places = [folder / str(number) for number in range(24)]
    for place in places:
        (place / "work").mkdir(parents=True)
    running = [asyncio.create_task(LocalExecutor(grace_s=60).run(job(place, "sh", "-c", polite))) for place in places]
    for place, one in zip(places, running, strict=True):
        await appears(place / "work" / "up")
        one.cancel()
    await asyncio.wait(running)
    assert [(place / "stdout.log").read_text() for place in places] == ["told\n"] * len(places)


async def test_a_command_that_ignores_sigterm_is_killed(folder: Path) -> None:
    deaf = "trap '' TERM; echo $$ > own.pid; while :; do sleep 1; done"
    ended = await LocalExecutor(grace_s=0.2).run(job(folder, "sh", "-c", deaf, timeout_s=10))
    assert ended == Exit(-9, timed_out=True)
    assert not alive(folder / "work" / "own.pid")


async def test_a_cancelled_job_is_ended_and_a_second_cancellation_does_not_wait(folder: Path) -> None:
    deaf = "trap '' TERM; echo $$ > own.pid; while :; do sleep 1; done"
    running = asyncio.create_task(LocalExecutor(grace_s=600).run(job(folder, "sh", "-c", deaf)))
    await until(folder / "work" / "own.pid")
    running.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(folder / "work" / "own.pid")


async def killed_rollouts(folder: Path, shell: str) -> None:
    """Rollouts with this command, killed once it has written `own.pid` and `child.pid`."""
    code = (
        "import asyncio, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from tests.integration.rollouts.executors.test_local import job; from steno_rollouts.trials.local import LocalExecutor\n"
        "asyncio.run(LocalExecutor().run(job(Path(sys.argv[1]), 'sh', '-c', sys.argv[3])))"
    )
    root = Path(__file__).resolve().parents[4]
    rollouts = subprocess.Popen([sys.executable, "-c", code, str(folder), str(root), shell], cwd=root)  # noqa: ASYNC220
    try:
        for path in (folder / "work" / "own.pid", folder / "work" / "child.pid", folder / "pid"):
            await until(path)
    finally:
        rollouts.kill()
        rollouts.wait()


@pytest.mark.parametrize(
    "child", ["sleep 600 & echo $! > child.pid", f"{OWN_GROUP} &"], ids=["same group", "own group"]
)
@pytest.mark.parametrize("leader_ends", [False, True])
async def test_what_killed_rollouts_left_running_is_ended(folder: Path, child: str, leader_ends: bool) -> None:
    """Both while the command itself runs on, and when only a child of it does, which may have a process group of its own."""
    await killed_rollouts(folder, f"{child}\necho $$ > own.pid; wait")
    if leader_ends:
        os.kill(int((folder / "work" / "own.pid").read_text()), 9)
        await gone(folder / "work" / "own.pid")
    assert alive(folder / "work" / "child.pid")
    async with asyncio.timeout(60):
        await LocalExecutor().clear(folder)
    await gone(folder / "work" / "child.pid")
    assert not alive(folder / "work" / "own.pid") and not (folder / "pid").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
async def test_what_is_left_and_can_not_be_ended_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another user: `sudo` in a command, say."""
    await killed_rollouts(folder, "sleep 600 & echo $! > child.pid; echo $$ > own.pid; wait")
    pids = sorted(int((folder / "work" / f"{name}.pid").read_text()) for name in ("own", "child"))

    def work() -> None:
        with pytest.raises(CannotStart, match=f"processes {pids[0]}, {pids[1]}, left by rollouts that were killed"):
            asyncio.run(asyncio.wait_for(LocalExecutor().clear(Path()), 60))

    with monkeypatch.context() as patch:
        patch.setattr(local, "ROUNDS", 3)
        await asyncio.to_thread(as_nobody, work, folder)
    assert (folder / "pid").exists()
    await LocalExecutor().clear(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
async def test_a_command_that_becomes_another_users_holds_up_nobody(folder: Path) -> None:
    async def run() -> None:
        running = asyncio.create_task(LocalExecutor(grace_s=0.1).run(job(Path(), "sh", "-c", shell, timeout_s=None)))
        await until(Path("work") / "own.pid")
        become_nobody()
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()

    shell = "echo $$ > own.pid; exec sleep 600"
    await asyncio.to_thread(as_nobody, lambda: asyncio.run(run()), folder, at_once=False)
    assert alive(folder / "work" / "own.pid")


async def test_a_number_that_somebody_else_has_now_is_left_alone(folder: Path) -> None:
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: ASYNC220
    try:
        (folder / "pid").write_text(f"{other.pid} 12345")
        await LocalExecutor().clear(folder)
        await asyncio.sleep(0.1)
        assert other.poll() is None and not (folder / "pid").exists()
    finally:
        other.kill()
        other.wait()
    (folder / "pid").write_text("garbage")
    await LocalExecutor().clear(folder)

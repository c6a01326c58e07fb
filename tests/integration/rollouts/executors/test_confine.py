"""What a confined trial can't reach, and that it is otherwise run as any trial is."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno.contracts.records import Session
from steno_rollouts.build import confinement
from steno_rollouts.config import RolloutSettings
from steno_rollouts.trials.confine import CannotConfine, Confinement, hidden_paths
from steno_rollouts.trials.executor import Exit
from steno_rollouts.trials.local import LocalExecutor
from steno_rollouts.trials.scoring import task_source
from tests.integration.rollouts.conftest import ADMIN, Rollout
from tests.integration.rollouts.executors.test_local import job

THIEF = Path(__file__).with_name("thief.py")
PROVIDER = "sk-of-the-operator"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "trials" / "g.0"
    (folder / "work").mkdir(parents=True)
    return folder


@pytest.fixture
def executor(folder: Path) -> Callable[[float], LocalExecutor]:
    return lambda grace_s: LocalExecutor(grace_s, Confinement.of([], folder.parent))


def running(mark: str) -> list[int]:
    """Processes with this word among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


async def gone(mark: str) -> None:
    async with asyncio.timeout(60):
        while running(mark):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("confined", [True, False])
def test_a_trial_finds_no_key_of_its_operator(
    rollout: Rollout, sessions: Callable[[str], list[Session]], confined: bool
) -> None:
    """Unconfined, the same search finds the admin key everywhere, and the trial rewards itself: the thief works."""
    home, keys, run = rollout.folder / "home", rollout.folder / "keys", f"thief-{confined}"
    for path, text in (
        (home / ".bashrc", f"export STENO_ADMIN_KEY={ADMIN}\n"),
        (home / ".bash_history", f"steno rollout --key {ADMIN}\n"),
        (home / ".config" / "gh" / "hosts.yml", f"token: {PROVIDER}\n"),
        (keys / "admin_key", ADMIN),
        (rollout.folder / "work" / "another.0" / "stdout.log", ADMIN),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rollout.forked = False  # the thief looks at command lines and environments
    rollout.environment = {
        "HOME": str(home), "STENO_ADMIN_KEY": ADMIN, "OPENAI_API_KEY": PROVIDER, "STENO_KEYS_DIR": str(keys),
    }  # fmt: skip
    said = rollout(
        rollout.tasks({"id": "t"}), "--run", run, "--group-size", "1", "--keep", "all",
        "--confine", "require" if confined else "off",
        command=[sys.executable, str(THIEF), ADMIN[:-4], PROVIDER[:-4], "--", str(keys), str(rollout.folder / "work")],
        code=1 if confined else 0,
    )  # fmt: skip
    folder = Path(rollout.rows()[0]["folder"])
    seen = json.loads((folder / "stdout.log").read_text())
    session = sessions(run)[0]
    if confined:
        assert seen == {"found": {}, "posted": []}
        assert session.reward is None and session.end_reason == "no_reward"
        assert "trials are not isolated: they can read your files" not in said
    else:
        places = set(seen["found"])
        assert any(place.endswith("environ") for place in places) and any(place.endswith("cmdline") for place in places)
        assert {str(home / ".bashrc"), str(home / ".bash_history"), str(keys / "admin_key")} <= places
        assert str(rollout.folder / "work" / "another.0" / "stdout.log") in places
        assert any(place.startswith("ptrace") for place in places) or os.getuid() != 0
        assert ADMIN in seen["posted"] and session.reward == 1.0
        assert "trials are not isolated: they can read your files" in said


@pytest.mark.parametrize("beside", [True, False], ids=["the agent beside the tasks", "the agent among them"])
def test_a_trial_finds_nothing_that_scores_it_and_changes_nothing_of_it(rollout: Rollout, beside: bool) -> None:
    """By the paths that it can guess: of its task, of another one, of the reward function."""
    tasks, score = rollout.folder / "tasks", rollout.folder / "score.py"
    score.write_text("def score(workdir):\n    return float((workdir / 'answer').exists())\n")
    for name in ("one", "two"):
        for inner in ("tests", "solution", "environment"):
            (tasks / name / inner).mkdir(parents=True)
        (tasks / name / "instruction.md").write_text("Do it.\n")
        (tasks / name / "task.toml").write_text("[metadata]\nanswer = 'secret'\n")
        (tasks / name / "tests" / "checks.py").write_text("# secret\n")
        (tasks / name / "solution" / "solve.sh").write_text("# secret\n")
        (tasks / name / "environment" / "given").write_text("given\n")
    agent = (rollout.folder if beside else tasks) / "agent.sh"
    agent.write_text(f"""#!/bin/sh
cat given >answer
cp -r {tasks} {score} seen
for file in {tasks}/*/tests/checks.py {score} "$OLDPWD/score.py"; do echo changed >"$file"; done
exit 0
""")
    agent.chmod(0o755)
    before = {path: path.read_bytes() for path in [score, *tasks.rglob("*")] if path.is_file()}
    rollout(
        tasks, "--run", f"scoring-{beside}", "--group-size", "1", "--keep", "all", "--confine", "require",
        "--reward", f"{score}:score", "--stop-after-failures", "0", command=[str(agent)],
    )  # fmt: skip
    rows = rollout.rows()
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    for row in rows:
        work = Path(row["folder"]) / "work"
        assert (work / "answer").read_text() == "given\n"
        assert not [path for path in work.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert {path: path.read_bytes() for path in before} == before


async def test_a_link_beside_tasks_shows_nothing_that_is_hidden(tmp_path: Path) -> None:
    """Of a key, of other trials' folders, of a task's tests."""
    tasks, work, key = tmp_path / "tasks", tmp_path / "work", tmp_path / "keys" / "admin"
    for folder in (tasks / "one" / "tests", work / "g.0" / "work", work / "g.1", key.parent):
        folder.mkdir(parents=True)
    for file in (key, tasks / "one" / "tests" / "checks.py", work / "g.1" / "stdout.log"):
        file.write_text("secret")
    (tasks / "one" / "task.toml").touch()
    agent = tasks / "agent.sh"
    agent.write_text(
        "#!/bin/sh\ncat ../../../tasks/key ../../../tasks/work/*/* ../../../tasks/answers/* >seen 2>&1; exit 0\n"
    )
    agent.chmod(0o755)
    for name, target in (("key", "../keys/admin"), ("work", str(work)), ("answers", "one/tests")):
        (tasks / name).symlink_to(target)
    source = task_source(tasks, [str(agent)])
    assert source is not None and len(source.kept) == 4
    executor = LocalExecutor(1.0, Confinement.of([key], work, source))
    assert await executor.run(job(work / "g.0", str(agent))) == Exit(0)
    assert "secret" not in (work / "g.0" / "work" / "seen").read_text()


async def test_a_confined_command_has_its_folder_its_output_and_its_exit_code(
    folder: Path, executor: Callable[[float], LocalExecutor]
) -> None:
    (folder / "task.json").write_text("{}")
    (folder.parent / "g.1").mkdir()
    shell = 'echo "$X in $PWD"; ls .. ../..; id -u; echo bad >&2; touch made; exit 7'
    assert await executor(1.0).run(job(folder, "sh", "-c", shell)) == Exit(7)
    said = (folder / "stdout.log").read_text().splitlines()
    assert said == [f"y in {folder / 'work'}", "..:", "task.json", "work", "", "../..:", "g.0", str(os.getuid())]
    assert (folder / "stderr.log").read_text() == "bad\n" and (folder / "work" / "made").exists()
    assert await executor(1.0).run(job(folder, "sh", "-c", "kill -9 $$")) == Exit(137)
    missing = await executor(1.0).run(job(folder, "no-such-command"))
    assert missing == Exit(None, error="no-such-command: No such file or directory")


async def test_folders_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "g.0" / "work").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder = tmp_path / "link" / "g.0"
    executor = LocalExecutor(1.0, Confinement.of([tmp_path / "link" / "other"], tmp_path / "link"))
    assert await executor.run(job(folder, "sh", "-c", "echo made > file; ls ../..")) == Exit(0)
    assert (folder / "work" / "file").read_text() == "made\n" and (folder / "stdout.log").read_text() == "g.0\n"


async def test_a_program_of_the_task_is_found_by_a_relative_path(
    folder: Path, executor: Callable[[float], LocalExecutor]
) -> None:
    program = folder / "work" / "bin" / "agent"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 5\n")
    program.chmod(0o755)
    of_the_task = dataclasses.replace(job(folder, "agent"), environment={"PATH": f"bin:{os.environ['PATH']}"})
    assert await executor(1.0).run(of_the_task) == Exit(5)


async def test_a_confined_command_in_another_process_group_may_clean_up(
    folder: Path, executor: Callable[[float], LocalExecutor]
) -> None:
    """`timeout` makes one, and is the session's leader here no more than any other command."""
    agent = "trap 'trap \"\" TERM; echo bye; exit' TERM; touch up; while :; do sleep 0.05; done"
    running = asyncio.create_task(executor(30.0).run(job(folder, "timeout", "600", "sh", "-c", agent)))
    async with asyncio.timeout(60):
        while not (folder / "work" / "up").exists():
            await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.wait({running})
    assert (folder / "stdout.log").read_text() == "bye\n"


async def test_a_daemon_ends_with_its_confined_trial(folder: Path, executor: Callable[[float], LocalExecutor]) -> None:
    mark = f"600.{uuid.uuid4().int % 10**9}"
    shell = f"setsid sh -c 'sleep {mark} & sleep {mark}' & while ! pgrep -f {mark} >/dev/null; do :; done; exit 0"
    assert (await executor(1.0).run(job(folder, "sh", "-c", shell))).code == 0
    await gone(mark)


async def test_at_its_time_limit_a_confined_command_may_clean_up(
    folder: Path, executor: Callable[[float], LocalExecutor]
) -> None:
    mark = f"600.{uuid.uuid4().int % 10**9}"
    polite = f"trap 'echo bye; exit 3' TERM; sleep {mark} & wait"
    ended = await executor(60.0).run(job(folder, "sh", "-c", polite, timeout_s=10))
    assert ended == Exit(3, timed_out=True) and (folder / "stdout.log").read_text() == "bye\n"
    await gone(mark)
    deaf = f"trap '' TERM; while :; do sleep {mark}; done"
    assert await executor(0.2).run(job(folder, "sh", "-c", deaf, timeout_s=10)) == Exit(-9, timed_out=True)
    await gone(mark)


def test_where_keys_lie(tmp_path: Path) -> None:
    hidden = hidden_paths(
        {"HOME": "/home/me", "STENO_ADMIN_KEY_FILE": "/keys/admin", "STENO_KEYS_DIR": "/keys", "STENO_ADMIN_KEY": "k",
         "SSH_AUTH_SOCK": "/tmp/agent.1", "XDG_RUNTIME_DIR": "/run/user/7"},
        [tmp_path],
    )  # fmt: skip
    expected = ["/keys/admin", "/keys", "/home/me/.bashrc", "/home/me/.ssh", "/tmp/agent.1", "/run/user/7"]
    assert {tmp_path, *map(Path, expected)} <= set(hidden) and Path("k") not in hidden


def test_what_can_not_be_confined_is_said_and_refused_where_it_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for path, reason in ((tmp_path / "nowhere", "bubblewrap is not installed"), (tmp_path, "No permissions to create")):
        monkeypatch.setenv("PATH", str(path))
        with pytest.raises(CannotConfine, match=reason):
            Confinement.of([], tmp_path)
        confined, warnings = confinement(RolloutSettings.load({"tasks": tasks, "key": "k"}, None), {})
        assert confined is None and len(warnings) == 1 and reason in warnings[0]
        with pytest.raises(ConfigError, match=reason):
            confinement(RolloutSettings.load({"tasks": tasks, "confine": "require"}, None), {})
    off = RolloutSettings.load({"tasks": tasks, "confine": "off"}, None)
    assert len(confinement(off, {})[1]) == 2, "that the proxy asks for no key is said too"

"""The example that a user would start from: its settings load, its lines exist, its tasks are scored as it says."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from steno_cli.main import whole_app
from steno_rollouts.build import Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.tasks.task import Task, load_tasks
from steno_rollouts.trials import workdir
from steno_trainer.run_config import RunSettings
from tests.support.programs.processes import until

EXAMPLE = Path(__file__).resolve().parents[3] / "deploy/examples/qwen2.5-3b-mini-swe-agent"
SOLUTIONS = {
    "mean-of-nothing": {"stats.py": "def mean(values):\n    return sum(values) / len(values) if values else 0.0\n"},
    "last-page": {
        "pages.py": "def pages(items, size):\n    if size < 1:\n        raise ValueError(size)\n"
        "    return [items[i:i + size] for i in range(0, len(items), size)]\n"
    },
    "slug": {"slug.py": "import re\ndef slug(title):\n    return '-'.join(re.findall('[a-z0-9]+', title.lower()))\n"},
    "word-count": {
        "count.py": "import sys\nif len(sys.argv) < 2:\n    sys.exit(print('usage: count.py FILE') or 2)\n"
        "print(len(open(sys.argv[1]).read().split()))\n"
    },
}
HELD_OUT = {
    "leap-year": {
        "calendar_rules.py": "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n"
    },
    "initials": {
        "initials.py": "def initials(name):\n    return ''.join(word[0].upper() + '.' for word in name.split())\n"
    },
}


@pytest.fixture(autouse=True)
def started_in_the_examples_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)


def score(task: Task, work: Path) -> dict[str, float]:
    spec = importlib.util.spec_from_file_location("example_score", EXAMPLE / "score.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert task.folder is not None
    found: dict[str, float] = module.score(task.folder, work)
    return found


def test_its_settings_belong_together() -> None:
    rollout = RolloutSettings.load({}, EXAMPLE / "rollout.yaml")
    train = RunSettings.load({}, EXAMPLE / "train.yaml")
    train.check()
    assert (rollout.run, rollout.groups_per_step) == (train.run, train.groups_per_step)
    assert rollout.max_staleness_steps == train.max_staleness_steps
    assert rollout.in_flight >= rollout.group_size * train.groups_per_step, "or GPUs idle"
    node = (EXAMPLE / "inference-node.sh").read_text()
    context = re.search(r"--context-tokens (\d+)", node)
    assert context is not None and int(context[1]) <= train.micro_batch_tokens, "or long failures are not trained"
    prepared = Prepared.of(rollout, "run")
    assert {task.task_id for task in prepared.tasks} == set(SOLUTIONS) and prepared.reward is not None
    evaluation = RolloutSettings.load({}, train.eval_config)
    held_out = {task.task_id for task in Prepared.of(evaluation, "run").tasks}
    assert evaluation.purpose == "eval" and held_out == set(HELD_OUT)


@pytest.mark.parametrize(
    "task", [*load_tasks(EXAMPLE / "tasks"), *load_tasks(EXAMPLE / "eval-tasks")], ids=lambda task: task.task_id
)
def test_a_task_is_unsolved_as_it_comes_and_solved_by_its_solution(task: Task, tmp_path: Path) -> None:
    work, _ = workdir.prepare(tmp_path / "trial", task)
    assert not (work / "tests").exists() and not (work / "checks.py").exists()
    assert score(task, work)["reward"] < 1.0
    for name, text in (SOLUTIONS | HELD_OUT)[task.task_id].items():
        (work / name).write_text(text)
    assert score(task, work) == {"reward": 1.0, "solved": 1.0}


@pytest.mark.parametrize(
    ("left", "solved"),
    [
        ({"slug.py": "import sys\nslug = str.lower\nsys.exit()\n"}, False),
        ({"slug.py": "slug = str.lower\n", "checks.py": "def __getattr__(name):\n    return lambda: None\n"}, False),
        ({**SOLUTIONS["slug"], "checks.py": "raise SystemExit('mine')\n"}, True),
        ({"slug.py": SOLUTIONS["slug"]["slug.py"] + "print(end='said while it was imported')\n"}, True),
    ],
    ids=["ends early", "brings its checks", "has a checks.py of its own", "says something"],
)
def test_only_the_tasks_own_checks_count_and_each_to_its_end(
    left: dict[str, str], solved: bool, tmp_path: Path
) -> None:
    for name, text in left.items():
        (tmp_path / name).write_text(text)
    [task] = [task for task in load_tasks(EXAMPLE / "tasks") if task.task_id == "slug"]
    assert (score(task, tmp_path)["reward"] == 1.0) is solved


def test_what_is_scored_sees_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_ADMIN_KEY", "secret")
    told = tmp_path / "told"
    (tmp_path / "work").mkdir()
    (tmp_path / "work/slug.py").write_text(f"import os\nopen({str(told)!r}, 'w').write(str(dict(os.environ)))\n")
    [task] = [task for task in load_tasks(EXAMPLE / "tasks") if task.task_id == "slug"]
    score(task, tmp_path / "work")
    assert "PATH" in told.read_text() and "secret" not in told.read_text()


@pytest.mark.parametrize("script", sorted(EXAMPLE.glob("*.sh")), ids=lambda path: path.name)
def test_its_scripts_are_shell_and_name_options_that_there_are(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    shell = "bash" if "bash" in script.read_text().splitlines()[0] else "sh"
    subprocess.run([shell, "-n", str(script)], check=True)
    for line in script.read_text().replace("\\\n", " ").splitlines():
        found = re.search(r"\bsteno ((?:proxy|worker|train|rollout) .*)", line)
        if found and not line.startswith("#"):
            name, *words = shlex.split(found[1])
            command = whole_app().commands[name]
            known = {option for parameter in command.params for option in parameter.opts}
            given = {word for word in words[: words.index("--") if "--" in words else None] if word.startswith("--")}
            assert given and given <= known, f"{given - known} of {name}"


def test_the_agents_line_points_at_the_trial(tmp_path: Path) -> None:
    """Run with a `mini` that only says what it was given."""
    mini = tmp_path / "bin" / "mini"
    mini.parent.mkdir()
    mini.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; echo "home $HOME"\n')
    mini.chmod(0o755)
    environment = {
        "PATH": f"{mini.parent}:{Path(shutil.which('sh') or '/bin/sh').parent}",
        "OPENAI_BASE_URL": "http://p/t/v1", "STENO_TASK_INSTRUCTION": "Do 'it' now.", "STENO_WORKDIR": str(tmp_path / "t/work"),
    }  # fmt: skip
    (tmp_path / "t").mkdir()
    done = subprocess.run([EXAMPLE / "agent.sh"], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert "model.model_kwargs.api_base=http://p/t/v1" in words and "Do 'it' now." in words
    assert words[-1] == f"home {tmp_path / 't/home'}"


STUB = """#!/bin/sh
say() { echo "$1" >>"$LOG"; }
echo "$*" >>"$LOG.words"
up() { echo up >>"$LOG.up"; }
case "$(basename "$0") $*" in
  curl*) [ -n "$FOREIGN" ] || [ -e "$LOG.answers" ]; exit ;;
  redis-server*) [ -z "$NO_REDIS" ] || exit 1; touch "$4"; [ -z "$REDIS_FAILS" ] || { sleep 0.5; exit 1; } ;;
  "steno proxy"*) [ -z "$NO_PROXY_STARTS" ] || exit 1; [ -n "$REDIS_FAILS" ] || touch "$LOG.answers" ;;
esac
case "$(basename "$0") $*" in
  redis-server*|"steno proxy"*)
    trap 'say "${0##*/} ends"; exit 0' TERM; up
    until [ "${0##*/}" = "$DIES" ] && [ -e "$LOG.both" ]; do sleep 0.05; done ;;
  "steno rollout"*)
    trap 'say "rollouts are told to end"; exit 0' TERM
    until [ "$(wc -l <"$LOG.up")" = 3 ]; do sleep 0.05; done
    while [ "$ROLLOUTS" = stay ]; do echo >"$LOG.both"; sleep 0.05; done
    say "rollouts end"; exit "$ROLLOUTS" ;;
  python*)
    trap 'say "trainer is told to end"; sleep 0.5; say "trainer ends"; exit 0' TERM; up
    until grep -q "rollouts end" "$LOG" 2>/dev/null; do sleep 0.05; done
    while [ "$ROLLOUTS" != 0 ] || [ "$TRAINER" = stay ]; do echo >"$LOG.both"; sleep 0.05; done
    for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; done
    say "last step"; exit "$TRAINER" ;;
esac
"""


def started(folder: Path, *, data: str, cwd: Path = EXAMPLE, **more: str) -> subprocess.Popen[bytes]:
    """The script itself; what it starts only says what becomes of it, in files beside `folder/log`."""
    for name in ("redis-server", "steno", "curl", "python"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    given = {
        "STENO_ADMIN_KEY": "a",
        "STENO_WORKER_KEY": "w",
        "ROLLOUTS": "0",
        "TRAINER": "0",
        "NO_REDIS": "",
        "NO_PROXY_STARTS": "",
        "FOREIGN": "",
        "DIES": "",
        "REDIS_FAILS": "",
        **more,
    }
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "LOG": str(folder / "log"), "DATA": data, **given}
    return subprocess.Popen([EXAMPLE / "trainer-node.sh"], cwd=cwd, env=environment, start_new_session=True)


def start(folder: Path, *, data: str, cwd: Path = EXAMPLE, timeout_s: float = 60, **more: str) -> int:
    """Its exit code."""
    script = started(folder, data=data, cwd=cwd, **more)
    try:
        return script.wait(timeout_s)
    finally:
        script.kill()


@pytest.mark.parametrize(("rollouts", "trainer"), [(0, 0), (0, 3), (1, 0)])
def test_the_trainers_last_step_is_waited_for_and_all_end_in_order(rollouts: int, trainer: int, tmp_path: Path) -> None:
    ended = start(tmp_path, data=str(tmp_path / "data"), timeout_s=120, ROLLOUTS=str(rollouts), TRAINER=str(trainer))
    said = (tmp_path / "log").read_text().splitlines()
    middle = ["last step"] if rollouts == 0 else ["trainer is told to end", "trainer ends"]
    assert said == ["rollouts end", *middle, "steno ends", "redis-server ends"]
    assert ended == (rollouts or trainer)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_all_of_its_terminal_ends_all_in_order(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    """Ctrl-C went to Redis, proxy, trainer and rollouts at once: there was no proxy to push and to post to. With SIGTERM it is
    seen here: stubs that a script starts in its background ignore SIGINT."""
    script = started(tmp_path, data=str(tmp_path / "data"), ROLLOUTS="stay")
    try:
        until(lambda: (tmp_path / "log.both").exists())
        os.killpg(script.pid, sent)
        assert script.wait(60) == code
    finally:
        script.kill()
    said = (tmp_path / "log").read_text().splitlines()
    trainer = ["trainer is told to end", "trainer ends"]
    assert said == ["rollouts are told to end", *trainer, "steno ends", "redis-server ends"]


@pytest.mark.parametrize("rollouts", ["stay", "0"])
@pytest.mark.parametrize(("dies", "called"), [("steno", "the proxy"), ("redis-server", "redis-server")])
def test_it_ends_with_its_proxy_and_its_redis(
    dies: str, called: str, rollouts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Trainer and rollouts waited for it, for ever, and GPUs with them."""
    data = str(tmp_path / "data")
    assert start(tmp_path, data=data, timeout_s=120, ROLLOUTS=rollouts, TRAINER="stay", DIES=dies) == 1
    assert f"trainer-node.sh: {called} has ended (exit code 0)\n" in capfd.readouterr().err
    assert "trainer ends" in (tmp_path / "log").read_text()


def test_its_archive_is_in_its_data(tmp_path: Path) -> None:
    """By its Redis's address it would be another one at each start, and what is in the first one would be missing."""
    assert start(tmp_path, data=str(tmp_path / "data")) == 0
    [words] = [line for line in (tmp_path / "log.words").read_text().splitlines() if line.startswith("proxy ")]
    assert words.endswith(f" --archive {tmp_path}/data/archive")


def test_nothing_is_recorded_where_its_redis_does_not_start(tmp_path: Path) -> None:
    """Another one may run on this machine."""
    assert start(tmp_path, data=str(tmp_path / "data"), NO_REDIS="1") == 1
    assert not (tmp_path / "log.up").exists()


def test_it_ends_where_its_proxy_does_not_start(tmp_path: Path) -> None:
    """Its port is taken, or a key is refused: it said so once, and the script waited for ever."""
    assert start(tmp_path, data=str(tmp_path / "data"), NO_PROXY_STARTS="1") == 1
    started = [words.split()[0] for words in (tmp_path / "log.words").read_text().splitlines()]
    assert "proxy" in started and not {"rollout", "-m"} & set(started)


def test_it_ends_where_its_redis_fails_while_the_proxy_waits_for_it(tmp_path: Path) -> None:
    """It can't read its file: it has opened its socket by then, and the proxy tries it again and again."""
    assert start(tmp_path, data=str(tmp_path / "data"), REDIS_FAILS="1") == 1


def test_it_takes_no_proxy_that_was_there_before_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One of the tutorial's, say, which keeps everything in memory."""
    assert start(tmp_path, data=str(tmp_path / "data"), FOREIGN="1") == 1
    assert "port 8000 answers already" in capfd.readouterr().err
    assert "proxy --host" not in (tmp_path / "log.words").read_text()


def test_it_asks_its_own_proxy_past_the_companys(tmp_path: Path) -> None:
    assert start(tmp_path, data=str(tmp_path / "data"), http_proxy="http://127.0.0.1:9") == 0
    asked = [words for words in (tmp_path / "log.words").read_text().splitlines() if "127.0.0.1:8000" in words]
    assert asked and all(words.startswith("--noproxy * ") for words in asked)


@pytest.mark.parametrize("missing", ["curl", "redis-server", "steno"])
def test_a_program_that_is_not_installed_is_named(
    missing: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without curl it waited for its proxy for ever."""
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    for name in {"curl", "redis-server", "steno"} - {missing}:
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "STENO_ADMIN_KEY": "a", "STENO_WORKER_KEY": "w", "DATA": str(tmp_path / "d")}
    assert subprocess.run([EXAMPLE / "trainer-node.sh"], timeout=60, check=False, env=environment).returncode == 1
    assert capfd.readouterr().err == f"trainer-node.sh: {missing} is not installed\n"
    assert not (tmp_path / "d").exists()


def test_its_data_may_be_a_relative_path_and_a_long_one(tmp_path: Path) -> None:
    """A socket's path has 107 bytes at most, redis-server goes to its folder, and the script to the example's."""
    data = f"here/{'long' * 30}"
    assert start(tmp_path, data=data, cwd=tmp_path) == 0
    words = (tmp_path / "log.words").read_text()
    assert f"--dir {tmp_path}/{data}/redis " in words and f"--checkpoint-dir {tmp_path}/{data}/checkpoints " in words
    told = re.search(r"--unixsocket (\S+)", words)
    assert told is not None and len(told[1]) <= 107 and f"--redis-url unix://{told[1]} " in words
    assert not Path(told[1]).parent.exists(), "it is removed at the end"


def test_each_data_folder_of_a_machine_has_weights_of_its_own(tmp_path: Path) -> None:
    """They are one run's: the trainer of another one would be refused there."""
    found = []
    for number, data in enumerate(("one", "two", "one")):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert start(folder, data=data, cwd=tmp_path, TMPDIR="/scratch") == 0
        found += re.findall(r"--weights-dir (\S+)", (folder / "log.words").read_text())
        # TMPDIR, which is not there, takes nothing from the end.
        assert (folder / "log").read_text().splitlines()[-2:] == ["steno ends", "redis-server ends"]
    first, second, again = found
    assert first == again != second and first.startswith("/scratch/steno-weights-")


WORKER = """#!/bin/sh
[ "${0##*/}" = steno ] || { echo 0; echo 1; exit; }
trap 'echo told >>"$LOG.$CUDA_VISIBLE_DEVICES"' TERM HUP
echo up >>"$LOG.$CUDA_VISIBLE_DEVICES"
until grep -q told "$LOG.$CUDA_VISIBLE_DEVICES"; do sleep 0.05; done
for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; done
echo ends >>"$LOG.$CUDA_VISIBLE_DEVICES"
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_all_of_its_terminal_tells_each_worker_once(
    sent: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Told twice, by the terminal and by the script, they leave what they are saying."""
    for name in ("nvidia-smi", "steno"):
        (tmp_path / name).write_text(WORKER)
        (tmp_path / name).chmod(0o755)
    given = {"LOG": str(tmp_path / "log"), "PROXY": "http://p", "STENO_WORKER_KEY": "w"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **given}
    script = subprocess.Popen([EXAMPLE / "inference-node.sh"], env=environment, start_new_session=True)
    logs = [tmp_path / "log.0", tmp_path / "log.1"]
    try:
        until(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
        os.killpg(script.pid, sent)
        assert script.wait(60) == code
    finally:
        script.kill()
    assert [log.read_text().split() for log in logs] == [["up", "told", "ends"]] * 2

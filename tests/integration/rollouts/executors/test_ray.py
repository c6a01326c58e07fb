"""`steno rollout --executor ray` on several nodes of Ray's, here: what runs where, what a lost node means, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steno.client.client import Client
from steno.contracts.records import Session
from steno.contracts.rest import GroupSpec
from steno.contracts.runs.claims import ClaimRequest
from tests.integration.rollouts.conftest import ADMIN, Rollout
from tests.support.programs.stack import Stack
from tests.support.sources import ROOT

pytestmark = pytest.mark.ray

Sessions = Callable[[str], list[Session]]
PYTHON = os.environ.get("STENO_TEST_RAY_PYTHON", "")
"""That of launchers and nodes. Read before the tests' environment is cleared."""
NODES = "tests.integration.rollouts.executors.ray_nodes"
SOON = {"RAY_worker_niceness": "0", "RAY_health_check_period_ms": "500"}
"""As told to nodes; a raylet that refuses connections is lost after five looks."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
ASK = (
    "import json, os, pathlib, sys, time, urllib.request\n"
    "def ask():\n"
    "    url, key = os.environ['OPENAI_BASE_URL'] + '/chat/completions', 'Bearer ' + os.environ['OPENAI_API_KEY']\n"
    "    body = json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}).encode()\n"
    "    headers = {'Authorization': key, 'Content-Type': 'application/json'}\n"
    "    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()\n"
    "def note(name):\n"
    "    made = pathlib.Path(os.environ['NOTES'], f'{os.environ[\"STENO_TASK_TASK_ID\"]}.{name}.{os.getpid()}')\n"
    "    made.write_text(os.environ['STENO_WORKDIR'])\n"
    "def wait(name):\n"
    "    while not pathlib.Path(os.environ['NOTES'], name).exists(): time.sleep(0.05)\n"
)
"""What the agents of these tests are made of, without imports that take long. NOTES: a folder that the test sees."""


class Cluster:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        """With a head that can run nothing that takes a processor, and two nodes for all tests."""
        self._process = process
        self.address, self.folder = "", Path()
        self.add(num_cpus=0, include_dashboard=False)
        self.other, self.sandbox = self.add(num_cpus=1), self.add(num_cpus=1, resources={"sandbox": 1})

    def add(self, **arguments: object) -> str:
        """The id of a new node."""
        return self._told("add", arguments)

    def kill(self, node: str) -> None:
        self._told("kill", node)

    def _told(self, *words: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        self.address, folder, found, _ = json.loads(self._process.stdout.readline())
        self.folder = Path(folder)
        return str(found)

    def wrote(self, word: str) -> list[Path]:
        """Which files of Ray's (logs, events, what it puts on disk) contain it."""
        return [path for path in self.folder.rglob("*") if path.is_file() and word.encode() in path.read_bytes()]

    def options(self, *more: str) -> list[str]:
        return ["--executor", "ray", "--ray-address", self.address, "--confine", "off", *more]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    assert PYTHON, "STENO_TEST_RAY_PYTHON: missing: name a python that has Ray (.ci/run makes one)"
    log = tmp_path_factory.mktemp("ray") / "nodes.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [PYTHON, "-m", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, cwd=ROOT,
            env={**os.environ, **SOON, **QUIET},
        )  # fmt: skip
    try:
        yield Cluster(process)
    finally:
        process.communicate(timeout=120)


@pytest.fixture
def rollout(stack: Stack, tmp_path: Path) -> Rollout:
    return Rollout(stack, tmp_path, {"RAY_USAGE_STATS_ENABLED": "0"}, forked=False, python=PYTHON)


@pytest.fixture
def notes(rollout: Rollout) -> Path:
    folder = rollout.folder / "notes"
    folder.mkdir()
    return folder


def agent(notes: Path, code: str) -> list[str]:
    program = notes.with_name("agent.py")
    program.write_text(ASK + code)
    return ["env", f"NOTES={notes}", sys.executable, str(program)]


def test_a_trial_runs_where_its_resource_is_and_is_scored_there(
    cluster: Cluster, rollout: Rollout, client: Client, sessions: Sessions, notes: Path
) -> None:
    """With a folder that is nowhere but on the launcher's side, and more output than may come back."""
    inner = rollout.folder / "tasks" / "one" / "environment"
    inner.mkdir(parents=True)
    (inner / "start.sh").write_text("#!/bin/sh\necho from the task\n")
    (inner / "start.sh").chmod(0o755)
    (inner.parent / "task.toml").write_text('[verifier]\nanswer = "42"\n')
    (inner.parent / "instruction.md").write_text("Do it.")
    (rollout.folder / "score.py").write_text(
        "def score(task, workdir, task_folder, exit_code, stdout, transcript):\n"
        "    assert task['verifier']['answer'] == '42' and (task_folder / 'task.toml').is_file() and exit_code == 0\n"
        "    assert stdout.stat().st_size > 20_000, 'whole, where it was written'\n"
        "    return {'reward': 0.5, 'turns': len(transcript.turns), 'files': len(list(workdir.iterdir()))}\n"
        "def ranked(trials):\n"
        "    assert [len(one.transcript.turns) for one in trials] == [1, 1]\n"
        "    return [one.reward + place for place, one in enumerate(trials)]\n"
    )
    code = (
        "import json, subprocess; ask(); note('ran'); print('x' * 20_000)\n"
        "pathlib.Path(os.environ['NOTES'], 'seen.json').write_text(json.dumps(dict(os.environ)))\n"
        "print(subprocess.check_output('./start.sh', text=True))"
    )
    rollout.environment |= {"STENO_ADMIN_KEY": ADMIN}
    said = rollout(
        rollout.folder / "tasks", "--run", "on-ray", "--group-size", "2", "--keep", "all", "--ray-return-kb", "4",
        "--reward", f"{rollout.folder / 'score.py'}:score", "--group-reward", f"{rollout.folder / 'score.py'}:ranked",
        *cluster.options("--ray-resources", '{"sandbox": 1}'), command=agent(notes, code),
    )  # fmt: skip
    assert "Ray 2." in said and ": 1 of 3 nodes have CPU 1, sandbox 1 for a trial" in said
    assert "there is room for 1 trials at a time, and in_flight is 8: the others wait in Ray" in said
    assert "trials are not isolated: they can read your files" in said, "the node says how trials are confined there"
    recorded = sessions("on-ray")
    assert [session.reward for session in recorded] == [0.5, 1.5]
    assert all(session.metrics["own_reward"] == 0.5 for session in recorded), "of the node; the group is scored here"
    assert all(session.metrics["turns"] == session.counts.turns == 1 for session in recorded)
    assert all(session.metrics["files"] == 2 for session in recorded), "instruction.md and start.sh"
    ran = [path.read_text() for path in notes.glob("one.ran.*")]
    assert len(ran) == 2 and all(_folder(cluster.sandbox) in folder for folder in ran)
    for row in rollout.rows():
        kept = Path(row["folder"])
        stdout = (kept / "stdout.log").read_text()
        assert stdout.startswith("[steno: the first 1") and "bytes are left out (--ray-return-kb 4)]\n" in stdout
        assert stdout.endswith("from the task\n\n") and len(stdout) < 4300
        where = (kept / "node.txt").read_text().strip().partition(":")[2]
        assert _folder(cluster.sandbox) in where and (Path(where) / "work" / "start.sh").is_file()
    seen = json.loads((notes / "seen.json").read_text())
    assert not [name for name in seen if name.startswith("RAY_")] and ADMIN not in seen.values()
    assert seen["OPENAI_API_KEY"] not in ("none", ADMIN)
    group = client.group(recorded[0].group_id or "").model_dump(include=set(GroupSpec.model_fields))
    harness = client.create_group(GroupSpec.model_validate(group)).harness_key
    assert harness and not any(cluster.wrote(key) for key in (seen["OPENAI_API_KEY"], harness, ADMIN))
    assert cluster.wrote(row["trial_id"]), "Ray's tasks are named after their trials"


def test_a_lost_node_ends_what_had_a_turn_and_the_rest_runs_again(
    cluster: Cluster, rollout: Rollout, sessions: Sessions, notes: Path
) -> None:
    node = cluster.add(num_cpus=1, resources={"lost": 2})
    code = (
        "note('begun')\n"
        "if os.environ['STENO_TASK_TASK_ID'] == 'b': wait('go')\n"
        "ask(); note('asked'); wait('go')\n"
        "open('reward.txt', 'w').write('1')"
    )
    options = ("--run", "lost-node", "--group-size", "1", "--in-flight", "2")
    tasks = rollout.tasks({"id": "a"}, {"id": "b"})
    with rollout.start(
        tasks,
        *options,
        *cluster.options("--ray-cpus", "0.5", "--ray-resources", '{"lost": 1}'),
        command=agent(notes, code),
    ) as process:
        try:
            _until(lambda: len(_pids(notes, "a.asked")) == len(_pids(notes, "b.begun")) == 1)
            first = _pids(notes, "*.begun")
            cluster.kill(node)
            _until(lambda: not any(_runs(pid) for pid in first))
            _until(lambda: len(rollout.rows() if rollout.results.exists() else []) == 1)
            again = cluster.add(num_cpus=1, resources={"lost": 2})
            (notes / "go").touch()
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, said
    rows = {row["task_id"]: row for row in rollout.rows()}
    assert (rows["a"]["end_reason"], rows["a"]["attempts"], rows["a"]["turns"]) == ("interrupted", 1, 1), said
    assert "lost on its node" in rows["a"]["detail"] and rows["a"]["reward"] is None
    assert (rows["b"]["end_reason"], rows["b"]["attempts"], rows["b"]["turns"]) == ("completed", 2, 1), said
    recorded = sessions("lost-node")
    assert [session.counts.turns for session in recorded] == [1, 1], "one recording each, of one attempt"
    assert _folder(again) in (notes / f"b.asked.{_pids(notes, 'b.asked')[0]}").read_text()
    cluster.kill(again)


def test_what_runs_on_nodes_ends_with_its_launcher_and_the_run_goes_on(
    cluster: Cluster, rollout: Rollout, sessions: Sessions, notes: Path
) -> None:
    """Killed; then by SIGTERM, after which Ctrl-C leaves a command that takes its time none."""
    code = (
        "import signal; task = os.environ['STENO_TASK_TASK_ID']\n"
        "if task == 'b': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "else: ask()\n"
        "note('begun')\n"
        "if task != 'd': wait('go')\n"
        "open('reward.txt', 'w').write('1')"
    )
    options = ("--run", "stopped-ray", "--group-size", "1", "--in-flight", "2", "--grace-s", "500")
    options = (*options, *cluster.options("--ray-cpus", "0.5", "--ray-resources", '{"sandbox": 0.5}'))
    options = (*options, "--stop-after-failures", "0")  # else the first trial would run alone until its first turn
    tasks = rollout.tasks({"id": "a"}, {"id": "b"}, {"id": "c"}, {"id": "d"})
    with rollout.start(tasks, *options, command=agent(notes, code)) as process:
        try:
            _until(lambda: len(_pids(notes, "*.begun")) == 2)
            process.kill()
            process.communicate()
            _until(lambda: not any(_runs(pid) for pid in _pids(notes, "*.begun")))
        finally:
            process.kill()
    assert sorted(session.status for session in sessions("stopped-ray")) == ["open", "open"]
    with rollout.start(tasks, *options, command=agent(notes, code)) as process:
        try:
            _until(lambda: len(_pids(notes, "b.begun")) == 2 and len(_pids(notes, "c.begun")) == 1)
            process.send_signal(signal.SIGTERM)
            _until(lambda: not any(_runs(pid) for pid in _pids(notes, "c.begun")))
            assert any(_runs(pid) for pid in _pids(notes, "b.begun")), "it was asked to end, and does not"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 130 and "cancelled; to go on, start the same command with --run stopped-ray" in said
    _until(lambda: not any(_runs(pid) for pid in _pids(notes, "*.begun")))
    (notes / "go").touch()
    rollout(tasks, *options, command=agent(notes, code))
    ends = {row["task_id"]: (row["end_reason"], row["turns"]) for row in rollout.rows()}
    assert ends == {"a": ("interrupted", 1), "b": ("cancelled", 0), "c": ("cancelled", 1), "d": ("completed", 1)}


def test_an_attempt_ends_on_its_node_when_another_launcher_has_taken_its_trial_over(
    cluster: Cluster, rollout: Rollout, client: Client, sessions: Sessions, notes: Path
) -> None:
    """Its launcher stands still: nobody else tells the node. 20 s pass until that looks. One recording each."""
    code = (
        "note('begun')\n"
        "if os.environ['STENO_TASK_TASK_ID'] == 'a': ask(); note('asked')\n"
        "wait('again'); ask()\n"
        "open('reward.txt', 'w').write('1')"
    )
    options = ("--run", "taken-over", "--group-size", "1", "--in-flight", "2", "--stop-after-failures", "0")
    options = (*options, *cluster.options("--ray-cpus", "0.25", "--ray-resources", '{"sandbox": 0.25}'))
    tasks, command = rollout.tasks({"id": "a"}, {"id": "b"}), agent(notes, code)
    other = Rollout(rollout.stack, rollout.folder / "other", rollout.environment, forked=False, python=PYTHON)
    other.folder.mkdir()
    with rollout.start(tasks, *options, command=command) as process:
        try:
            _until(lambda: len(_pids(notes, "a.asked")) == len(_pids(notes, "b.begun")) == 1)
            first = _pids(notes, "*.begun")
            process.send_signal(signal.SIGSTOP)
            for session in sessions("taken-over"):
                asked = ClaimRequest(launcher="another", trial_ids=[session.trial_id], ttl_s=1)
                (claim,) = client.claim(session.group_id or "", asked)
                assert not claim.granted and claim.launcher
                (taken,) = client.claim(session.group_id or "", asked.model_copy(update={"gone": [claim.launcher]}))
                assert (taken.granted, taken.epoch) == (True, 2)
            _until(lambda: not any(_runs(pid) for pid in first))
            (notes / "again").touch()
            other(tasks, *options, command=command)
            process.send_signal(signal.SIGCONT)
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, said
    ends = {"a": ("interrupted", 1), "b": ("completed", 1)}
    for each in (other, rollout):
        assert {row["task_id"]: (row["end_reason"], row["turns"]) for row in each.rows()} == ends, said
    assert [session.counts.turns for session in sessions("taken-over")] == [1, 1]
    assert (len(_pids(notes, "a.begun")), len(_pids(notes, "b.begun"))) == (1, 2)


def test_nodes_are_looked_at_before_anything_is_registered(
    cluster: Cluster, rollout: Rollout, sessions: Sessions
) -> None:
    tasks = rollout.tasks({"id": "a"})
    options = cluster.options("--ray-resources", '{"sandbox": 1}')
    said = rollout(tasks, "--run", "looked", *options, command=["no-such-agent"], code=2)
    assert (
        "trials can't run on 1 of 1 nodes: node " in said and "no-such-agent: not found on the PATH of trials" in said
    )
    assert sessions("looked") == []


def test_a_node_that_comes_later_and_is_not_ready_ends_no_run(cluster: Cluster, rollout: Rollout, notes: Path) -> None:
    """It has not what the reward function imports. The trial that it got runs elsewhere."""
    ready = cluster.add(num_cpus=1, resources={"late": 1})
    (rollout.folder / "score.py").write_text(
        "import os, pathlib\n"
        "if 'NOT_READY' in os.environ:\n"
        f"    pathlib.Path({str(notes)!r}, f'refused.{{os.getpid()}}').touch()\n"
        "    import no_such_module\n"
        "def score(task):\n"
        "    return 1.0\n"
    )
    code = "ask(); note('asked')\nif os.environ['STENO_TASK_TASK_ID'] == 'a': wait('go')"
    options = ("--run", "late-node", "--group-size", "1", "--in-flight", "2", "--retries", "100")
    options = (*options, "--reward", f"{rollout.folder / 'score.py'}:score")
    options = (*options, *cluster.options("--ray-cpus", "0.5", "--ray-resources", '{"late": 1}'))
    tasks = rollout.tasks({"id": "a"}, {"id": "b"})
    with rollout.start(tasks, *options, command=agent(notes, code)) as process:
        try:
            _until(lambda: _pids(notes, "a.asked"))
            late = cluster.add(num_cpus=1, resources={"late": 1}, env_vars={"NOT_READY": "1"})
            _until(lambda: len(_pids(notes, "refused")) > 1)
            cluster.kill(late)
            (notes / "go").touch()
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, said
    rows = {row["task_id"]: row for row in rollout.rows()}
    assert (rows["a"]["end_reason"], rows["a"]["attempts"]) == ("completed", 1), said
    assert rows["b"]["end_reason"] == "completed" and rows["b"]["attempts"] > 2, said
    cluster.kill(ready)


def _folder(node: str) -> str:
    """Of a node's, below the folder of trials' folders."""
    return f"node-{node[:12]}"


def _pids(notes: Path, pattern: str) -> list[int]:
    return [int(path.name.rpartition(".")[2]) for path in notes.glob(f"{pattern}.*")]


def _until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

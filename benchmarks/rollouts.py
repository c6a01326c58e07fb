"""What it costs to start trials: `steno rollout` with trials that do nothing but two turns through a real proxy with Redis.

    python -m benchmarks.rollouts                                        processes of this machine, and containers: some minutes
    python -m benchmarks.rollouts --harbor-python PYTHON --ray-python PYTHON      all cases; docker where STENO_TEST_DOCKER is set
    python -m benchmarks.rollouts --cases local,thousand --share 0.1              a tenth of the trials

A trial is `null_trial.sh`: bash, two requests by raw sockets. Cases:

    local, unconfined    processes, confined by bubblewrap (the default) and not: 800 trials, 16 at a time
    hundred, thousand    so many trials in flight at once from one launcher, unconfined: each waits after its first turn
    podman, docker       20 containers at once
    harbor, harbor_alone 20 trials, 4 at a time, in sandboxes of Podman's: by `steno rollout --harbor`, and the same tasks by
                         `harbor run`, whose agents ask an engine without Steno in between
    ray                  64 trials on a cluster of one node with 8 places

Started a minute: from the first trial's start to the last one's end (of those that wait: to the last one's first turn). CPU is
user and system: the launcher's own process; the same with the processes that it started and that have ended (trials; not what
engines leave to their monitors, nor Ray's); and the proxy's. Prints a table and one line of JSON, which goes to `--out` too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.report import describe_machine
from benchmarks.rollouts_stack import IMAGE, KEY, NULL, engine, own_address, ray, stack, upstream
from benchmarks.targets import ROOT, Running
from tests.support.programs.ports import free_port
from tests.support.sources import SOURCES

GROUP = 4
IDLE_S = 10.0
"""How long a launcher is watched whose trials all wait."""
LIMIT_S = 1500.0
TICKS = os.sysconf("SC_CLK_TCK")
AGENT = ROOT / "benchmarks/harbor_null.py"
TEST = "#!/bin/bash\necho 1 >/logs/verifier/reward.txt\n"


@dataclass(frozen=True)
class Case:
    """trials: a multiple of GROUP. held: all are to be in flight at once. needs: an engine of containers, or `ray`."""

    trials: int
    in_flight: int
    held: bool = False
    needs: str = ""
    options: tuple[str, ...] = ()


CASES = {
    "local": Case(800, 16),
    "unconfined": Case(800, 16, options=("--confine", "off")),
    "hundred": Case(100, 100, held=True, options=("--confine", "off")),
    "thousand": Case(1000, 1000, held=True, options=("--confine", "off")),
    "podman": Case(20, 20, needs="podman", options=("--executor", "podman", "--image", IMAGE, "--forwarder-image", IMAGE)),
    "docker": Case(20, 20, needs="docker", options=("--executor", "docker", "--image", IMAGE, "--forwarder-image", IMAGE)),
    "harbor": Case(20, 4, needs="podman"),
    "harbor_alone": Case(20, 4, needs="podman"),
    "ray": Case(64, 8, needs="ray"),
}  # fmt: skip


class Watched:
    """A launcher's process, looked at ten times a second. Ended with the block, and what it left is then nobody's."""

    def __init__(self, words: list[str], folder: Path, running: Running, variables: dict[str, str]) -> None:
        self._log, self._running = folder / "launcher.log", running
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **variables})
        self.rss_bytes = 0
        self._cpu_s = 0.0, 0.0

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(120)

    def until(self, reached: Callable[[], bool]) -> tuple[float, float, float, float]:
        """Wait until `reached`. Returns: the clock; CPU seconds of the launcher, of it and its ended children, of the proxy."""
        limit = time.monotonic() + LIMIT_S
        while True:
            ended = self._process.poll()  # before what it has written is looked at
            if reached():
                return self.look()
            if ended not in (None, 0) or time.monotonic() > limit:
                raise RuntimeError(f"{self._process.args!r}: its log ends: {self._log.read_text()[-2000:]}")
            self.look()
            time.sleep(0.1)

    def look(self) -> tuple[float, float, float, float]:
        """Of a launcher that has ended: what was seen last."""
        if self._process.returncode is not None:
            return time.monotonic(), *self._cpu_s, self._running.cpu_s()
        folder = Path(f"/proc/{self._process.pid}")
        fields = [int(one) for one in (folder / "stat").read_text().rpartition(")")[2].split()[11:15]]
        for line in (folder / "status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                self.rss_bytes = max(self.rss_bytes, int(line.split()[1]) * 1024)
        self._cpu_s = sum(fields[:2]) / TICKS, sum(fields) / TICKS
        return time.monotonic(), *self._cpu_s, self._running.cpu_s()


@dataclass
class Bench:
    """pythons: of Harbor and Ray, by name."""

    running: Running
    folder: Path
    pythons: dict[str, str] = field(default_factory=dict)

    def run(self, name: str, case: Case, ray_address: str = "") -> dict[str, Any]:
        folder = self.folder / name
        (folder / "work").mkdir(parents=True)
        if name == "harbor_alone":
            return self._harbor_alone(case, folder)
        gate, started, results = folder / "gate", folder / "started", folder / "results.jsonl"
        started.touch()
        words = ["--run", name, "--group-size", str(GROUP), "--in-flight", str(case.in_flight), *case.options]
        words += ["--results", str(results), "--work-dir", str(folder / "work")]
        proxy, python = self.running.url, sys.executable
        if name == "harbor":
            proxy = proxy.replace("127.0.0.1", own_address())
            words += ["--harbor", str(_harbor_tasks(folder, case)), "--harbor-python", self.pythons["harbor"]]
            words += ["--environment", "podman", "--agent", f"{AGENT}:Null"]
        else:
            told = {"started": str(started), "gate": str(gate)} if case.held else {}
            lines = ({"id": f"t{number}", **told} for number in range(case.trials // GROUP))
            (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
            null = "/opt/null_trial.sh" if case.needs in ("podman", "docker") else str(NULL)
            words += ["--tasks", str(folder / "tasks.jsonl")]
            words += ["--executor", "ray", "--ray-address", ray_address] if name == "ray" else []
            words += ["--", "bash", null]
        if name == "ray":
            python = self.pythons["ray"]
        if case.held:
            os.mkfifo(gate)
        words = [python, "-m", "steno", "rollout", "--proxy", proxy, *words]
        given = {"STENO_ROLLOUT_KEY": KEY, "PYTHONPATH": SOURCES}  # Ray's python has none of this checkout
        with Watched(words, folder, self.running, given) as launcher:
            began = launcher.until(lambda: _begun(folder / "work") or _lines(results) > 0)
            found: dict[str, Any] = {}
            if case.held:
                launched = launcher.until(lambda: _lines(started) >= case.trials)
                time.sleep(IDLE_S)
                waited = launcher.look()
                with gate.open("w"):
                    ended = launcher.until(lambda: _lines(results) >= case.trials)
                found = {"launcher_cpu_share_while_all_wait": (waited[1] - launched[1]) / (waited[0] - launched[0])}
            else:
                launched = ended = launcher.until(lambda: _lines(results) >= case.trials)
            found |= _figures(case.trials, began, launched, ended, launcher.rss_bytes)
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        if [(row["reward"], row["turns"]) for row in rows] != [(1.0, 2)] * case.trials:
            raise RuntimeError(f"{name}: not all of {len(rows)} trials have their reward and two turns: {rows[0]}")
        return found

    def _harbor_alone(self, case: Case, folder: Path) -> dict[str, Any]:
        """Its agents ask the engine that stands behind other proxies in `benchmarks.run`."""
        jobs = folder / "work"
        host, port = own_address(), free_port()
        variables = {"OPENAI_BASE_URL": f"http://{host}:{port}/v1", "OPENAI_API_KEY": "none"}
        job = {
            "job_name": "job", "jobs_dir": str(jobs), "n_attempts": GROUP, "n_concurrent_trials": case.in_flight,
            "quiet": True, "retry": {"max_retries": 0}, "environment": {"type": "podman"},
            "agents": [{"import_path": "harbor_null:Null", "env": variables}],
            "tasks": [{"path": str(path)} for path in sorted(_harbor_tasks(folder, case).iterdir())],
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        words = [
            str(Path(self.pythons["harbor"]).with_name("harbor")),
            "run",
            "--yes",
            "--config",
            str(folder / "job.json"),
        ]
        path = f"{Path(self.pythons['harbor']).parent}:{os.environ['PATH']}"
        given = {"PYTHONPATH": str(AGENT.parent), "PATH": path}
        with upstream(folder, host, port), Watched(words, folder, self.running, given) as launcher:
            began = launcher.until(lambda: _begun(jobs / "job"))
            ended = launcher.until(lambda: len(list(jobs.glob("job/*/result.json"))) >= case.trials)
            found = _figures(case.trials, began, ended, ended, launcher.rss_bytes)
        trials = [json.loads(path.read_text()) for path in jobs.glob("job/*/result.json")]
        scored = sum((trial["verifier_result"] or {}).get("rewards") == {"reward": 1.0} for trial in trials)
        if scored != case.trials:
            why = trials[0]["exception_info"]
            raise RuntimeError(f"harbor_alone: {scored} of {case.trials} trials have their reward: {why}")
        return found


def _figures(
    trials: int, began: tuple[float, ...], launched: tuple[float, ...], ended: tuple[float, ...], rss_bytes: int
) -> dict[str, Any]:
    return {
        "trials": trials,
        "started_per_minute": 60 * trials / (launched[0] - began[0]),
        "launcher_cpu_ms_per_trial": 1000 * (ended[1] - began[1]) / trials,
        "with_children_cpu_ms_per_trial": 1000 * (ended[2] - began[2]) / trials,
        "proxy_cpu_ms_per_trial": 1000 * (ended[3] - began[3]) / trials,
        "launcher_rss_bytes": rss_bytes,
    }


def _harbor_tasks(folder: Path, case: Case) -> Path:
    for number in range(case.trials // GROUP):
        task = folder / "tasks" / f"t{number}"
        files = {
            "task.toml": "",
            "instruction.md": "none\n",
            "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\n",
            "tests/test.sh": TEST,
        }
        for name, text in files.items():
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)
    return folder / "tasks"


def _begun(folder: Path) -> bool:
    """Whether a trial has its folder."""
    return folder.is_dir() and any(
        one.is_dir() and not one.name.startswith("steno-preflight") for one in folder.iterdir()
    )


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def table(results: dict[str, dict[str, Any]]) -> str:
    heads = (
        "case, trials, started a minute, launcher: CPU a trial, with its children, proxy: CPU a trial, launcher: memory"
    )
    rows = [f"| {heads.replace(', ', ' | ')} |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name, found in results.items():
        ms = (f"{found[f'{who}_cpu_ms_per_trial']:,.1f} ms" for who in ("launcher", "with_children", "proxy"))
        memory = f"{found['launcher_rss_bytes'] / 2**20:,.0f} MiB"
        rows.append(
            f"| {name} | {found['trials']} | {found['started_per_minute']:,.0f} | {' | '.join(ms)} | {memory} |"
        )
    return "\n".join(rows)


def measured(names: list[str], share: float, pythons: dict[str, str], folder: Path) -> dict[str, dict[str, Any]]:
    cases = {}
    for name in names:
        trials = max(GROUP, int(CASES[name].trials * share) // GROUP * GROUP)
        cases[name] = replace(CASES[name], trials=trials, in_flight=min(CASES[name].in_flight, trials))
    results = {}
    with stack(folder) as running:
        bench = Bench(running, folder, pythons)
        for needs, some in itertools.groupby(cases.items(), key=lambda item: item[1].needs):
            with contextlib.ExitStack() as around:
                address = around.enter_context(ray(pythons["ray"], folder, 8)) if needs == "ray" else ""
                if needs in ("podman", "docker"):
                    around.enter_context(engine(needs))
                for name, case in some:
                    results[name] = bench.run(name, case, address)
                    print(f"{name}: {json.dumps(results[name])}", file=sys.stderr)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", help="some of them, with commas between")
    parser.add_argument("--share", type=float, default=1.0, help="of the trials of each case")
    parser.add_argument("--harbor-python", help="a python that has Harbor")
    parser.add_argument("--ray-python", help="a python that has Ray")
    parser.add_argument("--out", type=Path, default=ROOT / "build/rollouts.json")
    arguments = parser.parse_args()
    pythons = {name: given for name in ("harbor", "ray") if (given := getattr(arguments, f"{name}_python"))}
    missing = set() if os.environ.get("STENO_TEST_DOCKER") else {"docker"}  # names the folder of its programs
    if "harbor" not in pythons:
        missing |= {"harbor", "harbor_alone"}
    if "ray" not in pythons:
        missing.add("ray")
    default = [name for name in CASES if name not in missing]
    with tempfile.TemporaryDirectory(prefix="steno-rollouts-") as folder:
        results = measured(
            arguments.cases.split(",") if arguments.cases else default, arguments.share, pythons, Path(folder)
        )
    report = {"machine": describe_machine(), "results": results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(results))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

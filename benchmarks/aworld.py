"""The training cycle of the AWorld report (arXiv:2508.20404), re-enacted at 1:100: what rollouts in parallel are worth.

    python -m benchmarks.aworld                   about two minutes; the report goes to build/aworld.json
    python -m benchmarks.aworld --quick           seconds: does it work? Its numbers mean nothing

The report's cycle: rollouts 7695 s one after the other, 525 s in parallel (14.6x); training 144 s; together 7839 s against 669 s
(11.7x). Here a real proxy, a real worker with the scripted engine, and the rollouts of `trainer_bridge`; what is simulated are
the environments (an `Executor` that waits and asks the model) and the training step (a timer). The ideal is the same trials,
in the same order, on so many places that cost nothing: no proxy, no process, no store.

Latencies: each trial has 3 to 6 turns, evenly drawn; each turn a time in the environment and one in the model, both lognormal
(sigma 0.6), the first 1.5 times the second on average; all scaled so that a batch is 76.95 s one after the other. A batch is 2
tasks of 32 trials, as many as the report's groups have. Fixed seed: every run has the same trials. On a machine with other users
the run counts in which they took least.

Exit code 1: less than 95 % of the ideal speed-up, or a cycle that gains no more than the report's.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import describe_machine
from benchmarks.targets import CORES, ROOT, Launcher, process_cpu_s
from steno.client.client import AsyncClient
from steno.contracts.rest import GroupTrials
from steno_rollouts.groups.admission import Admission
from steno_rollouts.groups.plan import GroupOptions, Planned
from steno_rollouts.harness import Rollouts
from steno_rollouts.outcome import TrialResult
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import Executor, Exit, TrialJob
from steno_rollouts.trials.play import ExecutorPlayer, RunnerOptions
from steno_rollouts.trials.runner import TrialRunner
from tests.support.programs.ports import free_port

SCALE = 100.0
REPORT = {"sequential_s": 7695.0, "parallel_s": 525.0, "training_s": 144.0}
"""Seconds, as the report has them."""
TASKS, GROUP_SIZE = 2, 32
IN_FLIGHT = 18
"""As many places as ideally take what the report's took: 5.21 s against its 5.25 s. It does not say how many it had."""
SIGMA = 0.6
SEED = 2508
CYCLES = 4
"""Of the run with training: enough for the first, which has nothing to overlap with, not to decide."""
WANTED_OF_IDEAL = 0.95


@dataclass(frozen=True)
class Turn:
    environment_s: float
    model_s: float


@dataclass(frozen=True)
class Sizes:
    sequential_s: float = REPORT["sequential_s"] / SCALE
    training_s: float = REPORT["training_s"] / SCALE
    group_size: int = GROUP_SIZE
    in_flight: int = IN_FLIGHT
    cycles: int = CYCLES
    runs: int = 6


def batch(sizes: Sizes, seed: int) -> list[list[Turn]]:
    """The trials of one batch, in the order in which they are started."""
    rng = random.Random(seed)
    drawn = [
        [Turn(1.5 * rng.lognormvariate(0, SIGMA), rng.lognormvariate(0, SIGMA)) for _ in range(rng.randint(3, 6))]
        for _ in range(TASKS * sizes.group_size)
    ]
    scale = sizes.sequential_s / sum(map(seconds, drawn))
    return [[Turn(turn.environment_s * scale, turn.model_s * scale) for turn in trial] for trial in drawn]


def seconds(trial: Sequence[Turn]) -> float:
    return sum(turn.environment_s + turn.model_s for turn in trial)


def ideal_s(trials: Sequence[Sequence[Turn]], places: int) -> float:
    """When the last of these trials has ended, if each starts as soon as one of so many places is free."""
    free = [0.0] * places
    for trial in trials:
        heapq.heapreplace(free, free[0] + seconds(trial))
    return max(free)


class Simulated(Executor):
    """An `Executor`: a trial that waits for its environment and asks the model, turn by turn, in one conversation."""

    def __init__(self, http: httpx.AsyncClient, trials: dict[str, Sequence[Turn]]) -> None:
        self._http, self._trials = http, trials

    async def run(self, job: TrialJob) -> Exit:
        url = f"{job.environment['OPENAI_BASE_URL']}/chat/completions"
        messages: list[dict[str, Any]] = []
        for turn in self._trials[job.trial_id]:
            await asyncio.sleep(turn.environment_s)
            messages.append({"role": "user", "content": f"generate {turn.model_s:.6f}"})
            answer = await self._http.post(url, json={"model": "m", "messages": messages})
            answer.raise_for_status()
            messages.append(answer.json()["choices"][0]["message"])
        (job.workdir / "reward.txt").write_text("1")
        return Exit(0)

    async def clear(self, folder: Path) -> None: ...


class Trainer:
    """A stand-in: an `Observer` that takes a batch when all its trials have ended, and is then busy for a while."""

    def __init__(self, trials: int, step_s: float) -> None:
        self._trials, self._step_s = trials, step_s
        self._ended = asyncio.Semaphore(0)
        self.started = self.acknowledged = 0

    async def steps(self, count: int) -> None:
        for _ in range(count):
            for _ in range(self._trials):
                await self._ended.acquire()
            await asyncio.sleep(self._step_s)
            self.acknowledged += TASKS

    async def in_hand(self) -> int:
        return self.started - self.acknowledged

    def group_started(self, group: GroupTrials) -> None:
        self.started += 1

    def trial_started(self, trial_id: str) -> None: ...

    def trial_failed(self, failed: Any) -> None: ...

    def trial_waits(self, result: TrialResult) -> None: ...

    def held_back(self, why: str | None) -> None: ...

    def trial_ended(self, result: TrialResult) -> None:
        if result.reward is None:
            raise RuntimeError(f"{result.trial_id} ended with {result.end_reason}: {result.detail}")
        self._ended.release()


class Bench:
    """One proxy and worker, any number of runs."""

    def __init__(self, url: str, folder: Path, sizes: Sizes) -> None:
        self._url, self._folder, self._sizes = url, folder, sizes

    async def rollouts(self, run: str, batches: int, *, places: int, training: bool = False) -> float:
        """Seconds that so many batches take, with the training after each beside the next if it is wanted."""
        sizes = self._sizes
        size = TASKS * sizes.group_size
        trainer = Trainer(size, sizes.training_s)
        options = RunnerOptions(("simulated",), self._folder / run, keep="none", inherited={})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            AsyncClient(self._url) as client,
            httpx.AsyncClient(timeout=120, limits=limits) as http,
        ):
            simulated: dict[str, Sequence[Turn]] = {}
            rollouts = Rollouts(
                client,
                TrialRunner(client, ExecutorPlayer(client, Simulated(http, simulated), options), options),
                GroupOptions(run, sizes.group_size, in_flight=places, sequential=places == 1),
                admission=Admission(TASKS, 1, ask_again_s=2 / SCALE),
                in_hand=trainer.in_hand,
                observers=[_Named(simulated, batch(sizes, SEED)), trainer],
            )
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                group.create_task(rollouts.run(_planned(batches)))
                if training:
                    group.create_task(trainer.steps(batches))
            return time.perf_counter() - began


class _Named:
    """An `Observer` that gives each trial of a group what it is to simulate, when its name is known."""

    def __init__(self, simulated: dict[str, Sequence[Turn]], trials: Sequence[Sequence[Turn]]) -> None:
        self._simulated, self._trials = simulated, trials

    def group_started(self, group: GroupTrials) -> None:
        first = int(group.group.task["task"]) * group.group.size
        for index, trial in enumerate(group.trials):
            self._simulated[trial.session.trial_id] = self._trials[first + index]

    def trial_started(self, trial_id: str) -> None: ...

    def trial_ended(self, result: TrialResult) -> None: ...

    def trial_failed(self, failed: Any) -> None: ...

    def trial_waits(self, result: TrialResult) -> None: ...

    def held_back(self, why: str | None) -> None: ...


def _planned(batches: int) -> Iterator[Planned]:
    for number in range(batches):
        for task in range(TASKS):
            yield Planned(Task(f"task-{task}", {"task": task}), f"cycle-{number}")


async def measure(url: str, pids: Sequence[int], folder: Path, sizes: Sizes) -> dict[str, Any]:
    bench = Bench(url, folder, sizes)
    await bench.rollouts("warm-up", 1, places=TASKS * sizes.group_size)
    parallel, overlapped = [], []
    for number in range(sizes.runs):
        others = _Others(pids)
        wall_s = await bench.rollouts(f"parallel-{number}", 1, places=sizes.in_flight)
        parallel.append({"wall_s": wall_s, "others_cores": others.cores()})
    for number in range(max(1, sizes.runs // 3)):
        others = _Others(pids)
        wall_s = await bench.rollouts(f"overlapped-{number}", sizes.cycles, places=sizes.in_flight, training=True)
        overlapped.append({"wall_s": wall_s, "others_cores": others.cores()})
    sequential_s = await bench.rollouts("sequential", 1, places=1)
    best, cycle = (min(runs, key=lambda run: run["others_cores"]) for runs in (parallel, overlapped))
    found = worked_out(sizes, sequential_s, best["wall_s"], cycle["wall_s"])
    return found | {"others_cores": best["others_cores"], "parallel_runs": parallel, "overlapped_runs": overlapped}


class _Others:
    """What everything else on this machine takes from here on, in cores."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began, self._before = time.perf_counter(), self._taken_s()

    def _taken_s(self) -> float:
        return _busy_s() - time.process_time() - sum(map(process_cpu_s, self._pids))

    def cores(self) -> float:
        return (self._taken_s() - self._before) / (time.perf_counter() - self._began)


def worked_out(sizes: Sizes, sequential_s: float, parallel_s: float, overlapped_s: float) -> dict[str, Any]:
    """Compares the measured times with the ideal and the report.

    speed_up: of two measured times, as the report's. ideal_of_wall: stricter: the ideal time, of simulated latencies alone, over
    the measured time, in which a busy machine adds to each request. cycle_speed_up also begins from simulated latencies.
    """
    trials = batch(sizes, SEED)
    nominal_s = sum(map(seconds, trials))
    ideal = ideal_s(trials, sizes.in_flight)
    cycle_s = overlapped_s / sizes.cycles
    return {
        "nominal_sequential_s": nominal_s,
        "longest_trial_s": max(map(seconds, trials)),
        "ideal_parallel_s": ideal,
        "sequential_s": sequential_s,
        "parallel_s": parallel_s,
        "cycle_s": cycle_s,
        "ideal_speed_up": nominal_s / ideal,
        "speed_up": sequential_s / parallel_s,
        "of_ideal": (sequential_s / parallel_s) / (nominal_s / ideal),
        "ideal_of_wall": ideal / parallel_s,
        "cycle_speed_up": (nominal_s + sizes.training_s) / cycle_s,
        "cycle_without_overlap_s": parallel_s + sizes.training_s,
        "report_speed_up": REPORT["sequential_s"] / REPORT["parallel_s"],
        "report_cycle_speed_up": (REPORT["sequential_s"] + REPORT["training_s"]) / (REPORT["parallel_s"] + REPORT["training_s"]),
    }  # fmt: skip


def table(found: dict[str, Any], sizes: Sizes) -> str:
    def row(name: str, report: str, ideal: str, measured: str) -> str:
        return f"| {name} | {report} | {ideal} | {measured} |"

    return "\n".join([
        row("1:100", "AWorld", f"ideal on {sizes.in_flight} places", "here"),
        "|---|---|---|---|",
        row("rollouts in sequence", "76.95 s", f"{found['nominal_sequential_s']:.2f} s", f"{found['sequential_s']:.2f} s"),
        row("rollouts, in parallel", "5.25 s", f"{found['ideal_parallel_s']:.2f} s", f"{found['parallel_s']:.2f} s"),
        row("speed-up", "14.6x", f"{found['ideal_speed_up']:.1f}x", f"{found['speed_up']:.1f}x"),
        row("of the ideal speed-up", "", "", f"{found['of_ideal']:.1%}"),
        row("ideal time of the measured", "", "", f"{found['ideal_of_wall']:.1%}"),
        row("cycle with training (1.44 s)", "6.69 s", "", f"{found['cycle_s']:.2f} s"),
        row("speed-up of the cycle", f"{found['report_cycle_speed_up']:.1f}x", "", f"{found['cycle_speed_up']:.1f}x"),
    ])  # fmt: skip


def _start(launcher: Launcher) -> str:
    """A proxy and a worker, on any core. Returns the proxy's URL, once the worker's model is served."""
    cores, port = ",".join(CORES), free_port()
    url = f"http://127.0.0.1:{port}"
    steno = (sys.executable, "-m", "steno")
    child = launcher.spawn(cores, "proxy", *steno, "proxy", "--port", str(port), "--log-level", "warning")
    launcher.ready(child, f"{url}/healthz")
    script = (
        "--engine",
        "scripted",
        "--script",
        f"{ROOT / 'benchmarks/aworld_script.py'}:reply",
        "--max-streams",
        "1024",
    )
    child = launcher.spawn(cores, "worker", *steno, "worker", "--proxy", f"ws://127.0.0.1:{port}", *script)
    while httpx.get(f"{url}/readyz", timeout=60).json().get("status") != "ok":
        if child.poll() is not None:
            raise RuntimeError((launcher.folder / "worker.log").read_text())
        time.sleep(0.1)
    return url


def _busy_s() -> float:
    """CPU seconds that this machine has spent on anything at all."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--runs", type=int, help="of the rollouts in parallel; the quietest one counts")
    parser.add_argument("--out", type=Path, default=ROOT / "build/aworld.json")
    arguments = parser.parse_args()
    sizes = Sizes(2.0, 0.05, 4, 4, 2, 1) if arguments.quick else Sizes()
    sizes = replace(sizes, runs=arguments.runs or sizes.runs)
    with tempfile.TemporaryDirectory(prefix="steno-aworld-") as folder:
        launcher = Launcher(Path(folder), None)
        try:
            url = _start(launcher)
            found = asyncio.run(measure(url, [child.pid for child in launcher.children], Path(folder), sizes))
        finally:
            launcher.close()
    report = {"machine": describe_machine(), "sizes": vars(sizes), "results": found}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(found, sizes))
    print(
        f"\nthe quietest of {sizes.runs} runs: others took {found['others_cores']:.2f} of {len(CORES)} cores; {arguments.out}"
    )
    good = found["of_ideal"] >= WANTED_OF_IDEAL and found["cycle_speed_up"] > found["report_cycle_speed_up"]
    return 0 if good or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())

"""The whole loop as its users run it, on this machine: Redis, proxy, embedded worker, agents through the SDK, `steno train` on
two gloo ranks under torchrun. Everything but the agents is a process of its own, and can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil

from steno.client.client import AsyncClient, Client
from steno.contracts.records import SamplingPolicy
from steno.contracts.runs.leases import LeaseRequest, RunView
from steno.models import TINY
from steno_rollouts.groups.admission import Admission
from steno_rollouts.groups.plan import GroupOptions, Planned
from steno_rollouts.harness import Rollouts
from steno_rollouts.outcome import TrialResult
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import Executor, Exit, TrialJob
from steno_rollouts.trials.play import ExecutorPlayer, RunnerOptions
from steno_rollouts.trials.runner import TrialRunner
from steno_trainer.data.ledger import Ledger
from tests.support.machine.redis_server import RedisServer
from tests.support.programs import forked
from tests.support.programs.processes import until
from tests.support.programs.stack import ROOT, Stack, _spawn, running

SLOW_S = 300.0
"""Seconds that anything here may take on a machine that others use too."""
RUN = "r"
GROUP_SIZE, GROUPS_PER_STEP = 2, 2
LAW = SamplingPolicy(force={"temperature": 1.0, "top_p": 1.0})
WORKER = ("--engine", "transformers", "--model", str(TINY), "--worker-id", "w0")


@dataclass
class Trainer:
    """`steno train` under torchrun. Started again in the same folder it goes on from its checkpoint."""

    folder: Path
    process: forked.Started
    log: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines, of all starts in this folder."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics if line["stepped"]]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """As the function; fails with the log when the trainer ends meanwhile."""

        def happened() -> Any:
            if found := condition():
                return found
            assert self.process.poll() is None, f"the trainer ended with {self.process.poll()}: {self.said()}"
            return None

        return until(happened, f"{what}: {self.said()}")

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def wait(self) -> None:
        """Until it has ended by itself, well."""
        assert self.process.wait(SLOW_S) == 0, self.said()

    def died(self) -> None:
        """Until it has ended because a rank was killed."""
        assert self.process.wait(SLOW_S) != 0, self.said()
        self.kill()

    def kill(self) -> None:
        """SIGKILL of launcher and ranks, at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [
                *psutil.Process(self.process.pid).children(recursive=True),
                psutil.Process(self.process.pid),
            ]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def checkpoints(self) -> list[Path]:
        return sorted(path.parent for path in (self.folder / "checkpoints").glob("step-*/state.msgpack"))

    def newest(self) -> Path:
        return self.folder / "checkpoints" / (self.folder / "checkpoints" / "latest").read_text()

    def saved(self) -> dict[str, Any]:
        """The run's state in the newest checkpoint: path, ledger, trained_groups."""
        run: dict[str, Any] = msgspec.msgpack.decode((self.newest() / "state.msgpack").read_bytes())["run"]
        return run | {"ledger": Ledger.from_bytes(run["ledger"])}


@dataclass
class Product:
    """folder: of everything. key: the admin key; None: the proxy asks for none."""

    folder: Path
    redis: RedisServer
    stack: Stack
    model: str = str(TINY)
    trainers: list[Trainer] = field(default_factory=list)
    key: str | None = None

    @property
    def url(self) -> str:
        return self.stack.url

    def client(self) -> Client:
        return Client(self.url, self.key, retries=8)

    def in_force(self) -> str | None:
        """None while the proxy is not there, or nothing was pushed."""
        with contextlib.suppress(httpx.HTTPError):
            for policy in self.stack.get("/policy")["items"]:
                return policy["version"]  # type: ignore[no-any-return]
        return None

    def train(
        self, *, name: str = "train", die: str | None = None, spy: bool = False, ranks: int = 2, **settings: Any
    ) -> Trainer:
        """die: "module:Class.method:N", at whose Nth call the first rank is killed; with ":told" after it, torchrun is told to
        stop. spy: write down the batches."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        given = {
            "proxy": self.url, "run": RUN, "model": self.model, "precision": "float32", "device": "cpu",
            "learning_rate": 1e-4, "groups_per_step": GROUPS_PER_STEP, "micro_batch_tokens": 4096,
            "activation_checkpointing": False, "checkpoint_dir": str(folder / "checkpoints"), "checkpoint_every": 1,
            "weights_dir": str(folder / "weights"), "metrics_file": str(folder / "metrics.jsonl"),
            "probe_tokens": 16, "probe_tolerance": 0.001, "lease_ttl_s": 10.0, "max_staleness_steps": 1,
            **({"key": self.key} if self.key else {}),
        }  # fmt: skip
        (folder / "train.yaml").write_text(json.dumps(given | settings))  # YAML takes JSON
        module = ["tests.integration.loop.mortal", die] if die else ["steno"]
        module = ["tests.integration.loop.spy", str(folder)] if spy else module
        return self._started(folder, [*module, "train", "--config", str(folder / "train.yaml")], cwd=ROOT, ranks=ranks)

    def train_plainly(self, *words: str) -> Trainer:
        """The README's command on two ranks, in a folder of its own; `words` are what it says after `steno train`."""
        folder = self.folder / "plain"
        folder.mkdir()
        given = ["--proxy", self.url, "--metrics-file", str(folder / "metrics.jsonl"), *words]
        return self._started(folder, ["--", "steno", "train", *given], cwd=folder)

    def _started(self, folder: Path, module: list[str], *, cwd: Path, ranks: int = 2) -> Trainer:
        launcher = [sys.executable, "-m", "steno_cli.torchrun", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        log = folder / f"train-{len(self.trainers)}.log"
        with log.open("wb") as out:
            process = forked.start([*launcher, *module], environment, cwd, out)
        trainer = Trainer(folder, process, log)
        self.trainers.append(trainer)
        return trainer

    def restart_proxy(self) -> None:
        """kill -9, then started again where it was, on the same Redis."""
        self.stack.proxy.kill()
        self.stack.proxy.wait()
        command = ["--host", "127.0.0.1", "--port", str(self.stack.port), "--redis-url", self.redis.url]
        self.stack.proxy = _spawn(self.stack.folder / "proxy-again.log", sys.executable, "proxy", *command)

    def restart_worker(self) -> None:
        worker = self.stack.workers.pop()
        worker.kill()
        worker.wait()
        self.stack.start_worker(*WORKER, name=f"worker-{time.monotonic_ns()}")

    def stopped_in_an_update(self, trainer: Trainer) -> str:
        """Stop the worker (SIGSTOP) so that an update has begun and can't end. Returns: the version that it can't get."""
        worker = self.stack.workers[0]

        def pushed() -> set[tuple[str, int]]:
            """Lineages and steps."""
            found = (path.name.rsplit("-", 1) for path in (trainer.folder / "weights").glob("weights-*"))
            return {(name.removeprefix("weights-"), int(step)) for name, step in found}

        while True:
            known = pushed()
            new = trainer.until(lambda known=known: pushed() - known, "no further update")
            worker.send_signal(signal.SIGSTOP)
            lineage, step = max(new | (pushed() - known), key=lambda version: version[1])
            version = f"{lineage}/{step}"
            time.sleep(1.0)  # by now the update would be over, if the worker were there
            if self.in_force() != version:
                return version
            worker.send_signal(signal.SIGCONT)

    def balance(self, trainer: Trainer, run: str = RUN) -> RunView:
        """I4, token for token: what the proxy says was sampled is what it accounts for itself, what the newest checkpoint's
        ledger accounts for, and what waits in groups that no checkpoint holds. Nobody may be running any more."""
        with self.client() as client:
            saved = trainer.saved()
            saved["ledger"].check()
            # What was trained and whose acknowledgement was lost is in the ledger and served again; the rest is not.
            waiting: Counter[str] = Counter()
            view = client.run(run)
            assert not view.groups.running, view
            until(lambda: client.run(run).groups.leased + client.run(run).groups.used == 0, "leases of nobody")
            left = client.run(run).groups.ready
            while left:
                leases = client.lease(
                    LeaseRequest(run_id=run, consumer="balance", max_groups=left, wait_s=20, ttl_s=600)
                )
                for lease in leases:
                    left -= 1
                    if lease.group.group_id in saved["trained_groups"]:
                        continue  # in the ledger: only its acknowledgement was lost
                    for tokens in lease.tokens.values():
                        waiting.update(tokens)
        for version, sampled in view.sampled.items():
            account = saved["ledger"].accounts().get(version)
            books = account.sampled if account else 0
            elsewhere = sum(tokens.get(version, 0) for tokens in view.not_trained.values())
            assert sampled == books + elsewhere + waiting[version], (version, view, saved["ledger"].accounts(), waiting)
        assert saved["ledger"].accounts().keys() <= view.sampled.keys()
        return view

    def close(self) -> None:
        for trainer in self.trainers:
            if trainer.process.poll() is None:
                trainer.kill()


@contextlib.contextmanager
def product(
    folder: Path, *, worker: tuple[str, ...] | None = WORKER, proxy: tuple[str, ...] = (), key: str | None = None
) -> Iterator[Product]:
    """worker: None: it is started later. proxy: more of its options. key: the admin key among them."""
    server = RedisServer()
    try:
        given = ["--redis-url", server.url, *proxy]
        with running(folder / "stack", list(worker) if worker else None, proxy=given) as stack:
            one = Product(folder, server, stack, key=key)
            try:
                yield one
            finally:
                one.close()
    finally:
        server.close()


class Talkers(Executor):
    """An `Executor`: agents of two short turns each, through the official SDK, in threads. Every other trial of a group is worth
    1, so that each group says something; how long they are is drawn by the model."""

    def __init__(self, threads: int = 8) -> None:
        self._pool = ThreadPoolExecutor(threads)

    async def run(self, job: TrialJob) -> Exit:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._talk, job)

    async def clear(self, folder: Path) -> None:
        """Threads of this process can't have been left by another one."""

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _talk(self, job: TrialJob) -> Exit:
        messages: list[Any] = [{"role": "user", "content": f"Tell me about {job.environment['STENO_TASK_TASK_ID']}."}]
        with openai.OpenAI(
            base_url=job.environment["OPENAI_BASE_URL"], api_key=job.environment["OPENAI_API_KEY"], max_retries=8
        ) as client:
            try:
                for _ in range(2):
                    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=16)
                    messages += [
                        {"role": "assistant", "content": answer.choices[0].message.content or ""},
                        {"role": "user", "content": "Go on."},
                    ]
            except openai.OpenAIError as error:
                return Exit(2, error=str(error))
        (job.workdir / "reward.txt").write_text(str(int(job.trial_id.rsplit(".", 1)[1]) % 2))
        return Exit(0)


def tasks(prefix: str, count: int) -> Iterator[Planned]:
    for number in range(count):
        yield Planned(Task(f"{prefix}-{number}", {"task_id": f"{prefix}-{number}"}), "0")


@contextlib.asynccontextmanager
async def rolling(
    one: Product, prefix: str, *, groups: int = 10_000, bounded: bool = True, run: str = RUN
) -> AsyncIterator[asyncio.Task[list[TrialResult]]]:
    """Agents run meanwhile, held back by the staleness bound as in any run; those that run at the end are given up."""
    talkers = Talkers()
    options = GroupOptions(run, size=GROUP_SIZE, in_flight=8, sampling=LAW, resumable=False)
    async with AsyncClient(one.url, retries=12) as client:
        trials = RunnerOptions(("talk",), one.folder / "trials", timeout_s=SLOW_S, keep="none", inherited={})
        runner = TrialRunner(client, ExecutorPlayer(client, talkers, trials), trials)
        admission = Admission(GROUPS_PER_STEP if bounded else None, 1)
        task = asyncio.create_task(Rollouts(client, runner, options, admission=admission).run(tasks(prefix, groups)))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(talkers.close)
    if task.done() and not task.cancelled():
        task.result()


async def thread(call: Callable[..., Any], *arguments: Any) -> Any:
    """What waits for processes, while agents run on this loop."""
    return await asyncio.to_thread(call, *arguments)

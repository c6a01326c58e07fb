"""The trainer's Job on two nodes, on this machine: each pod is the container's command with the container's variables, restarted
when it fails, as the kubelet does. Names become loopback addresses, volumes folders."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.helm.support import environment, only, pods, render
from tests.integration.loop.product import RUN, Product, Trainer, product, rolling, thread
from tests.support.programs.ports import free_port
from tests.support.programs.processes import until
from tests.support.programs.stack import ROOT

pytestmark = pytest.mark.loop

SETTINGS = {
    "run": RUN, "device": "cpu", "precision": "float32", "learning_rate": 1e-4, "groups_per_step": 2,
    "micro_batch_tokens": 4096, "activation_checkpointing": False, "checkpoint_every": 1, "lease_ttl_s": 10,
    "probe_tolerance": 0.01, "total_steps": 6, "max_staleness_steps": 1, "send_dtype": "float32",
    "metrics_file": "/checkpoints/metrics.jsonl",
}  # fmt: skip


@dataclass
class Pod:
    command: list[str]
    variables: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        self.starts += 1
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=self.variables, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    def keep(self) -> int | None:
        """As the Job's controller, which replaces a pod that failed. Returns: how it ended, if it did well."""
        assert self.process is not None
        code = self.process.poll()
        if code:
            assert self.starts < 8, self.said()
            self.start()
        return None if code else code

    def kill(self) -> None:
        """At once, with all of its ranks: the node is gone."""
        if self.process is not None and self.process.poll() is None:
            main = psutil.Process(self.process.pid)
            for process in [*main.children(recursive=True), main]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            self.process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""


@dataclass
class Job:
    pods: list[Pod]
    folder: Path

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """While pods that fail are started again."""

        def happened() -> Any:
            for pod in self.pods:
                if pod.process is not None:
                    pod.keep()
            return condition()

        return until(happened, f"{what}: {[pod.said() for pod in self.pods]}", within_s=600)

    def complete(self) -> bool:
        return all(pod.process is not None and pod.process.poll() == 0 for pod in self.pods)

    @property
    def trainer(self) -> Trainer:
        """What it wrote."""
        assert self.pods[0].process is not None
        return Trainer(self.folder, self.pods[0].process, self.pods[0].log)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Product]:
    with product(tmp_path) as running:
        yield running


@pytest.fixture
def job(one: Product, tmp_path: Path) -> Iterator[Job]:
    trainer = {
        "enabled": True, "image": "steno-trainer:1", "nodes": 2, "processesPerNode": 1, "shutdownSeconds": 60,
        "settings": SETTINGS | {"model": one.model}, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 1000000}},
        "checkpoints": {"existingClaim": "our-checkpoints"},
    }  # fmt: skip
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps({"trainer": trainer}))  # YAML takes JSON
    manifests = render(values)
    spec = pods(manifests)["run-steno-trainer"]["spec"]
    [container] = spec["containers"]
    assert container["command"][:3] == ["python3", "-m", "steno_cli.torchrun"]
    command = [sys.executable, *container["command"][1:]]
    checkpoints, config, keys = (tmp_path / name for name in ("checkpoints", "config", "keys"))
    for folder in (checkpoints, config, keys):
        folder.mkdir()
    (checkpoints / "checkpoints").symlink_to("state")  # as `Trainer` looks for them
    (config / "deepspeed.json").write_text(only(manifests, "ConfigMap", "run-steno-trainer")["data"]["deepspeed.json"])
    (keys / "admin-key").write_text("any")
    domain, port = "run-steno-trainer.training.svc.cluster.local", free_port()
    made = []
    for node in (0, 1):
        home = tmp_path / f"home-{node}"
        home.mkdir()
        here = {
            "$(NODE)": str(node), f"run-steno-trainer-0.{domain}": "127.0.0.1", f"run-steno-trainer-1.{domain}": "127.0.0.2",
            ":29400": f":{port}", "/var/lib/steno": str(home), "/checkpoints": str(checkpoints), "/etc/steno": str(config),
            "/run/secrets/steno": str(keys), "http://run-steno-control.training.svc:8081": one.url,
        }  # fmt: skip
        variables = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        for name, value in environment({"spec": spec}).items():
            for there, mapped in here.items():
                value = value.replace(there, mapped)
            variables[name] = value
        # A pod knows by its hosts file whether it is the first; here all is loopback.
        variables["PET_RDZV_CONF"] += f",is_host={int(node == 0)}"
        # Only the first rank has the port, and both are one machine here.
        variables["STENO_TRAIN_METRICS_HOST"] = "127.0.0.1"
        variables["STENO_TRAIN_METRICS_PORT"] = "0"
        made.append(Pod(command, variables, tmp_path / f"node-{node}.log"))
    found = Job(made, checkpoints)
    try:
        yield found
    finally:
        for pod in found.pods:
            pod.kill()


@pytest.mark.timeout(1800)
async def test_two_nodes_meet_in_either_order_and_again_after_a_node_was_lost(one: Product, job: Job) -> None:
    first, second = job.pods
    async with rolling(one, "task"):
        second.start()  # its image was there sooner
        await thread(
            until, lambda: second.process and psutil.Process(second.process.pid).cpu_times().user > 0.5, "it runs"
        )
        first.start()
        await thread(job.until, lambda: len(job.trainer.steps) >= 2, "two steps of two nodes")
        second.kill()
        await thread(job.until, job.complete, "the run's end, after the second node came back")
    assert second.starts >= 2
    assert [line["step"] for line in job.trainer.steps][-1] == SETTINGS["total_steps"]
    assert job.trainer.newest().name.endswith(str(SETTINGS["total_steps"]))
    await thread(one.balance, job.trainer)


ENDS = """
import signal, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
print("it runs", flush=True)
while not asked:
    time.sleep(0.1)
time.sleep(3)
print("it ends well", flush=True)
"""


def test_a_node_that_is_drained_gets_its_time_and_is_no_finished_run(tmp_path: Path) -> None:
    """torchrun waits for its ranks, and its own code is not 0: else the Job would be complete."""
    words = ["trainer.enabled=true", "trainer.image=i:1", "trainer.settings.model=m", "trainer.processesPerNode=2"]
    spec = pods(render("default", *(word for found in words for word in ("--set", found))))["run-steno-trainer"]
    (tmp_path / "ends.py").write_text(ENDS)
    variables = {"PATH": os.environ["PATH"], **environment(spec)} | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    pod = Pod([sys.executable, "-m", "steno_cli.torchrun", str(tmp_path / "ends.py")], variables, tmp_path / "log")
    ranks: list[psutil.Process] = []
    pod.start()
    try:
        until(lambda: pod.said().count("it runs") == 2, f"two ranks: {pod.said()}")
        assert pod.process is not None
        # It may be slower than the ranks that it starts, and forgets those of which it has no list yet. Once it has, it sleeps
        # again and again.
        slept = psutil.Process(pod.process.pid).num_ctx_switches
        before = slept().voluntary
        until(lambda: slept().voluntary >= before + 10, "torchrun watches its ranks")
        ranks = psutil.Process(pod.process.pid).children()
        pod.process.terminate()
        assert pod.process.wait(300) == 1, pod.said()
    finally:
        pod.kill()
        for rank in ranks:  # which it may have left
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
    assert pod.said().count("it ends well") == 2

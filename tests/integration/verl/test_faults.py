"""verl's sessions under faults, in both modes: the proxy is killed, agent-loop workers are killed, trials fail."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import ray
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from steno import Client
from steno_adapters.verl.agent_host import job_facts
from steno_adapters.verl.job import ACTOR, JobFacts
from steno_adapters.verl.settings import VerlSettings
from tests.integration.verl.verl_job import (
    ONE_WORKER,
    VerlJob,
    clear_rows,
    loop_file,
    ray_logs,
    task_folders,
    verl_config,
)
from tests.support.machine.redis_server import RedisServer
from tests.support.programs.processes import until
from tests.support.programs.stack import running

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800), pytest.mark.usefixtures("cluster")]


def turns_of(client: Client, run: str) -> int:
    return sum(session.counts.turns for session in client.session_page(run_id=run).items)


def agents_that_run(folder: Path) -> list[str]:
    """Processes whose working folder is in this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if folder in (process / "cwd").resolve().parents:
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


@ray.remote(num_cpus=0)
class LoopWorker:
    """What an agent-loop worker of a verl without Steno's manager asks at its first session."""

    def facts(self, config: Any, file: Path) -> JobFacts:
        return asyncio.run(job_facts(config, VerlSettings.found(file, {})))


def is_gone(name: str) -> bool:
    with contextlib.suppress(ValueError):
        ray.get_actor(name)
        return False
    return True


def test_without_the_manager_the_worker_that_asked_first_keeps_the_jobs_actor_and_its_proxy(tmp_path: Path) -> None:
    """Ray ends an actor once no handle is left but those that were found by its name."""
    until(lambda: is_gone(ACTOR), "the job of the test before")
    tasks = task_folders(tmp_path / "tasks", {"plain": "Write a note."})
    config = verl_config(loop_file(tmp_path, tasks))
    workers = [LoopWorker.remote() for _ in range(2)]
    try:
        asked = [ray.get(worker.facts.remote(config, tmp_path / "agents.yaml")) for worker in workers * 3]
        assert asked == asked[:1] * 6, "all of one start, with one proxy"
        with Client(asked[0].proxy, asked[0].key) as client:
            assert client.models() == [], "it is there"
    finally:
        for worker in workers:
            ray.kill(worker)
    until(lambda: is_gone(ACTOR), "it ends with its maker")


def test_the_proxy_is_killed_and_comes_back_while_agents_play(tmp_path: Path, redis_server: RedisServer) -> None:
    """Standalone: the proxy is somebody else's."""
    with running(tmp_path / "proxy", None, proxy=["--redis-url", redis_server.url]) as stack:
        tasks = task_folders(tmp_path / "tasks", {"plain": "Write a note."})
        file = loop_file(tmp_path, tasks, proxy=stack.url, run="killed")
        job = VerlJob(verl_config(file, ONE_WORKER), slow_s=1.0)
        client = Client(stack.url, retries=20)
        try:
            assert (job.facts.proxy, job.facts.run) == (stack.url, "killed")
            uids = job.submit(["plain"])
            until(lambda: turns_of(client, "killed"), lambda: stack.logs() + ray_logs())
            stack.proxy.kill()
            stack.proxy.wait()
            stack.restart_proxy("--redis-url", redis_server.url)
            assert job.ended(uids) == {uids[0]: "finished"}, ray_logs()
            keys = job.keys(uids[0])
            assert keys == [f"{uids[0]}_0_0", f"{uids[0]}_1_0"], ray_logs()
            for key in keys:
                row = job.row(key)
                recorded = [
                    sample.to_numpy()[0].tolist() for sample in client.samples(row["extra_fields"]["steno_trial_id"])
                ]
                assert row["input_ids"].tolist() in recorded
            until(lambda: client.run("killed").groups.acknowledged == 1, lambda: str(client.run("killed")))
        finally:
            client.close()
            job.close()


def test_what_killed_workers_leave_is_ended_and_a_failed_trial_can_fail_its_group(tmp_path: Path) -> None:
    """A batch that is cancelled: its workers are killed. The next ones, in the same work_dir, end its agents and trials."""
    clear_rows()
    tasks = task_folders(tmp_path / "tasks", {"plain": "Write a note.", "fail": "Write a note. FAIL"})
    with running(tmp_path / "proxy", None) as stack:
        file = loop_file(tmp_path, tasks, run="cancelled", on_failure="fail_group")
        config = verl_config(file, f"+steno.proxy={stack.url}", ONE_WORKER)
        client = Client(stack.url)
        job = VerlJob(config, slow_s=3600.0)
        [uid] = job.submit(["plain"])
        until(lambda: ray.get(job.server.asked.remote()), ray_logs)
        job.kill_workers()
        job.close()
        assert job.keys(uid) == [], "no row of a session that was cancelled"
        left = client.session_page(run_id="cancelled").items
        assert (
            len(left) == 2 and {session.status for session in left} == {"open"} and agents_that_run(tmp_path / "trials")
        )
        again = VerlJob(config)
        try:
            [failed] = again.submit(["fail"])
            assert again.ended([failed]) == {failed: "failure"}
            assert again.keys(failed) == [f"{failed}_0_0"]
            batch, _ = ReplayBuffer("sync", {}, None, "drop", {}, poll_interval=0.2).sample(1, "train", 1)
            assert batch.keys == [f"{failed}_0_0"], "a synchronous trainer trains what the other session gave"
            ended = [client.session(session.trial_id) for session in left]
            assert [(each.status, each.end_reason) for each in ended] == [("aborted", "interrupted")] * 2
            until(lambda: not agents_that_run(tmp_path / "trials"), "mini-swe-agent ends with its command")
            until(lambda: client.run("cancelled").groups.in_hand == 0, lambda: str(client.run("cancelled")))
        finally:
            client.close()
            again.close()

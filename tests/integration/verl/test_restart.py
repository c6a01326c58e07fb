"""verl's trainer is killed, with all of its job, and started again from its checkpoint: what is trained then, and on record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import transfer_queue as tq

from steno import Client
from steno_adapters.verl.task_rows import write_parquet
from steno_rollouts.tasks.task import load_tasks
from tests.integration.verl.test_faults import agents_that_run
from tests.integration.verl.trainer_step import ENVIRONMENT, OVERRIDES, TrainerStep
from tests.integration.verl.verl_job import (
    ONE_WORKER,
    VerlJob,
    clear_rows,
    kill,
    loop_file,
    ray_logs,
    task_folders,
    verl_config,
)
from tests.support.programs.processes import until
from tests.support.programs.stack import running

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800), pytest.mark.usefixtures("cluster")]

RUN = "again"


class Start:
    """One start of the whole job: model servers, agent-loop workers, the trainer. tasks: of each step that it began."""

    def __init__(self, config: Any) -> None:
        self.job = VerlJob(config)
        self.trainer = TrainerStep.options(runtime_env={"env_vars": ENVIRONMENT}).remote(config)
        self.began_at: int = ray.get(self.trainer.begin.remote(self.job.workers))
        self.rows: dict[str, int] = {}

    def submit(self) -> str:
        """Begin a step. Returns: the uid of its prompt."""
        before = self._prompts()
        ray.get(self.trainer.submit.remote())
        [uid] = self._prompts() - before
        return uid

    def train(self) -> None:
        """Finish the step, as verl's loop does. rows: trained tokens of each row."""
        found = ray.get(self.trainer.step.remote(1))
        keys = [key for key in found["keys"] if not key.startswith("pad")]
        self.rows |= {key: int(self.job.row(key)["response_mask"].sum()) for key in keys}
        tq.kv_clear(keys=list(found["keys"]), partition_id="train")
        ray.get(self.job.server.set_weights.remote(self.weights()))

    def weights(self) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = ray.get(self.trainer.weights.remote())
        return found

    def kill(self) -> None:
        """All of it at once; what TransferQueue had goes too: verl's synchronous trainer keeps none of it."""
        kill([self.trainer, *self.job.workers])
        self.job.close()
        clear_rows()

    @staticmethod
    def _prompts() -> set[str]:
        return {key for key, tag in tq.kv_list().get("train", {}).items() if tag.get("is_prompt")}


def uids(keys: Sequence[str]) -> set[str]:
    return {key.split("_")[0] for key in keys}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_no_prompt_is_lost_or_trained_twice_when_the_trainer_is_killed(tmp_path: Path) -> None:
    """Killed in step 3, while its agents play; the checkpoint is of step 1, so that what step 2 has made is lost."""
    clear_rows()
    tasks = task_folders(tmp_path / "tasks", {name: f"Write a note. {name}" for name in "abcd"})
    write_parquet(load_tasks(tasks), tmp_path / "train.parquet", agent_name="steno", data_source="notes")
    with running(tmp_path / "proxy", None) as stack, Client(stack.url) as client:
        config = verl_config(
            loop_file(tmp_path, tasks, proxy=stack.url, run=RUN), *OVERRIDES, "data.train_batch_size=1",
            f"data.train_files={tmp_path / 'train.parquet'}", f"data.val_files={tmp_path / 'train.parquet'}",
            "data.dataloader_num_workers=0", f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
            ONE_WORKER, "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.optim.lr=3e-3",
        )  # fmt: skip

        def groups() -> dict[str, Any]:
            """By verl's uid."""
            found = (client.group(place.group_id) for place in client.groups(RUN))
            return {group.task["verl"]["uid"]: group for group in found}

        first = Start(config)
        assert first.began_at == 0
        kept = first.submit()
        first.train()
        ray.get(first.trainer.save.remote())
        saved = first.weights()
        lost = first.submit()
        first.train()
        assert not same(saved, first.weights())
        until(lambda: client.run(RUN).groups.acknowledged == 2, ray_logs)
        ray.get(first.job.server.hold.remote())
        playing = first.submit()
        until(lambda: ray.get(first.job.server.held.remote()) == 2, ray_logs)
        first.kill()

        second = Start(config)
        try:
            assert second.began_at == 1 and same(second.weights(), saved), "it goes on from its checkpoint"
            again = [second.submit()]
            second.train()
            again.append(second.submit())
            second.train()
            until(lambda: client.run(RUN).groups.in_hand == 0, lambda: str(client.run(RUN)))
            known = groups()
            task = {uid: group.task["task_id"] for uid, group in known.items()}
            assert [task[uid] for uid in again] == [task[lost], task[playing]], "no prompt is lost"
            assert task[kept] not in [task[uid] for uid in again], "what the checkpoint has is not trained again"
            assert set(known) == {kept, lost, playing, *again} and len(known) == 5, "as new groups"
            assert uids(list(first.rows)) == {kept, lost} and uids(list(second.rows)) == set(again)
            ends = [client.session(trial) for trial in known[playing].trial_ids]
            assert [(each.status, each.end_reason) for each in ends] == [("aborted", "interrupted")] * 2
            assert all(each.counts.completion_tokens for each in ends)
            until(lambda: not agents_that_run(tmp_path / "trials"), "mini-swe-agent ends with its command")
            view = client.run(RUN)
            assert (view.groups.acknowledged, view.groups.empty) == (4, 1)
            trained = sum(first.rows.values()) + sum(second.rows.values())
            assert sum(view.sampled.values()) == trained + sum(sum(each.values()) for each in view.not_trained.values())
        finally:
            second.kill()

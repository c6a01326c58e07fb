"""verl itself, on a CPU: its manager, its agent-loop workers, TransferQueue; mini-swe-agent over HTTP at temperature 0.7.

Only the model servers are not verl's: its servers of vLLM and SGLang need a GPU. `model_server.py` answers in their place, with
a real model.
`STENO_AGENTS_VENV` names the virtual environment of the agent (made by `.ci/run`).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from transformers import AutoModelForCausalLM
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from steno import Client
from steno.contracts.records import Sample
from steno.models import TINY
from tests.integration.verl.steno_step import steno_updates
from tests.integration.verl.trainer_step import ENVIRONMENT, OVERRIDES, TrainerStep
from tests.integration.verl.verl_job import VerlJob, clear_rows, loop_file, ray_logs, task_folders, verl_config
from tests.support.programs.processes import until

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1800), pytest.mark.usefixtures("cluster")]

TEMPERATURE, LR = 0.7, 3e-3
TASKS = {"plain": "Write a note.", "fork": "Write a note. FORK", "fail": "Write a note. FAIL"}


@pytest.fixture(scope="module")
def played(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Three prompts of two sessions each, played to their end, in the embedded mode."""
    clear_rows()  # the replay buffer takes whatever groups there are
    folder = tmp_path_factory.mktemp("verl")
    tasks = task_folders(folder / "tasks", TASKS)
    config = verl_config(
        loop_file(folder, tasks), "actor_rollout_ref.rollout.val_kwargs.n=2", *OVERRIDES, "data.train_batch_size=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6", "actor_rollout_ref.actor.ppo_epochs=2",
        f"actor_rollout_ref.actor.optim.lr={LR}",
    )  # fmt: skip
    job = VerlJob(config, abort_every=3)
    client = Client(job.facts.proxy, job.facts.key)
    try:
        uids = dict(zip(TASKS, job.submit(list(TASKS)), strict=True))
        status = job.ended(list(uids.values()))
        yield SimpleNamespace(job=job, client=client, uids=uids, status=status, run=job.facts.run)
    finally:
        client.close()
        job.close()


def trial_of(row: dict[str, Any]) -> str:
    return str(row["extra_fields"]["steno_trial_id"])


def rows_by_trial(played: SimpleNamespace) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for uid in played.uids.values():
        for key in played.job.keys(uid):
            row = played.job.row(key)
            found.setdefault(trial_of(row), []).append(row | {"key": key})
    return found


def to_train(sample: Sample) -> np.ndarray:
    """Which tokens of a sample are trained from it, by the record's own words."""
    _, mask, _ = sample.to_numpy()
    trained = np.zeros(len(mask), bool)
    for part in sample.completions:
        if not part.shared and not part.superseded:
            trained[part.start : part.end] = mask[part.start : part.end]
    return trained


def test_transfer_queue_has_exactly_the_recorded_ids_masks_and_logprobs(played: SimpleNamespace) -> None:
    assert set(played.status.values()) == {"finished"}, ray_logs()
    trials = rows_by_trial(played)
    assert len(trials) == 5, "two sessions of each prompt, but for the one that failed"
    for trial_id, rows in trials.items():
        recorded = {tuple(sample.to_numpy()[0].tolist()): sample for sample in played.client.samples(trial_id)}
        for row in rows:
            ids = (*row["prompts"].tolist(), *row["responses"].tolist())
            sample, before = recorded.pop(ids), len(row["prompts"])
            trained = to_train(sample)
            assert (
                row["response_mask"].astype(bool).tolist() == trained[before:].tolist() and not trained[:before].any()
            )
            mask = row["response_mask"].astype(bool)
            assert row["rollout_log_probs"][mask].tolist() == sample.to_numpy()[2][before:][mask].tolist()
            assert row["input_ids"].tolist() == list(ids)
        assert not any(to_train(sample).any() for sample in recorded.values()), "no row of these is missing"


def test_each_session_has_its_trial_in_verls_group_and_its_own_reward(played: SimpleNamespace) -> None:
    groups: dict[str, set[str]] = {}
    for trial_id, rows in rows_by_trial(played).items():
        session = played.client.session(trial_id)
        uid, number, _ = rows[-1]["key"].rsplit("_", 2)
        assert played.client.group(session.group_id).task["verl"]["uid"] == uid
        assert trial_id == f"{session.group_id}.{number}"
        groups.setdefault(uid, set()).add(session.group_id)
        for row in rows:
            assert row["rm_scores"].sum() == row["rm_scores"][-1] == pytest.approx(session.reward)
        assert session.reward == 1 / (1 + int(number))
        assert rows[-1]["response_mask"].sum() == max(row["response_mask"].sum() for row in rows) > 0
    assert {uid: len(ids) for uid, ids in groups.items()} == dict.fromkeys(played.uids.values(), 1)


def test_a_session_that_failed_is_a_gap_and_a_branch_is_a_row(played: SimpleNamespace) -> None:
    keys = {name: played.job.keys(uid) for name, uid in played.uids.items()}
    uids = played.uids
    assert keys["plain"] == [f"{uids['plain']}_0_0", f"{uids['plain']}_1_0"]
    assert keys["fail"] == [f"{uids['fail']}_0_0"]
    assert keys["fork"] == [f"{uids['fork']}_{session}_{row}" for session in (0, 1) for row in range(4)], (
        "its agent's conversation, two that begin alike, and a partial one"
    )


def test_verls_law_is_forced_and_the_recorded_logprobs_are_the_models_at_it(played: SimpleNamespace) -> None:
    asked = ray.get(played.job.server.asked.remote())
    assert {(each["temperature"], each["top_p"], each["top_k"], each["logprobs"]) for each in asked} == {
        (0.7, 1.0, -1, True)
    }
    for rows in rows_by_trial(played).values():
        assert max(worst_difference(row) for row in rows) < 1e-4


def worst_difference(row: dict[str, Any], weights: dict[str, np.ndarray] | None = None) -> float:
    """Between a row's log-probabilities and a model's own: the tiny one's, or with other weights."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    before, mask = len(row["prompts"]), row["response_mask"].astype(bool)
    ids = torch.tensor(row["input_ids"])
    with torch.inference_mode():
        law = torch.log_softmax(model(ids[None]).logits[0] / TEMPERATURE, -1)
    own = law[torch.arange(before - 1, len(ids) - 1), ids[before:]].numpy()
    return float(np.abs(own - row["rollout_log_probs"])[mask].max())


def test_each_token_has_the_step_that_sampled_it_also_where_an_answer_was_aborted(played: SimpleNamespace) -> None:
    several = 0
    for session in played.client.sessions(run_id=played.run):
        for turn in played.client.turns(session.trial_id):
            steps = [int(span.version.rpartition("/")[2]) for span in turn.versions]
            assert steps == sorted(steps) and all(
                span.version.startswith(played.job.facts.lineage) for span in turn.versions
            )
            several += len(set(steps)) > 1
    for rows in rows_by_trial(played).values():
        for row in rows:
            extra = row["extra_fields"]
            assert 1 <= extra["min_global_steps"] <= extra["max_global_steps"]
    assert several > 0, "an answer was gone on with under other weights"
    assert ray.get(played.job.server.broken_off_empty.remote()) > 0, "and one was asked for again from its beginning"


def test_of_a_partial_turn_what_was_sampled_is_trained(played: SimpleNamespace) -> None:
    forks = {trial: rows for trial, rows in rows_by_trial(played).items() if len(rows) > 1}
    assert len(forks) == 2
    for trial_id, rows in forks.items():
        [partial] = [turn for turn in played.client.turns(trial_id) if turn.partial]
        assert partial.completion_tokens > 0
        assert any(int(row["response_mask"].sum()) == partial.completion_tokens for row in rows)


def test_groups_are_acknowledged_once_verl_has_their_rows(played: SimpleNamespace) -> None:
    until(
        lambda: played.client.run(played.run).groups.acknowledged == len(TASKS),
        lambda: str(played.client.run(played.run)),
    )
    view = played.client.run(played.run)
    assert (view.groups.in_hand, view.groups.acknowledged) == (0, len(TASKS))
    assert set(view.not_trained) == {"aborted"} or set(view.not_trained) == {"unscored"}


def test_verls_own_step_trains_these_rows_as_steno_train_would(played: SimpleNamespace) -> None:
    """Its V1 trainer's step: replay buffer, a balanced and padded batch, the actor's log-probabilities, advantages, two updates
    with a clipped loss."""
    want = sorted(key for uid in played.uids.values() for key in played.job.keys(uid))
    groups: dict[str, dict[str, float]] = {}
    for trial_id in rows_by_trial(played):
        session = played.client.session(trial_id)
        assert session.reward is not None
        groups.setdefault(session.group_id, {})[trial_id] = session.reward
    trainer = TrainerStep.options(runtime_env={"env_vars": ENVIRONMENT}).remote(played.job.config)
    found = ray.get(trainer.step.remote(len(TASKS)))
    assert sorted(key for key in found["keys"] if not key.startswith("pad")) == want
    assert found["training/rollout_probs_diff_max"] < 1e-4, "the actor's probabilities are the recorded ones"
    assert found["actor/pg_clipfrac"] > 0, "the second update was clipped"
    losses, norms = steno_updates(played.client, played.job.facts.lineage, groups, updates=2, lr=LR)
    assert found["updates"]["loss"] == pytest.approx(losses, abs=1e-4) and abs(losses[0] - losses[1]) > 1e-3
    assert found["updates"]["grad_norm"] == pytest.approx(norms, rel=1e-3)

    weights = ray.get(trainer.weights.remote())
    step = ray.get(played.job.server.set_weights.remote(weights))
    [uid] = played.job.submit(["plain"], step=2)
    assert played.job.ended([uid]) == {uid: "finished"}
    for row in (played.job.row(key) for key in played.job.keys(uid)):
        assert row["extra_fields"]["min_global_steps"] >= step
        assert worst_difference(row, weights) < 1e-4, "what is sampled next has the new weights' log-probabilities"
    ray.kill(trainer)


def test_validation_is_told_apart_never_trained_and_a_failed_trial_counts_there(played: SimpleNamespace) -> None:
    [uid] = played.job.submit(["fail"], validate=True)
    assert played.job.ended([uid], partition="val") == {uid: "finished"}
    keys = played.job.keys(uid, "val")
    assert keys == [f"{uid}_0_0", f"{uid}_1_0"], ray_logs()
    rows = [played.job.row(key, "val") for key in keys]
    session, failed = (played.client.session(trial_of(row)) for row in rows)
    assert played.client.group(session.group_id).purpose == "eval"
    assert session.sampling.force["temperature"] == 0.0, "val_kwargs of verl"
    assert [row["rm_scores"][-1] for row in rows] == [session.reward, 0.0] == [1.0, 0.0]
    assert all(row["response_mask"].sum() > 0 for row in rows) and failed.reward is None
    assert [row["extra_fields"]["reward_extra_info"]["steno_failed"] for row in rows] == [0, 1]
    view = played.client.run(played.run)
    assert view.eval_groups.ended == 1 and view.groups.acknowledged <= len(TASKS) + 1
    assert view.not_trained["evaluation"]


def test_a_session_that_is_cancelled_fails_its_group_and_the_ledger_balances(played: SimpleNamespace) -> None:
    """Asynchronous trainers then evict the group whole, by verl's own replay buffer, and take another prompt in its place."""
    job, client = played.job, played.client
    ray.get(job.server.hold.remote())
    [uid] = job.submit(["plain"], step=3)
    until(lambda: ray.get(job.server.held.remote()) == 2, ray_logs)
    job.cancel_session(uid, 1)
    ray.get(job.server.let_go.remote())
    assert job.ended([uid]) == {uid: "failure"}
    [key] = job.keys(uid)
    assert key == f"{uid}_0_0"
    group_id = client.session(trial_of(job.row(key))).group_id
    kept, cancelled = (client.session(f"{group_id}.{number}") for number in (0, 1))
    assert (cancelled.status, cancelled.end_reason, cancelled.reward) == ("aborted", "cancelled", None)
    assert cancelled.counts.completion_tokens > 0, "it had a turn"
    assert kept.counts.completion_tokens == job.row(key)["response_mask"].sum()

    until(lambda: client.run(played.run).groups.in_hand == 0, lambda: str(client.run(played.run)))
    view = client.run(played.run)
    tags = tq.kv_list("train")["train"]
    rows = [name for name, tag in tags.items() if not tag.get("is_prompt") and not name.startswith("pad")]
    trained = sum(int(job.row(name)["response_mask"].sum()) for name in rows)
    assert sum(view.sampled.values()) == trained + sum(sum(each.values()) for each in view.not_trained.values())

    others = {name for name, tag in tags.items() if tag.get("is_prompt")} - {uid}
    fresh: list[str] = []
    buffer = ReplayBufferAsync(
        "colocate_async", {}, None, "drop", {}, poll_interval=0.2,
        refill_fn=lambda count: fresh.extend(job.submit(["plain"] * count, step=3)),
    )  # fmt: skip
    batch, _ = buffer.sample(3, "train", len(others) + 1)
    assert len(fresh) == 1 and {name.split("_")[0] for name in batch.keys} == others | set(fresh)
    assert job.keys(uid) == [], "nothing of it is trained"

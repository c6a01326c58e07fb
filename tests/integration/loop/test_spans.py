"""A rollout that spans two updates is trained as what it is: tokens of three policies, each at its recorded probability."""

from __future__ import annotations

import math
import pickle
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from steno.contracts.records import bytes_to_halves
from steno.contracts.rest import Completion, GroupSpec
from tests.integration.loop.product import LAW, RUN, Product, rolling, thread
from tests.support.weights.trained import logprobs_of

pytestmark = pytest.mark.loop


async def test_three_versions_train_with_importance_weights_of_what_was_recorded(one: Product) -> None:
    trainer = one.train(
        spy=True,
        groups_per_step=1,
        max_staleness_steps=2,
        learning_rate=1e-3,
        total_steps=3,
        checkpoints_kept=9,
        annotate=True,
    )
    await thread(trainer.until, lambda: (one.in_force() or "base/0") != "base/0", "the first weights")
    lineage = (one.in_force() or "").split("/")[0]
    with one.client() as client:
        group = await thread(client.create_group, GroupSpec(run_id=RUN, size=2, sampling=LAW))
        trials = [trial.session.trial_id for trial in group.trials]
        talks = [Talk(one, trial) for trial in trials]
        for step in (0, 1, 2):
            if step:
                async with rolling(one, f"short-{step}", groups=1, bounded=False) as short:
                    await short
                await thread(trainer.until, lambda step=step: one.in_force() == f"{lineage}/{step}", f"step {step}")
            for talk in talks:
                await thread(talk.go_on)
        for reward, trial in enumerate(trials):
            await thread(client.complete, trial, Completion(reward=float(reward)))
    await thread(trainer.wait)
    wanted = [f"{lineage}/{step}" for step in (0, 1, 2)]
    batch = pickle.loads((trainer.folder / "batch-3.pickle").read_bytes())
    assert {row.trial_id for row in batch.rows} == set(trials)
    for row in batch.rows:
        turns = one.stack.turns(row.trial_id)
        assert [span["version"] for turn in turns for span in turn["versions"]] == wanted
        recorded = [(wanted[at], value) for at, turn in enumerate(turns) for value in turn["sampling_logprobs"]]
        mask = row.loss_mask_T
        assert [row.versions[i] for i in row.version_T[mask].tolist()] == [version for version, _ in recorded]
        assert row.sampling_logprobs_T[mask].tolist() == pytest.approx([value for _, value in recorded], abs=1e-6)
    check_importance(trainer.steps[2]["values"], batch.rows, trainer.checkpoints()[1])
    assert trainer.steps[2]["values"]["staleness/max"] == 2
    await thread(one.balance, trainer)
    await thread(check_shown, one, trainer, batch)


class Talk:
    """One conversation, a turn at a time."""

    def __init__(self, one: Product, trial_id: str) -> None:
        self._url = one.stack.base_url(trial_id)
        self._messages: list[Any] = [{"role": "user", "content": "Tell me about tulips."}]

    def go_on(self) -> None:
        with openai.OpenAI(base_url=self._url, api_key="none") as client:
            answer = client.chat.completions.create(model="tiny", messages=self._messages, max_tokens=40)
        said = answer.choices[0].message.content or ""
        self._messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


def recomputed(rows: list[Any], checkpoint: Any) -> list[list[float]]:
    """Of each row, by position: its log-probability in transformers minus the recorded one; NaN where it is not trained."""
    [copy] = checkpoint.glob("weights-*")
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
    found = []
    for row in rows:
        trainer = torch.tensor([math.nan, *logprobs_of(model, row.token_ids_T.tolist())])
        found.append(torch.where(row.loss_mask_T, trainer - row.sampling_logprobs_T, math.nan).tolist())
    return found


def check_importance(values: dict[str, float], rows: list[Any], checkpoint: Any) -> None:
    """The step's own ratios are those of its weights at the start, in transformers, to the recorded probabilities."""
    differences = [value for of_row in recomputed(rows, checkpoint) for value in of_row if not math.isnan(value)]
    ratios = [math.exp(difference) for difference in differences]
    assert max(map(abs, differences)) > 0.01, "the updates changed nothing, so that nothing was proved"
    assert values["mismatch/ratio"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-3)
    assert values["mismatch/ratio_max"] == pytest.approx(max(ratios), rel=1e-2)
    assert values["mismatch/kl"] == pytest.approx(-sum(differences) / len(differences), abs=1e-4)


def check_shown(one: Product, trainer: Any, batch: Any) -> None:
    """The proxy shows what the trainer measured, and in each turn what it saw: the same differences as are recomputed."""
    with one.client() as client:
        shown = client.step_page(RUN).items
        turns = {turn.turn_id: turn for row in batch.rows for turn in client.turns(row.trial_id)}
    steps = {step["step"]: step for step in trainer.steps}
    assert [step.step for step in shown] == sorted(steps) == [1, 2, 3]
    for step in shown:
        told = steps[step.step]
        assert (step.version, step.values) == (told["version"], told["values"])
        assert step.ledger["sampled"] == told["ledger"]["sampled"] and len(step.groups) == 1
    differences = recomputed(batch.rows, trainer.checkpoints()[1])
    for row, of_row in zip(batch.rows, differences, strict=True):
        for place in row.turns:
            seen = turns[place.turn_id].annotation
            assert seen is not None and seen.advantage == pytest.approx(batch.advantages[row.trial_id])
            assert (seen.step, seen.version) == (3, steps[3]["version"])
            assert list(bytes_to_halves(seen.differences)) == pytest.approx(
                of_row[place.start : place.end], rel=1e-3, abs=1e-3
            )

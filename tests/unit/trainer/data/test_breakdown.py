"""A step's rewards by a field of the tasks, and what trials' metrics are on average."""

from __future__ import annotations

from typing import Any

from steno.contracts.records import Group
from steno.contracts.runs.leases import Lease
from steno_trainer.data.advantages import Estimator
from steno_trainer.data.lease_feed import LeasedGroup
from steno_trainer.data.ledger import Ledger
from steno_trainer.data.overlong import Overlong
from steno_trainer.data.rows import TrainingTerms
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.reporting.metrics import family_of
from steno_trainer.step.assemble import assemble
from tests.unit.trainer.recorded import VOCABULARY, Recording, session

TERMS = TrainingTerms(
    VersionHistory((PolicyVersion("a", 9),)), max_staleness_steps=9, max_tokens=400, vocabulary=VOCABULARY
)


def group(name: str, task: dict[str, Any], *rewards: float) -> LeasedGroup:
    """Trials of one turn each; their metric `passed` is twice the reward, and only the first has `lint`."""
    books, samples, tokens, trials = Ledger(), [], {}, []
    for n, reward in enumerate(rewards):
        metrics = {"passed": 2 * reward} | ({"lint": 1.0} if n == 0 else {})
        trial = session(f"{name}.{n}", reward=reward).model_copy(update={"group_id": name, "metrics": metrics})
        recording = Recording(n)
        recording.turn(None, 2, 4)
        samples += recording.samples(trial)
        trials.append(trial)
        tokens[trial.trial_id] = {"a/1": 4}
        books.sampled("a/1", 4)
    made = Group(group_id=name, size=len(trials), created_at=0.0, task=task)
    return LeasedGroup(Lease(lease_id=name, group=made, trials=trials, tokens=tokens, expires_at=1e12), samples, books)


GROUPS = [
    group("g", {"source": "easy"}, 1.0, 1.0), group("h", {"source": "easy"}, 0.0, 1.0),
    group("i", {"source": "hard"}, 0.0, 0.5), group("j", {}, 1.0, 0.0),
]  # fmt: skip


def reported(estimator: Estimator | None, **more: Any) -> dict[str, float]:
    values = assemble(GROUPS, TERMS, estimator, Overlong(), **more).values
    return {name: value for name, value in values.items() if "_by/" in name or name.startswith("trial/")}


def test_rewards_are_reported_by_the_field_that_was_asked_for() -> None:
    assert reported(Estimator.GRPO, report_by="source") == {
        "trial/lint": 1.0, "trial/passed": 1.125,
        "reward_by/easy": 0.75, "reward_by/hard": 0.25, "zero_variance_by/easy": 0.5, "zero_variance_by/hard": 0.0,
    }  # fmt: skip


def test_without_a_field_metrics_alone_are_reported_whatever_the_objective_reads() -> None:
    assert reported(None) == reported(Estimator.GRPO) == {"trial/lint": 1.0, "trial/passed": 1.125}


def test_each_name_is_of_a_family() -> None:
    found = {family_of(name)[0].prefix for name in reported(Estimator.GRPO, report_by="source")}
    assert found == {"trial", "reward_by", "zero_variance_by"}

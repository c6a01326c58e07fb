"""What a run's checkpoint has beside weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from steno_trainer.checkpoints.checkpoint import RunState
from steno_trainer.data.ledger import Ledger
from steno_trainer.data.staleness import PolicyVersion, VersionHistory


@dataclass
class TrainingState:
    """Of a run: what its checkpoint has beside weights and optimizer.

    run: its name. history: ends in the current version. ledger: of all steps that count, balanced. trained: groups whose step is
    in this state and whose acknowledgement is not confirmed yet. acknowledged: the newest of those that are confirmed, and when
    each was made. named_models: `train_models`, sorted, if a call asked for one of them; None: a release before did not write it
    down.
    """

    run: str
    history: VersionHistory
    ledger: Ledger = field(default_factory=Ledger)
    trained: set[str] = field(default_factory=set)
    named_models: tuple[str, ...] | None = ()
    acknowledged: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: RunState) -> TrainingState:
        trained, acknowledged = set(saved.trained_groups), dict(saved.acknowledged_groups)
        return cls(saved.run_id, saved.history, saved.read_ledger(), trained, saved.named_models, acknowledged)

    def saved(self) -> RunState:
        return RunState.of(
            self.run, self.history, self.ledger, self.trained, self.named_models, acknowledged=self.acknowledged
        )

    @property
    def step(self) -> int:
        return self.history.current.step

    @property
    def version(self) -> PolicyVersion:
        return self.history.current

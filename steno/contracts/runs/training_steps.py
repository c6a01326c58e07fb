"""What a trainer tells of its steps: bodies of `/runs/{run_id}/steps` and `/runs/{run_id}/annotations`.

Any trainer may post, registered or not; `steno train` does. Nothing is decided by what is posted here: it is shown.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from steno.contracts.json_limits import storable
from steno.contracts.records import TRIAL_ID, TurnAnnotation

MOST_VALUES = 512
"""Numbers of a step, and entries of its ledger."""
MOST_STEPS = 100_000
"""Steps of a run that are kept: the newest ones."""
MOST_ANNOTATIONS = 4096
"""Turns in one post. A post is 1 MiB at most, as bodies of the control plane are: some 100,000 tokens."""

Name = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(storable)]
Values = Annotated[dict[Name, FiniteFloat | None], Field(max_length=MOST_VALUES)]
Tokens = Annotated[int, Field(ge=0, le=2**63 - 1)]


class TrainingStep(BaseModel):
    """A step's numbers. The same step again: values of the same name are replaced, the others stay, and so do version, ledger
    and groups where the new body leaves them out. So a step that is taken again after a crash replaces what was lost, and an
    evaluation may be added later.

    step: number of the weights that the step made; 0: before the first. version: of those weights.
    at: Unix seconds; unset: when the proxy heard of it.
    values: by name; null: it was no finite number. `steno train` posts the names of docs/metrics.md.
    ledger: the run's books so far, tokens by outcome: `sampled`, `trained`, or the reason why not.
    groups: ids of the groups that the step took.
    """

    model_config = ConfigDict(extra="forbid")
    step: int = Field(ge=0, le=2**53)
    version: str = Field("", max_length=256)
    at: float | None = Field(None, ge=0, le=1e12, allow_inf_nan=False)
    values: Values = Field(default_factory=dict)
    ledger: Annotated[dict[Name, Tokens], Field(max_length=MOST_VALUES)] = Field(default_factory=dict)
    groups: list[Annotated[str, Field(max_length=128), AfterValidator(storable)]] = Field(
        default_factory=list, max_length=4096
    )

    def over(self, before: TrainingStep | None) -> TrainingStep:
        """This step, posted where `before` is on record."""
        if before is None:
            return self
        told = {name: value for name in ("version", "at", "ledger", "groups") if (value := getattr(self, name))}
        return before.model_copy(update=told | {"values": (before.values | self.values)})


class TrainingStepPage(BaseModel):
    """In order of their numbers. next_start: pass as `start`; None on the last page."""

    items: list[TrainingStep]
    next_start: int | None = None


class PostedAnnotation(TurnAnnotation):
    """Of one turn: `differences` has a number per completion token of it."""

    trial_id: str = Field(pattern=TRIAL_ID)
    turn_id: str = Field(max_length=128)

    def of_turn(self) -> TurnAnnotation:
        return TurnAnnotation(
            step=self.step, version=self.version, advantage=self.advantage, differences=self.differences
        )


class AnnotationPost(BaseModel):
    """`POST /runs/{run_id}/annotations`. The same turn again: the newest post is kept."""

    model_config = ConfigDict(extra="forbid")
    items: list[PostedAnnotation] = Field(max_length=MOST_ANNOTATIONS)


class AnnotationsKept(BaseModel):
    """kept: turns. gone: trials that are not among open and ended sessions (any more): deleted, or in the archive."""

    kept: int
    gone: list[str] = Field(default_factory=list)

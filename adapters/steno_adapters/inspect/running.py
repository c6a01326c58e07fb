"""What of Inspect runs in this process: evals and samples by their ids, and in which sample a task of the event loop is."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from inspect_ai.log import EvalSampleSummary
from inspect_ai.model import ModelAPI

from steno import AsyncClient, Trial


class TrialModel(Protocol):
    """What is asked of the model whose trials run (`provider.StenoAPI`). score: which of several is the reward."""

    score: str | None

    def client(self) -> AsyncClient: ...


@dataclass
class InspectSample:
    """A sample in one epoch. trial: None until the first call of the model. api: the model's API at the trial's address."""

    eval_id: str
    task: str
    epochs: int
    summary: EvalSampleSummary
    attempt: int = 1
    scored: bool = False
    trial: Trial | None = None
    api: ModelAPI | None = None
    model: TrialModel | None = None


@dataclass
class InspectEval:
    """A task that runs. run_id: Inspect's. trials: trial id -> the model that registered it; None: the trial has ended."""

    run_id: str
    task: str
    epochs: int
    trials: dict[str, TrialModel | None] = field(default_factory=dict)


EVALS: dict[str, InspectEval] = {}
SAMPLES: dict[str, InspectSample] = {}
RUNNING: ContextVar[str | None] = ContextVar("steno_sample", default=None)

"""What of Inspect runs in this process: evals and samples by their ids, and in which sample a task of the event loop is."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inspect_ai.log import EvalSampleSummary
from inspect_ai.model import ModelAPI

from steno import Trial

if TYPE_CHECKING:
    from steno_adapters.inspect.provider import StenoAPI


@dataclass
class InspectSample:
    """A sample in one epoch. trial: once the model has been asked; api: what asks it at the trial's address."""

    eval_id: str
    task: str
    epochs: int
    summary: EvalSampleSummary
    attempt: int = 1
    scored: bool = False
    trial: Trial | None = None
    api: ModelAPI | None = None
    model: StenoAPI | None = None


@dataclass
class InspectEval:
    """A task that runs. trials: who registered each; None: it has ended."""

    task: str
    epochs: int
    trials: dict[str, StenoAPI | None] = field(default_factory=dict)


EVALS: dict[str, InspectEval] = {}
SAMPLES: dict[str, InspectSample] = {}
RUNNING: ContextVar[str | None] = ContextVar("steno_sample", default=None)

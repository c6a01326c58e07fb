"""What a step measured, as others are told: a line of the metrics file, and the proxy's view of the run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steno.contracts.runs.training_steps import TrainingStep
from steno_trainer.data.ledger import Account
from steno_trainer.reporting.trackers import added, outcomes
from steno_trainer.run.training_state import TrainingState


def shown_step(
    state: TrainingState, values: Mapping[str, float], groups: Sequence[str], stepped: bool
) -> TrainingStep | None:
    """A step as it is posted to the proxy: the values that `added` keeps. None: there is nothing to post."""
    values = added(values, stepped)
    if not stepped and not values:
        return None
    finite = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
    ledger = outcomes(state.ledger.total()) if stepped else {}
    return TrainingStep(
        step=state.step, version=str(state.version), at=time.time(), values=finite, ledger=ledger, groups=list(groups[:4096]),
    )  # fmt: skip


def metrics_line(state: TrainingState, values: dict[str, float], touched: Mapping[str, Account], stepped: bool) -> str:
    """One line of the metrics file: what the step measured, and the books so far, over all versions and of those that the step
    touched. stepped: False: there was nothing to train, or it is the evaluation before the first step."""
    body = {
        "step": state.step,
        "version": str(state.version),
        "time": time.time(),
        "stepped": stepped,
        "values": values,
        "ledger": _plain(state.ledger.total()),
        "ledger_by_version": {version: _plain(account) for version, account in touched.items()},
    }
    return json.dumps(body) + "\n"


def _plain(account: Account) -> dict[str, Any]:
    untrained = {reason.value: tokens for reason, tokens in account.untrained.items()}
    return {"sampled": account.sampled, "trained": account.trained, "untrained": untrained}


def append_line(file: Path, line: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(line)

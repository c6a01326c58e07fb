"""The results file: one JSON line per trial that has ended, and what a later start of the same run reads from it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from steno.contracts.errors import ConfigError
from steno.contracts.rest import GroupTrials
from steno_rollouts.outcome import TrialResult
from steno_rollouts.trials.runner import FailedTrial


def ended_trials(path: Path | None) -> dict[str, TrialResult]:
    """Trials that a results file has, by id. A last line that was cut off by a kill counts for nothing.

    Raises: ConfigError: the file is something else.
    """
    if path is None or not path.exists():
        return {}
    found = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            result = TrialResult(**json.loads(line))
            found[result.trial_id] = result
        except (ValueError, TypeError):
            if number < len(lines):
                raise ConfigError(
                    f"results: {path}, line {number}: not the result of a trial", field="results"
                ) from None
    return found


class ResultsFile:
    """An `Observer` that appends, line by line. A trial that the file has already is not written again."""

    def __init__(self, path: Path, known: Collection[str]) -> None:
        """Raises: ConfigError: it can't be written."""
        self._known = set(known)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _trim(path)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"results: {path}: {error.strerror}", field="results") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def group_started(self, group: GroupTrials) -> None: ...

    def trial_started(self, trial_id: str) -> None: ...

    def trial_failed(self, failed: FailedTrial) -> None: ...

    def held_back(self, why: str | None) -> None: ...

    def trial_ended(self, result: TrialResult) -> None:
        if result.trial_id not in self._known:
            self._known.add(result.trial_id)
            self._file.write(json.dumps(result.row(), ensure_ascii=False) + "\n")


def _trim(path: Path) -> None:
    """Take off a last line that a kill cut off: with more after it, it would be a broken line in the middle."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)

"""The results file: one JSON line per trial that has ended, and what a later start of the same run reads from it."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from steno.contracts.errors import ConfigError
from steno.contracts.rest import GroupTrials
from steno_rollouts.outcome import TrialResult
from steno_rollouts.trials.runner import FailedTrial

log = logging.getLogger(__name__)

NEWLINE = b"\n"


def ended_trials(path: Path | None) -> dict[str, TrialResult]:
    """Trials that a results file has, by id. A last line that was cut off by a kill counts for nothing.

    Raises: ConfigError: the file is something else.
    """
    if path is None:
        return {}
    try:
        lines = path.read_bytes().split(NEWLINE)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"results: {path}: {error.strerror}", field="results") from None
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            result = TrialResult(**json.loads(line.decode()))
            found[result.trial_id] = result
        except (ValueError, TypeError, RecursionError) as error:
            if number < len(lines) or not _is_cut_off(line):
                why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "not the result of a trial"
                raise ConfigError(f"results: {path}, line {number}: {why}", field="results") from None
    return found


class ResultsFile:
    """An `Observer` that appends, line by line. A trial that the file has already is not written again. Lines that can't be
    written (a full disk, say) are tried again with each later one, and at the end."""

    def __init__(self, path: Path, known: Collection[str]) -> None:
        """Raises: ConfigError: it can't be written."""
        self._path = path
        self._known = set(known)
        self._waiting = b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            trim(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"results: {path}: {error.strerror}", field="results") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raises: ConfigError: lines could not be written; not in the place of another error."""
        with self._file:
            failed = self._write()
        if failed is not None and error is None:
            raise ConfigError(
                f"results: {self._path}: {failed.strerror}: {self._waiting.count(NEWLINE)} trials are not in it; they are on "
                "record, and the same --run, started again, writes them",
                field="results",
            )

    def group_started(self, group: GroupTrials) -> None: ...

    def trial_started(self, trial_id: str) -> None: ...

    def trial_waits(self, result: TrialResult) -> None: ...

    def trial_failed(self, failed: FailedTrial) -> None: ...

    def held_back(self, why: str | None) -> None: ...

    def trial_ended(self, result: TrialResult) -> None:
        if result.trial_id not in self._known:
            self._known.add(result.trial_id)
            self._waiting += json.dumps(result.row()).encode() + NEWLINE
            if (failed := self._write()) is not None:
                log.warning("results: %s: %s: it is tried again with the next trial", self._path, failed.strerror)

    def _write(self) -> OSError | None:
        """All that waits, or nothing of it."""
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(self._waiting) == len(self._waiting):
                self._waiting = b""
                return None
            failed = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            failed = error
        self._file.truncate(size)
        return failed


def trim(path: Path) -> None:
    """Take off a last line that a kill cut off: with more after it, it would be a broken line in the middle. One that is whole
    gets the newline that it lacks."""
    if path.exists():
        with path.open("r+b") as file:
            text = file.read()
            last = text.rfind(NEWLINE) + 1
            if last == len(text):  # another launcher's line may have come since
                return
            if _is_cut_off(text[last:]):
                file.truncate(last)
            else:
                file.write(NEWLINE)


def _is_cut_off(line: bytes) -> bool:
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return True
    return False

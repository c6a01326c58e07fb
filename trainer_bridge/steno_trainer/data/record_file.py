"""A file of exported samples, read group by group: `steno sessions export --records samples`, as JSON lines or Parquet.

A group's samples are read when they are asked for. Memory holds only the place of each sample, and the names of turns while the
file is checked, so a file may be larger than memory. Nothing is tokenised, and nothing of a sample is changed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from steno.config.extras import how_to_install
from steno.contracts.errors import ConfigError
from steno.contracts.records import Sample
from steno.contracts.runs.train_models import asked_for

log = logging.getLogger(__name__)

_NESTED = ("turn_ids", "spans", "completions")
"""Columns of Parquet that are JSON text."""
_LIGHT = ["trial_id", "group_id", "leaf_id"]


@dataclass
class RecordedGroup:
    """Where its samples stand, in the file's order. rows: numbers from 1, as errors name them. places: by their file."""

    group_id: str
    rows: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


class _Rows(Protocol):
    def names(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(number of the row from 1, place, its `_LIGHT` fields). Raises: ConfigError: no rows of samples."""
        ...

    def row(self, place: int) -> dict[str, Any]:
        """Raises: ValueError: names the field whose text is not valid JSON."""
        ...

    def close(self) -> None: ...


class RecordFile:
    """Samples of a file. groups: by their ids, in the order of their first samples. ungrouped: samples without a group, which
    nobody can train."""

    def __init__(self, path: Path, rows: _Rows) -> None:
        self.path = path
        self.groups: dict[str, RecordedGroup] = {}
        self.ungrouped = 0
        self._rows = rows
        seen: dict[tuple[str, str], int] = {}
        grouped: dict[str, tuple[str, int]] = {}
        for number, place, names in rows.names():
            for name in ("trial_id", "leaf_id"):
                if not isinstance(names.get(name), str):
                    raise _wrong(
                        path, number, f"{name}: got {names.get(name)!r}, must be text: is it a row of samples?"
                    )
            leaf = names["trial_id"], names["leaf_id"]
            if (first := seen.setdefault(leaf, number)) != number:
                raise _wrong(path, number, f"the sample of trial {leaf[0]}, leaf {leaf[1]}, is in row {first} already")
            if (group_id := names.get("group_id")) is None:
                self.ungrouped += 1
                continue
            if not isinstance(group_id, str):
                raise _wrong(path, number, f"group_id: got {group_id!r}, must be text or null")
            before, row = grouped.setdefault(leaf[0], (group_id, number))
            if before != group_id:
                words = f"group_id: got {group_id}, must be {before} as in row {row}: trial {leaf[0]} is in one group"
                raise _wrong(path, number, words)
            group = self.groups.setdefault(group_id, RecordedGroup(group_id))
            group.rows.append(number)
            group.places.append(place)

    @classmethod
    def open(cls, path: Path) -> RecordFile:
        """Raises: ConfigError: no such file, another format, rows of turns or sessions, a sample twice, a trial of two groups,
        no sample of a group."""
        try:
            rows: _Rows = _Parquet(path) if path.suffix == ".parquet" else _JsonLines(path)
        except OSError as error:
            raise ConfigError(f"records: {path}: {error.strerror or error}", field="records") from error
        found = cls(path, rows)
        if not found.groups:
            raise ConfigError(f"records: {path} has no sample of a group, so nothing to compare", field="records")
        return found

    def check(self, models: Sequence[str] = (), policy: str = "default") -> None:
        """Read each sample that can be trained once, in the file's order, and keep none. A warning says what the file does not
        train because single samples of a trial are missing.

        Args: models: calls that are trained, as `train_models` has them. policy: the one in training.
        Raises: ConfigError: as `samples`; no call is one of these, or a row does not say what it asked for.
        """
        asked, named = set[str](), False
        rewards: dict[str, tuple[float | None, int]] = {}
        turns = _SharedTurns()
        rows = [row for group in self.groups.values() for row in zip(group.rows, group.places, strict=True)]
        log.info("%s: reading %d samples of %d groups to check them", self.path, len(rows), len(self.groups))
        for number, place in sorted(rows):
            sample = self._checked(number, place, rewards)
            turns.look(sample, number, policy)
            for part in sample.completions if models else ():
                if part.policy != policy or part.superseded:
                    continue
                try:
                    named |= asked_for(part, models)
                except ConfigError as error:
                    raise _wrong(self.path, number, error.message) from None
                asked.add(part.model or "")
        if (lost := turns.lost()) is not None:
            tokens, number, trial_id = lost
            log.warning(
                "%s: %d sampled tokens are not trained: several samples of a trial share them, only the first of these samples "
                "trains them, and it is not in the file (row %d, trial %s, has some): keep all rows of a trial, or none",
                self.path, tokens, number, trial_id,
            )  # fmt: skip
        if models and not named:
            raise ConfigError(
                f"train_models: got {', '.join(models)}; the calls in {self.path} asked for {shown_names(asked)}",
                field="train_models",
            )

    def samples(self, group: RecordedGroup) -> list[Sample]:
        """Raises: ConfigError: a row is no sample, or a trial has several rewards: names row and trial."""
        rewards: dict[str, tuple[float | None, int]] = {}
        return [self._checked(number, place, rewards) for number, place in zip(group.rows, group.places, strict=True)]

    def close(self) -> None:
        self._rows.close()

    def _checked(self, number: int, place: int, rewards: dict[str, tuple[float | None, int]]) -> Sample:
        """Args: rewards: of each trial so far, and of which row."""
        sample = self._sample(number, place)
        before, row = rewards.setdefault(sample.trial_id, (sample.reward, number))
        if before != sample.reward and not (_is_nan(before) and _is_nan(sample.reward)):
            words = f"reward: got {sample.reward}, must be {before} as in row {row}: a trial has one"
            raise _wrong(self.path, number, f"trial {sample.trial_id}: {words}")
        return sample

    def _sample(self, number: int, place: int) -> Sample:
        try:
            row = self._rows.row(place)
        except ValueError as error:
            raise _wrong(self.path, number, str(error)) from error
        try:
            return Sample.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            got = "" if first["type"] == "missing" else f" (got {str(first['input'])[:80]!r})"
            words = f"trial {row['trial_id']}: no sample: {where}: {first['msg']}{got}"
            raise _wrong(self.path, number, words) from error


class _SharedTurns:
    """Turns that several samples of a trial hold. One of these samples trains them; the others have them as `shared`."""

    def __init__(self) -> None:
        self._own: dict[str, set[str]] = {}  # of each trial, the turns that a sample trains
        self._shared: dict[tuple[str, str], tuple[int, int]] = {}  # (trial, turn) -> (tokens, row)

    def look(self, sample: Sample, number: int, policy: str) -> None:
        own = self._own.setdefault(sample.trial_id, set())
        for turn_id, part in zip(sample.turn_ids, sample.completions, strict=False):
            if not part.shared:
                own.add(turn_id)
            elif part.policy == policy and not part.superseded and part.end > part.start:
                self._shared.setdefault((sample.trial_id, turn_id), (part.end - part.start, number))

    def lost(self) -> tuple[int, int, str] | None:
        """(tokens that no sample trains, the first row that has some, its trial)"""
        found = [
            (row, trial_id, tokens)
            for (trial_id, turn_id), (tokens, row) in self._shared.items()
            if turn_id not in self._own[trial_id]
        ]
        return (sum(tokens for _, _, tokens in found), *min(found)[:2]) if found else None


def shown_names(names: Iterable[str]) -> str:
    """Of models, in a message: 20 of them."""
    found = sorted(names)
    return ", ".join(map(repr, found[:20])) + (", …" if len(found) > 20 else "")


class _JsonLines:
    """A place is where a line begins, in bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")

    def names(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        place = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                yield number, place, _as_object(self._path, number, line)
            place += len(line)

    def row(self, place: int) -> dict[str, Any]:
        self._file.seek(place)
        row: dict[str, Any] = json.loads(self._file.readline())
        return row

    def close(self) -> None:
        self._file.close()


class _Parquet:
    """A place is the number of a row from 0. Of the rows around it one row group is kept."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            words = f"records: Parquet needs pyarrow, which is not installed: {how_to_install('export')}"
            raise ConfigError(words, field="records") from None
        try:
            self._file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"records: {path} is not a Parquet file: {error}", field="records") from error
        metadata = self._file.metadata
        self._starts = [0]
        for number in range(metadata.num_row_groups):
            self._starts.append(self._starts[-1] + metadata.row_group(number).num_rows)
        self._kept: tuple[int, Any] | None = None

    def names(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        columns = [name for name in _LIGHT if name in self._file.schema_arrow.names]
        place = 0
        for batch in self._file.iter_batches(columns=columns):
            for row in batch.to_pylist():
                yield place + 1, place, row
                place += 1

    def row(self, place: int) -> dict[str, Any]:
        number = next(n for n in range(len(self._starts) - 1) if place < self._starts[n + 1])
        if self._kept is None or self._kept[0] != number:
            self._kept = number, self._file.read_row_group(number)
        row: dict[str, Any] = self._kept[1].slice(place - self._starts[number], 1).to_pylist()[0]
        return row | {name: _nested(name, row[name]) for name in _NESTED if isinstance(row.get(name), str)}

    def close(self) -> None:
        self._file.close()


def _is_nan(reward: float | None) -> bool:
    return reward is not None and math.isnan(reward)


def _nested(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}: not valid JSON: {error}") from error


def _as_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _wrong(path, number, f"not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise _wrong(path, number, f"got {str(row)[:80]!r}, must be an object")
    return row


def _wrong(path: Path, number: int, what: str) -> ConfigError:
    return ConfigError(f"records: {path}, row {number}: {what}", field="records")

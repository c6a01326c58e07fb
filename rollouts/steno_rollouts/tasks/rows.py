"""Rows of a file or folder that holds tasks as data, one after the other: JSON lines, Parquet, a data set that Hugging Face's
`datasets` saved. Large ones are not loaded: a row is read when it is asked for.

Parquet and data sets are read by `pyarrow` (the extra `export`); `datasets` itself is not needed.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno.contracts.json_limits import storable

PARQUET = ".parquet"
ROWS_AT_ONCE = 256
"""Of a column file, decoded in memory."""
_SPLITS = "dataset_dict.json"
_STATE = "state.json"
_INDICES = ("_indices_data_files", "_indices_files")


@dataclass(frozen=True)
class Row:
    """A row and where it stands, for whoever must name it. place: `line 3` or `row 3`, counted from 1; file: which one."""

    file: Path
    place: str
    fields: Mapping[str, Any]

    @property
    def where(self) -> str:
        return f"tasks: {self.file}, {self.place}"


def is_rows(path: Path) -> bool:
    """Whether a folder holds rows and not folders of tasks."""
    return (path / _SPLITS).is_file() or (path / _STATE).is_file() or bool(_shards(path))


def rows(path: Path, split: str | None = None) -> Iterator[Row]:
    """Args: split: of a data set that has several. Raises: ConfigError naming the file, the row and the field."""
    if path.is_dir():
        yield from _parquet(path, _of_split(path, split)) if _shards(path) else _data_set(path, split)
    elif split is not None:
        raise ConfigError(f"split: got {split!r}, and {path} is a file: only folders have splits", field="split")
    elif path.suffix == PARQUET:
        yield from _parquet(path, [path])
    else:
        yield from _lines(path)


def _lines(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _row(path, f"line {number}", _object(line, f"tasks: {path}, line {number}"))
    except OSError as error:
        raise ConfigError(f"tasks: {path}: not readable: {error}", field="tasks") from None


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}", field="tasks") from None
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{where}: got a {type(fields).__name__}, must be an object (the fields of a task)", field="tasks"
        )
    return fields


def _shards(folder: Path) -> list[Path]:
    """Parquet files in a folder, or in its `data/`, as data sets on Hugging Face's hub have them; in the order of their names."""
    for place in (folder, folder / "data"):
        if found := sorted(place.glob(f"*{PARQUET}")):
            return found
    return []


def _of_split(folder: Path, split: str | None) -> list[Path]:
    """The files of a split: those named `train.parquet` or `train-00000-of-00002.parquet`. Without one, all must be of one."""
    by_split: dict[str, list[Path]] = {}
    for file in _shards(folder):
        by_split.setdefault(file.stem.split("-")[0], []).append(file)
    return by_split[_chosen(folder, split, list(by_split))]


def _chosen(folder: Path, split: str | None, names: list[str]) -> str:
    known = ", ".join(names)
    if split is None and len(names) != 1:
        raise ConfigError(f"split: {folder} has {known}: choose one (--split)", field="split")
    if split is not None and split not in names:
        raise ConfigError(f"split: got {split!r}, and {folder} has {known}", field="split")
    return split or names[0]


def _parquet(source: Path, files: list[Path]) -> Iterator[Row]:
    """Rows are counted through all files, as `datasets` does."""
    import pyarrow
    from pyarrow import parquet

    number = 0
    for path in files:
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(ROWS_AT_ONCE):
                    yield from _of_batch(source, batch, number)
                    number += batch.num_rows
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"tasks: {path}: not readable as Parquet: {error}", field="tasks") from None


def _data_set(folder: Path, split: str | None) -> Iterator[Row]:
    """What `save_to_disk` of a `Dataset` or a `DatasetDict` left: Arrow files, mapped into memory, and a note that names them."""
    import pyarrow
    from pyarrow import ipc

    if (folder / _SPLITS).is_file():
        names = _note(folder / _SPLITS).get("splits", [])
        folder, split = folder / _chosen(folder, split, names), None
    if split is not None:
        raise ConfigError(f"split: got {split!r}, and {folder} is a data set without splits", field="split")
    note = _note(folder / _STATE)
    if any(note.get(name) for name in _INDICES):
        raise ConfigError(
            f"tasks: {folder}: its rows are chosen by indices: save it with flatten_indices()", field="tasks"
        )
    number = 0
    for named in note.get("_data_files", []):
        path = folder / str(named["filename"])
        try:
            with pyarrow.memory_map(str(path)) as mapped, ipc.open_stream(mapped) as stream:
                for batch in stream:
                    for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                        yield from _of_batch(folder, batch.slice(start, ROWS_AT_ONCE), number + start)
                    number += batch.num_rows
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"tasks: {path}: not readable as Arrow: {error}", field="tasks") from None


def _of_batch(source: Path, batch: Any, before: int) -> Iterator[Row]:
    """Args: before: how many rows stand before its first. Raises: ConfigError naming the row and the field."""
    try:
        found = batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, KeyError, OverflowError):  # a value that Python can't have: asked one by one which it is
        found = None
    for number in range(batch.num_rows):
        place = f"row {before + number + 1}"
        yield _row(source, place, _fields(source, place, batch.slice(number, 1)) if found is None else found[number])


def _fields(source: Path, place: str, row: Any) -> dict[str, Any]:
    """Args: row: a batch of one."""
    found = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            (found[name],) = column.to_pylist(maps_as_pydicts="strict")
        except (ValueError, KeyError, OverflowError) as error:
            where = f"tasks: {source}, {place}: {name}"
            raise ConfigError(
                f"{where}: got a value that can't be read as {column.type}: {error}", field="tasks"
            ) from None
    return found


def _note(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tasks: {path}: not the note of a data set: {error}", field="tasks") from None
    if not isinstance(found, dict):
        raise ConfigError(f"tasks: {path}: got a {type(found).__name__}, must be an object", field="tasks")
    return found


def _row(file: Path, place: str, fields: Mapping[str, Any]) -> Row:
    """Raises: ConfigError naming the field that can't be stored, and its value."""
    found: dict[str, Any] = {}
    row = Row(file, place, found)
    for name, value in fields.items():
        try:
            storable({name: value})  # first, since `as_json` goes as deep as the value does
            found[name] = storable(as_json(value))
        except ValueError as error:
            raise ConfigError(f"{row.where}: {name}: got {shown(value)}: {error}", field="tasks") from None
        if (kind := _not_json(found[name])) is not None:
            raise ConfigError(
                f"{row.where}: {name}: got {kind}, must be what JSON has: text, a number, true or false, null, a list, an "
                "object",
                field="tasks",
            )
    return row


def as_json(value: Any) -> Any:
    """Dates and times as text, exact decimals as numbers; containers too. Anything else as it is."""
    if isinstance(value, dict):
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_json(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


def shown(value: Any) -> str:
    """A value in a message: short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _not_json(value: Any) -> str | None:
    """The type of the first value inside that JSON has not; None: there is none."""
    if isinstance(value, dict):
        odd = next((f"a key of type {type(key).__name__}" for key in value if not isinstance(key, str)), None)
        return odd or next((kind for each in value.values() if (kind := _not_json(each))), None)
    if isinstance(value, list):
        return next((kind for each in value if (kind := _not_json(each))), None)
    return None if value is None or isinstance(value, str | bool | int | float) else type(value).__name__

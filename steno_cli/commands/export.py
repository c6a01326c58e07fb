"""Recorded sessions as JSON lines or Parquet: one row per session, turn or sample.

Rows have the keys of the records (`steno/contracts/records.py`); turns carry their trial's id, group and reward beside. In
Parquet, token ids, log-probabilities and masks are native lists, numbers and text are columns of their own, and everything nested
(messages, tools, spans) is a column of JSON text, since its shape differs from row to row.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from steno.client.client import Steno
from steno.contracts.errors import ConfigError
from steno.contracts.records import Sample, Session, Turn, readable
from steno_cli.terminal.flags import unwrap
from steno_cli.terminal.output import console

_ROWS_PER_GROUP = 512
"""Rows held in memory before a Parquet row group is written: a few MB of tokens."""


class ExportFormat(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"


class Records(StrEnum):
    TURNS = "turns"
    SAMPLES = "samples"
    SESSIONS = "sessions"


_MODELS: dict[Records, type[BaseModel]] = {Records.TURNS: Turn, Records.SAMPLES: Sample, Records.SESSIONS: Session}
_SESSION_COLUMNS = {"trial_id": str, "group_id": str, "run_id": str, "reward": float}
_LISTS = {
    "new_prompt_ids": "int32",
    "completion_ids": "int32",
    "token_ids": "int32",
    "sampling_logprobs": "float",
    "loss_mask": "bool",
}


def export_sessions(
    steno: Steno, trial_ids: list[str], records: Records, to: Path | None, file_format: ExportFormat | None
) -> int:
    """Write the records of these trials, one session in memory at a time. Returns the number of rows.

    A file is written beside its name and renamed when whole.
    Raises: ConfigError (Parquet to standard output, a folder that is not there), what the client raises.
    """
    chosen = file_format or (ExportFormat.PARQUET if to is not None and to.suffix == ".parquet" else ExportFormat.JSONL)
    rows = (row for trial_id in trial_ids for row in _rows(steno, trial_id, records))
    if to is None:
        if chosen is ExportFormat.PARQUET:
            raise ConfigError("Parquet needs a file: give --output FILE.parquet")
        return _write_jsonl(rows, sys.stdout)
    if not to.parent.is_dir():
        raise ConfigError(f"--output: no such folder: {to.parent}")
    partial = to.with_name(f".{to.name}.partial")
    try:
        if chosen is ExportFormat.PARQUET:
            count = _write_parquet(rows, records, partial)
        else:
            with partial.open("w", encoding="utf-8") as file:
                count = _write_jsonl(rows, file)
        partial.replace(to)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _rows(steno: Steno, trial_id: str, records: Records) -> Iterator[dict[str, Any]]:
    if records is Records.SAMPLES:
        found = steno.sample_list(trial_id)
        for bad in found.unreadable:
            words = f"trial {trial_id}, turn {bad.turn_id}: in no sample, {bad.completion_tokens} tokens: {bad.reason}"
            console(stderr=True).print(words, markup=False, soft_wrap=True)
        yield from (readable(sample) for sample in found.items)
        return
    session = steno.session(trial_id)
    if records is Records.SESSIONS:
        yield readable(session)
        return
    beside = {name: getattr(session, name) for name in _SESSION_COLUMNS}
    for turn in steno.turns(trial_id):
        yield beside | readable(turn)


def _write_jsonl(rows: Iterator[dict[str, Any]], file: Any) -> int:
    count = 0
    for row in rows:
        file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        count += 1
    return count


def _write_parquet(rows: Iterator[dict[str, Any]], records: Records, path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = dict(_SESSION_COLUMNS) if records is Records.TURNS else {}
    columns |= {name: unwrap(field.annotation) for name, field in _MODELS[records].model_fields.items()}
    scalars = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    items = {"int32": pa.int32(), "float": pa.float32(), "bool": pa.bool_()}
    schema = pa.schema(
        (name, pa.list_(items[_LISTS[name]]) if name in _LISTS else scalars.get(kind, pa.string()))
        for name, kind in columns.items()
    )
    nested = {name for name, kind in columns.items() if name not in _LISTS and not _is_flat(kind)}
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        batch: list[dict[str, Any]] = []
        for row in rows:
            batch.append(
                {k: json.dumps(v, ensure_ascii=False) if k in nested and v is not None else v for k, v in row.items()}
            )
            count += 1
            if len(batch) == _ROWS_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    return count


def _is_flat(kind: Any) -> bool:
    """A column of its own rather than JSON text; a digest is hex text."""
    if typing.get_origin(kind) is typing.Literal:
        return True
    return isinstance(kind, type) and issubclass(kind, str | int | float | bytes)

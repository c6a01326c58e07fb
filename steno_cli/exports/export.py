"""Recorded sessions as a file: records as JSON lines or Parquet, trajectories, conversations, or tokens to train on.

In Parquet, token ids, log-probabilities and masks are native lists, numbers and text are columns of their own, and everything
nested (messages, tools, spans) is a column of JSON text, since its shape differs from row to row.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from steno.client.client import Client
from steno.contracts.errors import ConfigError, Forbidden, NotFound
from steno.contracts.records import Sample, Session, Turn
from steno.contracts.rest import TEXTS_SUFFIX
from steno_cli.exports.rows import SESSION_COLUMNS, Records, atif_rows, chat_rows, record_rows, sft_rows
from steno_cli.terminal.flags import unwrap
from steno_cli.terminal.output import console

_ROWS_PER_GROUP = 512
"""Rows held in memory before a Parquet row group is written: a few MB of tokens."""


class ExportFormat(StrEnum):
    """jsonl, parquet: records as they are. atif: Harbor's trajectories, chat: OpenAI's fine-tuning format, both JSON lines with a
    row per branch. sft: Parquet with `input_ids` and `labels`, a row per sample."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    ATIF = "atif"
    CHAT = "chat"
    SFT = "sft"


_MODELS: dict[Records, type[BaseModel]] = {Records.TURNS: Turn, Records.SAMPLES: Sample, Records.SESSIONS: Session}
_SFT_COLUMNS: dict[str, Any] = {
    "input_ids": bytes, "labels": bytes, "trial_id": str, "group_id": str, "leaf_id": str, "reward": float,
}  # fmt: skip
_LISTS = {
    "new_prompt_ids": "int32",
    "completion_ids": "int32",
    "token_ids": "int32",
    "input_ids": "int32",
    "labels": "int32",
    "sampling_logprobs": "float",
    "loss_mask": "bool",
}


def export_sessions(
    client: Client,
    trial_ids: list[str],
    to: Path | None,
    file_format: ExportFormat | None = None,
    records: Records | None = None,
    *,
    whole_prompts: bool = False,
) -> int:
    """Write these trials, one session in memory at a time. Returns the number of rows.

    A file is written beside its name and renamed when whole.
    Args: file_format: None: as the file's name ends, else JSON lines. records: of jsonl and parquet; None: turns.
        whole_prompts: of atif.
    Raises: ConfigError (Parquet to standard output, a folder that is not there, options that the format does not take), what
        the client raises.
    """
    chosen = file_format or (ExportFormat.PARQUET if to is not None and to.suffix == ".parquet" else ExportFormat.JSONL)
    of_records = chosen in (ExportFormat.JSONL, ExportFormat.PARQUET)
    if records is not None and not of_records:
        raise ConfigError(f"--records: got {records.value}, but --format {chosen.value} has rows of its own")
    if whole_prompts and chosen is not ExportFormat.ATIF:
        raise ConfigError(f"--whole-prompts: only with --format atif, got --format {chosen.value}")
    kind = records or Records.TURNS
    columns = _columns(kind) if of_records else _SFT_COLUMNS
    tokenizers: set[str] = set()
    rows = (
        row
        for trial_id in trial_ids
        for row in _noting(_rows(client, trial_id, chosen, kind, whole_prompts=whole_prompts), tokenizers)
    )
    as_parquet = chosen in (ExportFormat.PARQUET, ExportFormat.SFT)
    if to is None:
        if as_parquet:
            raise ConfigError(f"--format {chosen.value} writes Parquet, which needs a file: give --output FILE.parquet")
        return _write_jsonl(rows, sys.stdout)
    if not to.parent.is_dir():
        raise ConfigError(f"--output: no such folder: {to.parent}")
    partial = to.with_name(f".{to.name}.partial")
    try:
        if as_parquet:
            count = _write_parquet(rows, columns, partial)
        else:
            with partial.open("w", encoding="utf-8") as file:
                count = _write_jsonl(rows, file)
        partial.replace(to)
        if chosen in (ExportFormat.JSONL, ExportFormat.PARQUET):
            _write_texts(client, tokenizers, to.with_name(to.name + TEXTS_SUFFIX))
    finally:
        partial.unlink(missing_ok=True)
    return count


def _noting(rows: Iterator[dict[str, Any]], tokenizers: set[str]) -> Iterator[dict[str, Any]]:
    """The rows, and which tokenizers their ids are of."""
    for row in rows:
        if key := row.get("tokenizer"):
            tokenizers.add(key)
        yield row


def _write_texts(client: Client, tokenizers: Iterable[str], path: Path) -> None:
    """A line for each tokenizer: `tokenizer`, `texts`, `special`. No file where none is known; ids can be read all the same."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for key in sorted(tokenizers):
                try:
                    file.write(client.token_texts(key).model_dump_json() + "\n")
                except (NotFound, Forbidden) as error:
                    console(stderr=True).print(f"token texts: {error.message}", markup=False, soft_wrap=True)
        if partial.stat().st_size:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _rows(
    client: Client, trial_id: str, chosen: ExportFormat, records: Records, *, whole_prompts: bool
) -> Iterator[dict[str, Any]]:
    match chosen:
        case ExportFormat.ATIF:
            return atif_rows(client, trial_id, whole_prompts=whole_prompts)
        case ExportFormat.CHAT:
            return chat_rows(client, trial_id)
        case ExportFormat.SFT:
            return sft_rows(client, trial_id)
        case _:
            return record_rows(client, trial_id, records)


def _columns(records: Records) -> dict[str, Any]:
    columns: dict[str, Any] = dict(SESSION_COLUMNS) if records is Records.TURNS else {}
    return columns | {name: unwrap(field.annotation) for name, field in _MODELS[records].model_fields.items()}


def _write_jsonl(rows: Iterable[dict[str, Any]], file: Any) -> int:
    count = 0
    for row in rows:
        file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        count += 1
    return count


def _write_parquet(rows: Iterator[dict[str, Any]], columns: dict[str, Any], path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

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

"""Recorded sessions as a file or a folder: records as JSON lines or Parquet, trajectories, conversations, tokens to train on."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from steno.client.client import Client
from steno.contracts.errors import ConfigError, Conflict, Forbidden, Gone, NotFound
from steno.contracts.records import Sample, Session, Turn
from steno.contracts.rest import TEXTS_SUFFIX
from steno_cli.exports.json_text import json_text
from steno_cli.exports.rows import SESSION_COLUMNS, Records, atif_rows, chat_rows, record_rows, sft_rows
from steno_cli.exports.selection import TEXT_ONLY
from steno_cli.exports.tables import write_dataset, write_parquet
from steno_cli.terminal.flags import unwrap
from steno_cli.terminal.output import console, named_by


class ExportFormat(StrEnum):
    """jsonl, parquet: records as they are. atif: Harbor's trajectories, chat: OpenAI's fine-tuning format, both JSON lines with a
    row per branch. sft: Parquet with `input_ids` and `labels`, a row per sample. datasets: the same as a folder of Hugging Face's
    datasets."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    ATIF = "atif"
    CHAT = "chat"
    SFT = "sft"
    DATASETS = "datasets"


_MODELS: dict[Records, type[BaseModel]] = {Records.TURNS: Turn, Records.SAMPLES: Sample, Records.SESSIONS: Session}
_SFT_COLUMNS: dict[str, Any] = {
    "input_ids": bytes, "labels": bytes, "trial_id": str, "group_id": str, "leaf_id": str, "reward": float,
}  # fmt: skip


def needs_token_ids(file_format: ExportFormat | None, records: Records | None) -> bool:
    """Whether rows are samples, which `text_only` sessions have none of."""
    return file_format in (ExportFormat.SFT, ExportFormat.DATASETS) or records is Records.SAMPLES


def export_sessions(
    client: Client,
    trial_ids: list[str],
    to: Path | None,
    file_format: ExportFormat | None = None,
    records: Records | None = None,
    *,
    whole_prompts: bool = False,
    left_out: Counter[str] | None = None,
) -> int:
    """Write these trials, one session in memory at a time. Returns the number of rows.

    A file or a folder is written beside its name and renamed when whole; of a link, what it leads to. Lines for standard output,
    a device or a FIFO are written into it.
    Args: file_format: None: as the file's name ends, else JSON lines. records: of jsonl and parquet; None: turns.
        whole_prompts: of atif. left_out: of trials that filters have chosen: what was deleted meanwhile, or has no token ids, is
        counted here by reason, and no row has a part of it. None: such a trial is an error.
    Raises: ConfigError (Parquet or a folder to what is no file, a place that can't be, options that the format does not take),
        what the client raises.
    """
    chosen = file_format or (ExportFormat.PARQUET if to is not None and to.suffix == ".parquet" else ExportFormat.JSONL)
    of_records = chosen in (ExportFormat.JSONL, ExportFormat.PARQUET)
    if records is not None and not of_records:
        raise ConfigError(
            f"--records: got {records.value}, but --format {chosen.value} makes its own rows: use jsonl or parquet"
        )
    if whole_prompts and chosen is not ExportFormat.ATIF:
        raise ConfigError(f"--whole-prompts: only with --format atif, got --format {chosen.value}")
    kind = records or Records.TURNS
    columns = _columns(kind) if of_records else _SFT_COLUMNS
    tokenizers: set[str] = set()

    def rows_of(trial_id: str) -> Iterable[dict[str, Any]]:
        found = _rows(client, trial_id, chosen, kind, whole_prompts=whole_prompts)
        return found if left_out is None else _whole_or_none(found, left_out)

    rows = (row for trial_id in trial_ids for row in _noting(rows_of(trial_id), tokenizers))
    if to is None or _is_standard_output(to):
        if chosen in (ExportFormat.PARQUET, ExportFormat.SFT):
            raise ConfigError(f"--format {chosen.value} writes Parquet, which needs a file: give --output FILE.parquet")
        if chosen is ExportFormat.DATASETS:
            raise ConfigError("--format datasets writes a folder: give --output FOLDER")
        return _write_jsonl(rows, sys.stdout)
    with named_by("--output", to):
        to = _place(to, chosen)
        stream = to.open("w", encoding="utf-8") if _takes_lines(to) else None
    if stream is not None:
        with stream:
            return _write_jsonl(rows, stream)
    with _beside(to) as folder:
        partial = folder / to.name
        count = _write(rows, columns, chosen, partial)
        try:
            partial.replace(to)
        except OSError as error:
            raise ConfigError(f"--output: {to} was made or removed during the export: {error.strerror}") from None
        if of_records:
            _write_texts(client, tokenizers, folder, to.with_name(to.name + TEXTS_SUFFIX))
    return count


def _is_standard_output(to: Path) -> bool:
    """`/dev/stdout` is, also where a shell has redirected it to a file."""
    try:
        return os.path.samestat(to.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # `to` does not exist, or stdout has no descriptor
        return False


def _takes_lines(to: Path) -> bool:
    """Whether it is a device, a FIFO or a link to one: what can be written into, and not replaced."""
    return to.exists() and not to.is_file() and not to.is_dir()


def _place(to: Path, chosen: ExportFormat) -> Path:
    """Where to write: the target, if `to` is a link. Checked before minutes of reading. Raises: ConfigError: nothing can be
    written there, or it would replace what is no export."""
    if _takes_lines(to):
        if chosen in (ExportFormat.PARQUET, ExportFormat.SFT):
            raise ConfigError(f"--output: {to} is no file; --format {chosen.value} writes one: give FILE.parquet")
        if chosen is not ExportFormat.DATASETS:
            return to
    try:
        to = to.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ConfigError(f"--output: {to}: {error}") from None
    if not to.parent.is_dir():
        raise ConfigError(f"--output: no such folder: {to.parent}")
    if chosen is not ExportFormat.DATASETS:
        if to.is_dir():
            raise ConfigError(f"--output: {to} is a folder; --format {chosen.value} writes a file")
    elif to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(
            f"--output: {to} is there already; --format datasets writes a folder: give a new or an empty one"
        )
    elif os.path.ismount(to):
        raise ConfigError(f"--output: {to} is a mount point, which can't be replaced: give a folder in it")
    elif to == Path.cwd():
        raise ConfigError(f"--output: {to} is the working directory, which would be replaced: give a folder in it")
    return to


@contextlib.contextmanager
def _beside(to: Path) -> Iterator[Path]:
    """A folder beside `to` for what is not whole, of this export alone: another one to the same name has its own."""
    with named_by("--output", to):
        folder = Path(tempfile.mkdtemp(prefix=f".{to.name}.", suffix=".partial", dir=to.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _write(rows: Iterator[dict[str, Any]], columns: dict[str, Any], chosen: ExportFormat, partial: Path) -> int:
    match chosen:
        case ExportFormat.PARQUET | ExportFormat.SFT:
            return write_parquet(rows, columns, partial)
        case ExportFormat.DATASETS:
            return write_dataset(rows, columns, partial)
    with partial.open("w", encoding="utf-8") as file:
        return _write_jsonl(rows, file)


def _whole_or_none(rows: Iterator[dict[str, Any]], left_out: Counter[str]) -> list[dict[str, Any]]:
    """All rows of a session that is still there."""
    try:
        return list(rows)
    except (NotFound, Gone) as error:
        if error.message.startswith("Not Found"):
            raise  # of a port that is the agents' alone, which knows no session
        left_out["deleted meanwhile"] += 1
    except Conflict:  # since it was listed
        left_out[TEXT_ONLY] += 1
    return []


def _noting(rows: Iterable[dict[str, Any]], tokenizers: set[str]) -> Iterator[dict[str, Any]]:
    """The rows, and which tokenizers their ids are of."""
    for row in rows:
        if key := row.get("tokenizer"):
            tokenizers.add(key)
        yield row


def _write_texts(client: Client, tokenizers: Iterable[str], folder: Path, path: Path) -> None:
    """A line for each tokenizer: `tokenizer`, `texts`, `special`. No file where none is known; ids can be read all the same."""
    partial = folder / path.name
    with partial.open("w", encoding="utf-8") as file:
        for key in sorted(tokenizers):
            try:
                file.write(client.token_texts(key).model_dump_json() + "\n")
            except (NotFound, Forbidden) as error:
                console(stderr=True).print(f"token texts: {error.message}", markup=False, soft_wrap=True)
    if partial.stat().st_size:
        partial.replace(path)


def _rows(
    client: Client, trial_id: str, chosen: ExportFormat, records: Records, *, whole_prompts: bool
) -> Iterator[dict[str, Any]]:
    match chosen:
        case ExportFormat.ATIF:
            return atif_rows(client, trial_id, whole_prompts=whole_prompts)
        case ExportFormat.CHAT:
            return chat_rows(client, trial_id)
        case ExportFormat.SFT | ExportFormat.DATASETS:
            return sft_rows(client, trial_id)
        case _:
            return record_rows(client, trial_id, records)


def _columns(records: Records) -> dict[str, Any]:
    columns: dict[str, Any] = dict(SESSION_COLUMNS) if records is Records.TURNS else {}
    return columns | {name: unwrap(field.annotation) for name, field in _MODELS[records].model_fields.items()}


def _write_jsonl(rows: Iterable[dict[str, Any]], file: Any) -> int:
    count = 0
    for row in rows:
        file.write(json_text(row) + "\n")
        count += 1
    return count

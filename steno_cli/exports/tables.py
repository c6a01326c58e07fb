"""Rows as Arrow tables: a Parquet file, or a folder that `datasets.load_from_disk` reads. A bounded part of them is in memory.

Token ids, log-probabilities and masks are native lists, numbers and text are columns of their own, and everything nested
(messages, tools, spans) is a column of JSON text, since its shape differs from row to row.
"""

from __future__ import annotations

import json
import secrets
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steno_cli.exports.json_text import json_text

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_PER_TABLE = 512
_ITEMS_PER_TABLE = 1 << 20
"""Items of lists and letters of texts that are held before they are written: at most some tens of MB, beside one row."""
_LISTS = {
    "new_prompt_ids": "int32",
    "completion_ids": "int32",
    "token_ids": "int32",
    "input_ids": "int32",
    "labels": "int32",
    "sampling_logprobs": "float",
    "loss_mask": "bool",
}
_DATA_FILE = "data-00000-of-00001.arrow"

Rows = Iterator[dict[str, Any]]
Columns = dict[str, Any]
"""The type of each column's values, by name."""


def write_parquet(rows: Rows, columns: Columns, path: Path) -> int:
    """Returns: how many rows were written."""
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, _schema(columns), compression="zstd") as writer:
        return sum(_written(writer, table) for table in _tables(rows, columns))


def write_dataset(rows: Rows, columns: Columns, folder: Path) -> int:
    """As `Dataset.save_to_disk` of Hugging Face's datasets writes it. The folder must not be there. Returns: how many rows."""
    import pyarrow as pa

    folder.mkdir()
    with pa.OSFile(str(folder / _DATA_FILE), "wb") as file, pa.ipc.new_stream(file, _schema(columns)) as writer:
        count = sum(_written(writer, table) for table in _tables(rows, columns))
    state: dict[str, Any] = {
        "_data_files": [{"filename": _DATA_FILE}],
        "_fingerprint": secrets.token_hex(8),  # names what `map` keeps in the folder: another export, other names
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    # Without `features`, which releases of datasets name differently: each takes them from the Arrow types.
    info = {"citation": "", "description": "", "homepage": "", "license": ""}
    for name, content in (("state.json", state), ("dataset_info.json", info)):
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return count


def _written(writer: Any, table: pa.Table) -> int:
    writer.write_table(table)
    return int(table.num_rows)


def _tables(rows: Rows, columns: Columns) -> Iterator[pa.Table]:
    """At least one, which may be empty."""
    import pyarrow as pa

    schema = _schema(columns)
    nested = {name for name, kind in columns.items() if name not in _LISTS and not _is_flat(kind)}
    batch: list[dict[str, Any]] = []
    items = 0
    for row in rows:
        flat = {k: json_text(v) if k in nested and v is not None else v for k, v in row.items()}
        batch.append(flat)
        items += sum(len(value) for value in flat.values() if isinstance(value, list | str))
        if len(batch) == _ROWS_PER_TABLE or items >= _ITEMS_PER_TABLE:
            yield pa.Table.from_pylist(batch, schema=schema)
            batch, items = [], 0
    yield pa.Table.from_pylist(batch, schema=schema)


def _schema(columns: Columns) -> pa.Schema:
    import pyarrow as pa

    scalars = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    items = {"int32": pa.int32(), "float": pa.float32(), "bool": pa.bool_()}
    return pa.schema(
        (name, pa.list_(items[_LISTS[name]]) if name in _LISTS else scalars.get(kind, pa.string()))
        for name, kind in columns.items()
    )


def _is_flat(kind: Any) -> bool:
    """A column of its own rather than JSON text; a digest is hex text."""
    if typing.get_origin(kind) is typing.Literal:
        return True
    return isinstance(kind, type) and issubclass(kind, str | int | float | bytes)

"""Turns that `steno sessions export` has written, as sessions: found by one look through the file, read when asked for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from steno.config.extras import how_to_install, missing
from steno.contracts.errors import ConfigError
from steno.contracts.json_limits import whole_text

_BESIDE = ("trial_id", "group_id", "run_id", "reward", "status", "marks")
_ROWS = 256


@dataclass
class RecordedSession:
    """A session as `GET /sessions/{trial_id}` gives it, of what its turns say; and where each of them is, by its index."""

    record: dict[str, Any]
    places: dict[int, int] = field(default_factory=dict)


class TurnFile:
    """Sessions of a file of JSON lines, or of Parquet, which is written as JSON lines to a temporary file first.

    Raises: ConfigError: names the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        self.sessions: dict[str, RecordedSession] = {}
        self._file: BinaryIO = _as_lines(path) if path.suffix == ".parquet" else path.open("rb")
        at = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self._take(path, number, line, at)
            at += len(line)
        if not self.sessions:
            raise ConfigError(f"{path}: there is no turn in it")

    def _take(self, path: Path, number: int, line: bytes, at: int) -> None:
        try:
            row = _row(line)
            first = row["timings"]["queued"]
            index, trial_id = row["index"], row["trial_id"]
            tokens = len(row["completion_ids"]), len(row["new_prompt_ids"])
        except (ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{path}, row {number}: no turn as `steno sessions export --records turns` writes it ({why})"
            ) from None
        found = self.sessions.get(trial_id)
        if found is None:
            found = self.sessions[trial_id] = RecordedSession(_session(row, first))
        found.places[index] = at
        record = found.record
        counts, last = record["counts"], row["timings"].get("last_token") or first
        counts["turns"] += 1
        counts["completion_tokens"] += tokens[0]
        counts["prompt_tokens"] += tokens[1]
        counts["forks"] += row.get("fork_reason") is not None
        counts["constrained_tokens"] += sum(end - start for start, end in row.get("constrained") or [])
        record["first_turn_at"] = min(record["first_turn_at"], first)
        record["ended_at"] = record["updated_at"] = max(record["updated_at"], last)

    def turns(self, trial_id: str, start: int, limit: int) -> list[dict[str, Any]]:
        """In commit order. Raises: KeyError."""
        places = self.sessions[trial_id].places
        found = []
        for index in sorted(places)[start : start + limit]:
            self._file.seek(places[index])
            row = _row(self._file.readline())
            found.append({name: value for name, value in row.items() if name not in _BESIDE})
        return found


def _row(line: bytes) -> Any:
    """Halves of surrogate pairs, which exports write as escapes, are U+FFFD. Raises: ValueError: no JSON."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        return msgspec.json.decode(whole_text(json.dumps(json.loads(line), ensure_ascii=False)))


def _session(row: dict[str, Any], first: float) -> dict[str, Any]:
    counts = dict.fromkeys(("turns", "prompt_tokens", "completion_tokens", "constrained_tokens", "forks"), 0)
    told = {name: row.get(name) for name in _BESIDE}
    # Older files have neither status nor marks.
    return told | {
        "status": told["status"] or "completed", "marks": told["marks"] or [],
        "end_reason": None, "metrics": {}, "metadata": {}, "counts": counts, "notes": None,
        "created_at": first, "updated_at": first, "first_turn_at": first, "ended_at": first,
    }  # fmt: skip


def _as_lines(path: Path) -> BinaryIO:
    if missing(["pyarrow"]):
        raise ConfigError(f"{path}: Parquet needs the extra `export`: {how_to_install('export')}")
    import pyarrow.parquet as pq

    lines: Any = tempfile.TemporaryFile()  # noqa: SIM115  # for as long as the file is shown
    try:
        for batch in pq.ParquetFile(path).iter_batches(_ROWS):
            for row in batch.to_pylist():
                lines.write(json.dumps(dict(_plain(row))).encode() + b"\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    lines.seek(0)
    return lines  # type: ignore[no-any-return]


_TEXTS = frozenset(
    {
        "timings",
        "messages",
        "reply",
        "tools",
        "versions",
        "workers",
        "constrained",
        "asked",
        "law",
        "options",
        "call_ids",
        "annotation",
        "marks",
    }
)
"""Columns that hold JSON text, since their shape differs from row to row."""


def _plain(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        yield name, json.loads(value) if name in _TEXTS and isinstance(value, str) else value

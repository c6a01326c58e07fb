"""Where an export is written: into what can't be replaced, and through links."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.errors import ConfigError
from steno.contracts.rest import TEXTS_SUFFIX, TokenTexts
from steno_cli.exports import export
from steno_cli.exports.export import ExportFormat, export_sessions
from steno_cli.recorded.texts_file import TextsFile


class Tokenizers:
    """A client that knows the texts of every tokenizer."""

    def token_texts(self, key: str) -> TokenTexts:
        return TokenTexts(tokenizer=key, texts=["a"], special=[])


CLIENT: Any = Tokenizers()


@pytest.fixture(autouse=True)
def one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(_: Any, trial_id: str, *__: Any, **___: Any) -> Iterator[dict[str, Any]]:
        yield {"trial_id": trial_id, "tokenizer": "k"}

    monkeypatch.setattr(export, "_rows", rows)


@pytest.mark.parametrize("name", ["fifo", "link"])
@pytest.mark.parametrize("file_format", [None, ExportFormat.ATIF, ExportFormat.CHAT])
def test_lines_are_written_into_a_fifo_which_stays_one(
    name: str, file_format: ExportFormat | None, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "fifo").read_text()), daemon=True)
    reader.start()
    assert export_sessions(CLIENT, ["a", "b"], tmp_path / name, file_format) == 2
    reader.join(60)
    assert [json.loads(line)["trial_id"] for line in read[0].splitlines()] == ["a", "b"]
    assert (tmp_path / "fifo").is_fifo() and (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("file_format", [ExportFormat.PARQUET, ExportFormat.SFT, ExportFormat.DATASETS])
def test_what_is_no_file_is_refused_by_the_formats_that_write_one(file_format: ExportFormat, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match=f"--output: .*fifo is .*--format {file_format.value} writes"):
        export_sessions(CLIENT, ["a"], tmp_path / "fifo", file_format)
    assert (tmp_path / "fifo").is_fifo() and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_a_file_stays_and_the_file_is_replaced(there: bool, tmp_path: Path) -> None:
    """The texts of tokens lie beside the file, and are found by the link's name, too."""
    kept = tmp_path / "kept"
    kept.mkdir()
    if there:
        (kept / "t.jsonl").write_text("old")
    (tmp_path / "latest.jsonl").symlink_to("kept/t.jsonl")
    assert export_sessions(CLIENT, ["a"], tmp_path / "latest.jsonl") == 1
    assert (tmp_path / "latest.jsonl").is_symlink()
    assert json.loads((kept / "t.jsonl").read_text())["trial_id"] == "a"
    assert sorted(path.name for path in kept.iterdir()) == ["t.jsonl", "t.jsonl" + TEXTS_SUFFIX]
    assert TextsFile(tmp_path / "latest.jsonl").tokenizers == ["k"]


def test_standard_output_by_its_name_is_written_into_also_where_it_is_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a shell has appended to it before is kept."""
    print("before", flush=True)
    (tmp_path / "link").symlink_to("/proc/self/fd/1")
    assert export_sessions(CLIENT, ["a"], tmp_path / "link") == 1
    before, row = capfd.readouterr().out.splitlines()
    assert before == "before" and json.loads(row)["trial_id"] == "a"
    assert (tmp_path / "link").is_symlink()

"""A reference whose ids are other words than the policy's is refused: nothing else would show it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.errors import ConfigError
from steno.models import TINY
from steno_trainer.model.same_tokens import check_same_tokens


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """A copy of the tiny model's tokenizer, with `tokenizer.json` changed."""
    folder.mkdir()
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(TINY / name, folder / name)
    found = json.loads((folder / "tokenizer.json").read_text())
    change(found)
    (folder / "tokenizer.json").write_text(json.dumps(found))
    return str(folder)


def test_a_model_with_the_same_tokens_or_with_none_is_taken(tmp_path: Path) -> None:
    check_same_tokens(str(TINY), str(TINY))

    def one_more(found: dict[str, Any]) -> None:
        last = max(token["id"] for token in found["added_tokens"])
        found["added_tokens"].append({**found["added_tokens"][-1], "id": last + 1, "content": "<more>"})

    check_same_tokens(str(TINY), changed(tmp_path / "family", one_more))
    (tmp_path / "weights alone").mkdir()
    shutil.copy(TINY / "config.json", tmp_path / "weights alone")
    check_same_tokens(str(TINY), str(tmp_path / "weights alone"))


def test_other_words_by_the_same_ids_are_named(tmp_path: Path) -> None:
    def swapped(found: dict[str, Any]) -> None:
        words = found["model"]["vocab"]
        words["a"], words["b"] = words["b"], words["a"]

    other = changed(tmp_path / "other", swapped)
    with pytest.raises(
        ConfigError, match=r"reference: got .*: 2 ids differ; \d+ is '[ab]' there and '[ab]' in the model"
    ) as refused:
        check_same_tokens(str(TINY), other)
    assert refused.value.field == "reference"

"""A reference whose ids are other words than the policy's is refused: nothing else would show it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

from steno.contracts.errors import ConfigError
from steno.models import TINY
from steno_trainer.config import TrainerSettings
from steno_trainer.model import zero_engine
from steno_trainer.model.same_tokens import common_tokens
from steno_trainer.model.zero_engine import PolicyEngine


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """A copy of the tiny model's tokenizer, with `tokenizer.json` changed."""
    folder.mkdir()
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(TINY / name, folder / name)
    found = json.loads((folder / "tokenizer.json").read_text())
    change(found)
    (folder / "tokenizer.json").write_text(json.dumps(found))
    return str(folder)


def more(found: dict[str, Any]) -> None:
    """One more token."""
    last = max(token["id"] for token in found["added_tokens"])
    found["added_tokens"].append({**found["added_tokens"][-1], "id": last + 1, "content": "<more>"})


def swapped(found: dict[str, Any]) -> None:
    words = found["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]


def test_ids_that_only_one_of_them_has_may_differ(tmp_path: Path) -> None:
    family = changed(tmp_path / "family", more)
    same = common_tokens(str(TINY), str(TINY))
    assert same.warning is None and same.below == len(AutoTokenizer.from_pretrained(TINY))
    assert common_tokens(str(TINY), family) == (same.below + 1, frozenset(), None)
    lacks = common_tokens(family, str(TINY))
    assert lacks.below == same.below
    assert lacks.warning == (
        f"reference: {TINY} lacks 1 tokens of {family}, {same.below} ('<more>') and others: samples with these are not trained "
        "(malformed)"
    )


def without_last_word(found: dict[str, Any]) -> None:
    """Its id is below those of special tokens, which stay where they are."""
    words = found["model"]["vocab"]
    del words[max(words, key=words.get)]
    found["model"]["merges"].pop()
    words.update({token["content"]: token["id"] for token in found["added_tokens"]})


def test_an_id_that_a_reference_lacks_between_others_is_told_and_not_scored(tmp_path: Path) -> None:
    """Ids after it are trained all the same: special tokens, that all samples have."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    last = min(tokenizer.added_tokens_decoder) - 1
    fewer = changed(tmp_path / "fewer", without_last_word)
    found = common_tokens(str(TINY), fewer)
    assert found.below == len(tokenizer) and found.lacking == {last}
    assert found.warning == (
        f"reference: {fewer} lacks 1 tokens of {TINY}, {last} ({tokenizer.convert_ids_to_tokens(last)!r}) and others: samples "
        "with these are not trained (malformed)"
    )
    assert common_tokens(fewer, str(TINY)) == (found.below, frozenset(), None)


@pytest.mark.parametrize(
    ("tokenizer", "why"), [(None, "{} has no tokenizer"), ("{}", "the tokenizer of {} can't be read: KeyError: ")]
)
def test_where_no_tokenizer_says_what_ids_mean_that_is_said(tokenizer: str | None, why: str, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(TINY / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    for model, reference in ((str(TINY), str(tmp_path)), (str(tmp_path), str(TINY))):
        found = common_tokens(model, reference)
        assert found.below is None
        assert (found.warning or "").startswith(
            f"reference: whether its ids mean the same is not known: {why.format(tmp_path)}"
        )


def test_other_words_by_the_same_ids_are_named(tmp_path: Path) -> None:
    other = changed(tmp_path / "other", swapped)
    with pytest.raises(
        ConfigError, match=r"reference: got .*: 2 ids differ; \d+ is '[ab]' there and '[ab]' in the model"
    ) as refused:
        common_tokens(str(TINY), other)
    assert refused.value.field == "reference"


def test_it_is_asked_before_a_model_is_loaded(tmp_path: Path) -> None:
    settings = TrainerSettings(model=str(TINY), reference=changed(tmp_path / "other", swapped), distillation=1.0)
    with pytest.raises(ConfigError, match="2 ids differ"):
        PolicyEngine.open(settings, cast(Any, None))


@pytest.mark.parametrize("wrong", ["model: attention_dropout is 0.5", "sequence_parallel: 28 heads over 4 key heads"])
def test_a_model_that_can_not_be_a_reference_is_named(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> SimpleNamespace:
        if wrong.startswith("model"):
            raise ConfigError(wrong, field="model")
        return SimpleNamespace(
            lm=SimpleNamespace(config=SimpleNamespace(num_attention_heads=28, num_key_value_heads=4))
        )

    monkeypatch.setattr(zero_engine, "load_model", load)
    settings = TrainerSettings(model="m", reference="teacher", distillation=1.0, sequence_parallel=8)
    with pytest.raises(ConfigError, match=f"reference teacher: {wrong}") as refused:
        zero_engine._load_reference(settings, {}, cast(Any, SimpleNamespace(sequence_size=8)))
    assert refused.value.field == "reference"

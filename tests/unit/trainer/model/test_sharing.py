"""Whether a model's samples may share tokens is asked of the model and of the kernel; where not, each is computed whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steno_trainer.model import attention, sharing
from steno_trainer.model.model import PolicyModel, load_model
from steno_trainer.model.sharing import why_not_shared
from tests.unit.trainer.families import ALONE, Engine, build
from tests.unit.trainer.model.test_coverage import LONGEST, PACKED


def load(family: str, folder: Path) -> PolicyModel:
    build(family, folder)
    return load_model(str(folder), precision="float32", zero=None, longest=LONGEST)


def ask(model: PolicyModel, *, longest: int = LONGEST, precision: str = "float32", ranks=ALONE) -> str | None:
    return why_not_shared(Engine(model), ranks, name="it", precision=precision, longest=longest)


@pytest.mark.parametrize("family", PACKED)
def test_samples_of_attention_alone_share_what_they_begin_with(family: str, tmp_path: Path) -> None:
    assert ask(load(family, tmp_path)) is None


def test_so_they_do_in_bfloat16_and_where_samples_are_short(tmp_path: Path) -> None:
    build("qwen3", tmp_path)
    model = load_model(str(tmp_path), precision="bfloat16", zero=None)
    assert ask(model, precision="bfloat16") is None
    model = load("qwen3", tmp_path / "more")
    assert [ask(model, longest=longest) for longest in (2, 3, 40)] == [None] * 3
    assert ask(model, longest=1) == "samples are of 1 token"


def test_layers_with_a_state_share_nothing_also_where_kernels_heed_boundaries(tmp_path: Path) -> None:
    assert ask(load("qwen3_5_text", tmp_path)) == "it has layers with a state (recurrent or convolutional)"


def test_a_model_that_is_another_one_by_sharing_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("qwen3", tmp_path)

    def to_the_left(first, last, reached, window, like):
        return torch.full((last - first, last - reached), -torch.inf, dtype=like.dtype).triu(1)

    monkeypatch.setattr(attention, "_mask", to_the_left)
    why = ask(model)
    assert why is not None and why.startswith("sharing changes log-probabilities, by ")


def test_a_kernel_that_aligns_to_the_left_is_asked_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("qwen3", tmp_path)
    asked = []
    monkeypatch.setattr(sharing, "aligned_to_the_end", lambda device: bool(asked.append(device)))
    gpu = replace(ALONE, device=torch.device("cuda"))
    why = "the attention kernel does not count keys from the end where there are fewer queries"
    assert ask(model, precision="bfloat16", ranks=gpu) == why
    assert asked == [torch.device("cuda")]
    assert ask(model) is None and len(asked) == 1, "elsewhere it is not used"

"""What a file of DeepSpeed's may hold besides tensors, read as the trainer reads it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from steno_trainer.checkpoints.deepspeed_files import only_tensors


class _AskedFor:
    """Pickled as getattr(owner, name), as earlier releases of Python 3.11 pickle members of enumerations."""

    def __init__(self, owner: Any, name: str) -> None:
        self._asked = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._asked


def load(folder: Path, value: Any) -> Any:
    torch.save({"value": value}, folder / "file.pt")
    with only_tensors():
        return torch.load(folder / "file.pt", weights_only=False)["value"]


def test_a_member_of_an_enumeration_is_read_however_this_python_pickles_it(tmp_path: Path) -> None:
    assert load(tmp_path, ZeroStageEnum.weights) is ZeroStageEnum.weights
    assert load(tmp_path, _AskedFor(ZeroStageEnum, "weights")) is ZeroStageEnum.weights


@pytest.mark.parametrize(
    ("owner", "name"),
    [(ZeroStageEnum, "__subclasses__"), (ZeroStageEnum, "from_bytes"), (torch.FloatStorage, "from_file")],
)
def test_getattr_reaches_nothing_else(tmp_path: Path, owner: type, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is not a member of an enumeration"):
        load(tmp_path, _AskedFor(owner, name))

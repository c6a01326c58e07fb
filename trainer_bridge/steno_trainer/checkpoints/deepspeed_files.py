"""Checkpoints that DeepSpeed wrote itself (format 2), read without running what is in them.

DeepSpeed reads its files with `torch.load(weights_only=False)`: a file of a checkpoint folder could be a program. torch has an
environment variable for code that can't change the call, and a list of the classes that are allowed nevertheless.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from steno_trainer.errors import BadCheckpoint

ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
ANYTHING = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load_engine(engine: Any, folder: Path, tag: str) -> None:
    """DeepSpeed's `load_checkpoint`. A collective. Raises: BadCheckpoint: nothing there, or more than tensors in a file."""
    try:
        with only_tensors():
            loaded, _ = engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
    except pickle.UnpicklingError as error:
        raise BadCheckpoint(
            f"{folder}: a file in it holds other objects than tensors, and is refused: {error}"
        ) from error
    if loaded is None:
        raise BadCheckpoint(f"{folder}: DeepSpeed finds no checkpoint in it")


@contextlib.contextmanager
def only_tensors() -> Iterator[None]:
    """In this context `torch.load` makes only tensors, plain values and classes that DeepSpeed saves, whatever its arguments."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    before = {name: os.environ.pop(name, None) for name in (ONLY_WEIGHTS, ANYTHING)}
    os.environ[ONLY_WEIGHTS] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, (_member, "builtins.getattr")]):
            yield
    finally:
        del os.environ[ONLY_WEIGHTS]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _member(kind: Any, name: str) -> Enum:
    """Stands in for getattr, by which early releases of Python 3.11 (Debian 12 has one) pickle members of an enumeration."""
    if not isinstance(kind, type) or not issubclass(kind, Enum) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"getattr({kind!r}, {name!r}) is not a member of an enumeration")
    return kind[name]

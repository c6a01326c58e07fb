"""The optimizer's state in files: float32 weights and moments, as ZeRO-3 cuts them, to be read by any number of ranks.

    <folder>/rank-00000.msgpack                   what this rank wrote: each parameter's file, and single numbers (Adam's step)
    <folder>/rank-00000-part-00000.safetensors    <parameter>|<what> -> this rank's piece; what: weight, exp_avg, exp_avg_sq
    <folder>/buffers.safetensors                  persistent buffers of the model, where it has some; written by the first rank

Of N ranks, rank r has the elements r ceil(n / N) to (r + 1) ceil(n / N) of a parameter of n elements. A rank of another number of
ranks reads its part from the pieces that overlap it. Tensors and numbers alone: nothing in a file is run when it is read.

What is used here of DeepSpeed is no public part of it (0.19: `DeepSpeedZeroOptimizer_Stage3`); tests/integration/trainer hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from steno_trainer.errors import BadCheckpoint, TrainerError
from steno_trainer.model.sizes import full_numel
from steno_trainer.model.zero_engine import PolicyEngine

PART_BYTES = 1 << 30
"""A file is written once its tensors have this size: they are in the host's memory until then."""
BUFFERS = "buffers.safetensors"
WEIGHT = "weight"


class _Index(msgspec.Struct, frozen=True):
    """files: parameter -> its file. kinds: tensors of the optimizer's state, as long as the parameter. numbers: the rest."""

    files: dict[str, str]
    kinds: tuple[str, ...]
    numbers: dict[str, float]


def save(engine: PolicyEngine, folder: Path) -> None:
    """Write this rank's part. Raises: OSError; TrainerError: an optimizer whose state is neither tensors as long as the weights
    nor numbers."""
    rank = engine.ranks.rank
    folder.mkdir(exist_ok=True)
    optimizer = engine.deepspeed.optimizer
    states = [dict(optimizer.optimizer.state.get(flat, {})) for flat in optimizer.fp32_partitioned_groups_flat]
    kinds, numbers = _described(optimizer, states)
    files: dict[str, str] = {}
    part: dict[str, Tensor] = {}
    held, written = 0, 0

    def write() -> None:
        nonlocal held, written
        if part:
            save_file(part, folder / _part(rank, written))
            part.clear()
            held, written = 0, written + 1

    for group, name, start, numel in _parameters(engine):
        share = share_of(numel, engine.ranks.size, rank)
        if not len(share):
            continue
        tensors = {
            WEIGHT: optimizer.fp32_partitioned_groups_flat[group],
            **{kind: states[group][kind] for kind in kinds},
        }
        for what, flat in tensors.items():
            piece = flat.detach().narrow(0, start, len(share)).cpu().clone()
            part[f"{name}|{what}"] = piece
            held += piece.nbytes
        files[name] = _part(rank, written)
        if held >= PART_BYTES:
            write()
    write()
    (folder / _index(rank)).write_bytes(msgspec.msgpack.encode(_Index(files, kinds, numbers)))
    if engine.ranks.first and (buffers := _buffers(engine)):
        save_file({name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}, folder / BUFFERS)


def load(engine: PolicyEngine, folder: Path, ranks: int) -> None:
    """Load what `ranks` ranks have saved, on any number of ranks. A collective.

    Raises: BadCheckpoint: a file is missing or broken, or has not this model's parameters; names it.
    """
    try:
        _load(engine, _Pieces(folder, ranks))
        if (folder / BUFFERS).exists():
            saved = load_file(folder / BUFFERS)
            for name, buffer in _buffers(engine).items():
                buffer.data.copy_(saved[name])
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise BadCheckpoint(f"{folder}: {error}") from error
    except KeyError as error:
        raise BadCheckpoint(f"{folder}: it has no tensor {error}") from error


def _load(engine: PolicyEngine, saved: _Pieces) -> None:
    optimizer = engine.deepspeed.optimizer
    flats = optimizer.fp32_partitioned_groups_flat
    states: list[dict[str, Any]] = [{kind: torch.zeros_like(flat) for kind in saved.kinds} for flat in flats]
    optimizer.checkpoint_event_prologue()
    for group, name, start, numel in _parameters(engine):
        share = share_of(numel, engine.ranks.size, engine.ranks.rank)
        places = {WEIGHT: flats[group].data, **{kind: states[group][kind] for kind in saved.kinds}}
        for what, flat in places.items():
            saved.read(name, what, numel, share, flat.narrow(0, start, len(share)))
    for state in states:
        state.update({name: _number(optimizer, number) for name, number in saved.numbers.items()})
    if saved.kinds or saved.numbers:
        optimizer._set_fp32_optimizer_param_groups()
        whole = optimizer.optimizer.state_dict()
        optimizer.optimizer.load_state_dict({**whole, "state": dict(enumerate(states))})
        optimizer._clear_fp32_optimizer_param_groups()
    # The model computes with these weights, rounded. DeepSpeed's partitions also become views of one tensor again.
    for group, flat in enumerate(flats):
        if flat.numel():
            optimizer.fp16_partitioned_groups_flat[group].data.copy_(flat.data)
        views = optimizer.unflatten(
            optimizer.fp16_partitioned_groups_flat[group], optimizer.fp16_partitioned_groups[group]
        )
        for partition, view in zip(optimizer.fp16_partitioned_groups[group], views, strict=True):
            partition.data = view.data
    optimizer.checkpoint_event_epilogue()


class _Pieces:
    """The files of one checkpoint, opened as they are needed."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._ranks = folder, ranks
        self._indices = [
            msgspec.msgpack.decode((folder / _index(rank)).read_bytes(), type=_Index) for rank in range(ranks)
        ]
        self._open: dict[str, Any] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        return self._indices[0].kinds

    @property
    def numbers(self) -> dict[str, float]:
        return self._indices[0].numbers

    def read(self, name: str, what: str, numel: int, share: range, into: Tensor) -> None:
        """Copy the elements `share` of a flattened parameter of `numel` elements into `into`, from the pieces that have them."""
        for rank, index in enumerate(self._indices):
            theirs = share_of(numel, self._ranks, rank)
            wanted = range(max(theirs.start, share.start), min(theirs.stop, share.stop))
            if not len(wanted):
                continue
            piece = self._file(index.files[name]).get_slice(f"{name}|{what}")
            if piece.get_shape() != [len(theirs)]:
                raise BadCheckpoint(
                    f"{self._folder}/{index.files[name]}: {name}|{what} has shape {piece.get_shape()}, not [{len(theirs)}]"
                )
            found = piece[wanted.start - theirs.start : wanted.stop - theirs.start]
            into[wanted.start - share.start : wanted.stop - share.start].copy_(found)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self._folder / name, framework="pt")
        return self._open[name]


def _parameters(engine: PolicyEngine) -> Iterator[tuple[int, str, int, int]]:
    """(DeepSpeed's sub-group, name, where its partition starts in the sub-group's flat tensors, elements of the whole)."""
    names = {id(parameter): name for name, parameter in engine.lm.named_parameters()}
    for group, parameters in enumerate(engine.deepspeed.optimizer.fp16_groups):
        start = 0
        for parameter in parameters:
            yield group, names[id(parameter)], start, full_numel(parameter)
            start += parameter.partition_numel()


def share_of(numel: int, ranks: int, rank: int) -> range:
    """The elements of a flattened parameter that a rank holds under ZeRO-3, without the padding of the last pieces."""
    chunk = -(-numel // ranks)
    return range(min(rank * chunk, numel), min((rank + 1) * chunk, numel))


def _described(optimizer: Any, states: list[dict[str, Any]]) -> tuple[tuple[str, ...], dict[str, float]]:
    """Names of the tensors in the optimizer's state, and its numbers, which are the same for all parameters."""
    kinds: set[str] = set()
    numbers: list[dict[str, float]] = []
    for flat, state in zip(optimizer.fp32_partitioned_groups_flat, states, strict=True):
        here: dict[str, float] = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.numel() == flat.numel() and value.ndim:
                kinds.add(name)
            elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                here[name] = float(value)
            else:
                raise TrainerError(
                    f"checkpoint: the optimizer's {name} must be a number or a tensor of shape {flat.shape}"
                )
        numbers.append(here)
    if any(set(state) != set(states[0]) for state in states) or any(other != numbers[0] for other in numbers):
        raise TrainerError("checkpoint: the optimizer's state differs from parameter to parameter")
    return tuple(sorted(kinds)), numbers[0]


def _number(optimizer: Any, value: float) -> Any:
    """torch's optimizers count in a tensor, DeepSpeed's own in an int."""
    return torch.tensor(value) if isinstance(optimizer.optimizer, torch.optim.AdamW) else int(value)


def _buffers(engine: PolicyEngine) -> dict[str, Tensor]:
    whole = engine.lm.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in whole.items() if not isinstance(tensor, torch.nn.Parameter)}


def _index(rank: int) -> str:
    return f"rank-{rank:05d}.msgpack"


def _part(rank: int, number: int) -> str:
    return f"rank-{rank:05d}-part-{number:05d}.safetensors"

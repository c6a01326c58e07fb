"""Files that the safetensors library reads, with the digests that a worker computes."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from steno_trainer.errors import WeightsUnavailable
from steno_trainer.weights.files.shards import SAFETENSORS_DTYPES, shard_name, write_shard

shapes = st.lists(st.integers(0, 5), max_size=3)


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


@given(st.lists(st.tuples(st.sampled_from(list(SAFETENSORS_DTYPES)), shapes), min_size=1, max_size=6))
def test_what_is_written_is_read_back_and_has_the_digests_of_the_manifest(tmp_path_factory, layout) -> None:
    path = tmp_path_factory.mktemp("shards") / shard_name(0, 1)
    tensors = {f"t{n}": torch.randint(0, 2, shape).to(dtype).contiguous() for n, (dtype, shape) in enumerate(layout)}
    shard, entries = write_shard(path, tensors)
    data = path.read_bytes()
    assert (shard.name, shard.size, shard.digest) == (path.name, len(data), digest(data))
    read = load_file(path)
    assert read.keys() == tensors.keys() and [entry.name for entry in entries] == list(tensors)
    for entry in entries:
        there = read[entry.name]
        raw = bytes(there.reshape(-1).view(torch.uint8).tolist()) if there.numel() else b""
        assert entry.digest == digest(raw)
        assert (entry.shape, f"torch.{entry.dtype}") == (list(there.shape), str(there.dtype))
        assert there.dtype == tensors[entry.name].dtype


def test_a_tensor_larger_than_one_write_is_hashed_whole(tmp_path: Path) -> None:
    tensor = torch.arange(3_000_000, dtype=torch.float32)
    shard, [entry] = write_shard(tmp_path / shard_name(0, 1), {"w": tensor})
    assert entry.digest == digest(tensor.numpy().tobytes())
    assert shard.digest == digest((tmp_path / shard.name).read_bytes())


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable, match=r"w: safetensors has no torch\.complex32"):
        write_shard(tmp_path / shard_name(0, 1), {"w": torch.zeros(2, dtype=torch.complex32)})


def test_names_are_those_that_transformers_gives() -> None:
    assert shard_name(0, 2) == "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_values_that_are_no_numbers_are_not_written(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    tensor = torch.zeros(3, 5)
    tensor[2, 4] = value
    with pytest.raises(WeightsUnavailable, match=r"head\.weight has NaN or infinite values"):
        write_shard(tmp_path / "x.safetensors", {"head.weight": tensor.to(dtype)})

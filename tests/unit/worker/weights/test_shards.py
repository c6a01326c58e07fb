"""A shard is taken for what its manifest says, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import WeightsRefused
from steno.contracts.policy import Manifest
from steno_worker.weights.shard_files import ShardCheck, check_complete, check_manifest
from tests.support.weights.shards import digest, manifest_of, shard_bytes, tensor, two_shards

SHARDS = two_shards()
MANIFEST = manifest_of(SHARDS)
DATA = {name: shard_bytes(tensors) for name, tensors in SHARDS.items()}


def check(manifest: Manifest, index: int, data: bytes, *, step: int | None = None) -> ShardCheck:
    one = ShardCheck(manifest.shards[index], {entry.name: entry for entry in manifest.tensors})
    for start in range(0, len(data), step or max(1, len(data))):
        one.feed(data[start : start + (step or len(data))])
    one.finish()
    return one


@given(st.integers(1, 6000))
def test_the_pieces_in_which_it_comes_do_not_matter(step: int) -> None:
    checks = [check(MANIFEST, index, data, step=step) for index, data in enumerate(DATA.values())]
    assert [one.tensors for one in checks] == [["x", "empty", "n"], ["y"]]
    check_complete(MANIFEST, checks)


@given(st.data())
def test_any_changed_byte_is_found(data: st.DataObject) -> None:
    whole = bytearray(DATA["a.safetensors"])
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WeightsRefused, match=r"a\.safetensors"):
        check(MANIFEST, 0, bytes(whole), step=1000)


def with_tensor(index: int, **change: Any) -> Manifest:
    manifest = MANIFEST.model_copy(deep=True)
    manifest.tensors[index] = manifest.tensors[index].model_copy(update=change)
    return manifest


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (with_tensor(0, digest=digest(b"else")), r"'x' with digest .* the manifest says .*\(digest\)"),
        (with_tensor(0, dtype="bfloat16"), r"'x' as float32, the manifest says bfloat16 \(dtype\)"),
        (with_tensor(0, shape=[40, 30]), r"'x' of shape \[30, 40\], the manifest says \[40, 30\] \(shape\)"),
        (with_tensor(0, name="z"), r"tensor 'x', which the manifest does not name"),
    ],
)
def test_a_tensor_that_is_not_what_was_said_is_named(manifest: Manifest, said: str) -> None:
    with pytest.raises(WeightsRefused, match=said) as refused:
        check(manifest, 0, DATA["a.safetensors"])
    assert refused.value.field == "manifest.shards.a.safetensors"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (DATA["a.safetensors"][:-1], r"has \d+ bytes, the manifest says \d+ \(size\)"),
        (DATA["a.safetensors"] + b"\0", r"more than the \d+ bytes"),
        (b"\xff" * len(DATA["a.safetensors"]), "no safetensors file"),
        ((100).to_bytes(8, "little") + b"{" * (len(DATA["a.safetensors"]) - 8), "header that can't be read"),
    ],
)
def test_a_file_of_another_kind_or_length_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(WeightsRefused, match=said):
        check(MANIFEST, 0, data)


def test_a_digest_of_the_file_that_differs_is_refused() -> None:
    manifest = MANIFEST.model_copy(deep=True)
    manifest.shards[0].digest = digest(b"else")
    with pytest.raises(WeightsRefused, match=r"the manifest says .* \(digest\)"):
        check(manifest, 0, DATA["a.safetensors"])


def test_every_tensor_lies_in_one_shard_exactly() -> None:
    twice = {"a.safetensors": {"x": tensor([2])}, "b.safetensors": {"x": tensor([2])}}
    manifest = manifest_of(twice)
    with pytest.raises(WeightsRefused, match="'x' twice"):
        check_manifest(manifest)
    checks = [check(manifest, index, shard_bytes(tensors)) for index, tensors in enumerate(twice.values())]
    with pytest.raises(WeightsRefused, match=r"is in shards a\.safetensors and b\.safetensors"):
        check_complete(manifest, checks)
    with pytest.raises(WeightsRefused, match="'y' is in none"):
        check_complete(MANIFEST, [check(MANIFEST, 0, DATA["a.safetensors"])])

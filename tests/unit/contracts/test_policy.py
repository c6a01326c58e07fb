"""What a trainer or a proxy of an earlier release posts is the same update to this one, under the same id."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from steno.contracts.lenient import read_json
from steno.contracts.policy import AdapterEntry, Manifest, PatchEntry, Probe, ShardEntry, UpdateSpec
from tests.support.weights.shards import manifest_of, spec, two_shards

PROBE = {"token_ids": [1, 2], "logprobs": [-1.0], "tolerance": 0.1}


def test_fields_that_are_not_set_are_not_written() -> None:
    earlier = spec(manifest_of(two_shards()), probe=PROBE)
    assert earlier.update_id == "6c36db4322d09f754a540f9df7932a9f"
    assert UpdateSpec.model_validate_json(earlier.model_dump_json()) == earlier
    assert earlier.model_dump()["probe"] == PROBE


def test_fields_that_are_set_are_part_of_the_update() -> None:
    probe = Probe.model_validate(PROBE | {"mean_tolerance": 0.05, "p90_tolerance": 0.15})
    later = spec(manifest_of(two_shards()), probe=probe)
    assert later.update_id != spec(manifest_of(two_shards()), probe=PROBE).update_id
    assert UpdateSpec.model_validate_json(later.model_dump_json()).probe == probe


def patch(number: int, before: str, after: str) -> PatchEntry:
    files = [ShardEntry(name=f"patch-{number}-{shard}.patch", size=10 + shard, digest="0" * 32) for shard in (1, 2)]
    return PatchEntry(before=before, after=after, files=files)


def test_patches_are_part_of_the_update_and_come_after_the_shards() -> None:
    manifest = manifest_of(two_shards())
    plain, shards = spec(manifest).update_id, [shard.name for shard in manifest.shards]
    assert "patches" not in manifest.model_dump()
    whole = manifest.size
    manifest.patches = [patch(1, "a" * 32, "b" * 32), patch(2, "b" * 32, manifest.digest)]
    assert spec(manifest).update_id != plain
    assert [file.name for file in manifest.files] == [
        *shards, "patch-1-1.patch", "patch-1-2.patch", "patch-2-1.patch", "patch-2-2.patch",
    ]  # fmt: skip
    assert manifest.size == whole + 46 and [one.size for one in manifest.patches] == [23, 23]
    again = read_json(UpdateSpec, spec(manifest).model_dump_json())
    assert again == spec(manifest) and again.update_id == spec(manifest).update_id
    assert manifest.digest == manifest_of(two_shards()).digest, "of the result, whatever it is made of"


@pytest.mark.parametrize("name", ["../a.patch", "a.pt", ".patch", "a.patch.gz"])
def test_files_are_shards_or_patches_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match="String should match pattern"):
        ShardEntry(name=name, size=1, digest="0" * 32)


def test_a_manifest_of_before_has_no_patches() -> None:
    told = manifest_of(two_shards()).model_dump_json()
    assert Manifest.model_validate_json(told).patches == []


def test_an_adapter_is_part_of_what_weights_are() -> None:
    """The same tensors onto another model, or at another scale, are other weights."""
    manifest = manifest_of(two_shards())
    plain = manifest.digest
    entry = AdapterEntry(base="a" * 32, rank=4, alpha=8)
    digests = {plain}
    for changed in ({}, {"alpha": 4}, {"rank": 8}, {"base": "b" * 32}):
        one = entry.model_copy(update=changed)
        manifest.adapter = one
        digests.add(manifest.digest)
        again = read_json(UpdateSpec, spec(manifest).model_dump_json())
        assert again.manifest.adapter == one and again.update_id == spec(manifest).update_id
    assert len(digests) == 5
    manifest.adapter = None
    assert manifest.digest == plain and "adapter" not in manifest.model_dump()

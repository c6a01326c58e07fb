"""What a trainer or a proxy of an earlier release posts is the same update to this one, under the same id."""

from __future__ import annotations

from steno.contracts.policy import Probe, UpdateSpec
from tests.support.shards import manifest_of, spec, two_shards

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

"""What every policy store promises: one suite, run against each. Subclass it where there is a fixture `store`."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.errors import Conflict, NotFound
from steno.contracts.policy import Manifest, Probe, ShardEntry, TensorEntry, UpdateSpec
from steno_proxy.store.interface import SessionStore
from steno_proxy.store.policies import PolicyHead

SHARD_BYTES = 1000


def digest(number: int) -> str:
    return f"{number:032x}"


def spec(
    step: int = 1, *, weights: int | None = None, shards: int = 2, size: int = SHARD_BYTES, **fields: Any
) -> UpdateSpec:
    """An update. weights: what its digests are of; the step by default."""
    content = step if weights is None else weights
    manifest = Manifest(
        tensors=[TensorEntry(name="head", dtype="float32", shape=[2, 3], digest=digest(content))],
        shards=[
            ShardEntry(name=f"model-{i}.safetensors", size=size, digest=digest(100 * content + i))
            for i in range(shards)
        ],
    )
    given: dict[str, Any] = {
        "lineage": "run-a",
        "step": step,
        "transport": "filesystem",
        "location": "/weights",
        "manifest": manifest,
    }
    return UpdateSpec(**(given | fields))


class PolicyContract:
    async def test_nothing_is_known_of_a_policy_before_its_first_update(self, store: SessionStore) -> None:
        assert await store.policies.heads() == []
        with pytest.raises(NotFound):
            await store.policies.update("nobody")
        await store.policies.serve("nobody")
        await store.policies.end("nobody", "done", now=1.0)
        assert await store.policies.heads() == []

    async def test_an_update_comes_back_as_it_was_posted(self, store: SessionStore) -> None:
        asked = spec(3, policy="π: the: second", probe=Probe(token_ids=[1, 2], logprobs=[-0.1]))
        row = await store.policies.post(asked, now=10.123456789)
        assert (row.version, row.number, row.state, row.created_at, row.since) == (
            "run-a/3", 1, "running", 10.123456789, 10.123456789,
        )  # fmt: skip
        assert UpdateSpec.model_validate_json(row.spec) == asked
        assert await store.policies.update(asked.update_id) == row
        assert await store.policies.heads() == [PolicyHead(asked.policy, asked.update_id, 10.123456789)]

    async def test_the_same_spec_again_is_the_same_update(self, store: SessionStore) -> None:
        first = await store.policies.post(spec(1), now=1.0)
        assert await store.policies.post(spec(1), now=2.0) == first
        newer = await store.policies.post(spec(2), now=3.0)
        again = await store.policies.post(spec(1), now=4.0)
        assert (again.update_id, again.state, again.ended_at) == (first.update_id, "superseded", 3.0)
        assert [head.posted for head in await store.policies.heads()] == [newer.update_id], (
            "nobody goes back to old weights"
        )

    async def test_i10_a_known_version_with_other_weights_is_a_conflict(self, store: SessionStore) -> None:
        await store.policies.post(spec(1), now=1.0)
        with pytest.raises(Conflict, match="other weights") as refused:
            await store.policies.post(spec(1, weights=7), now=2.0)
        assert refused.value.field == "manifest"
        await store.policies.post(spec(2), now=3.0)
        with pytest.raises(Conflict, match="other weights"):
            await store.policies.post(spec(1, weights=7), now=4.0)
        await store.policies.post(spec(1, weights=7, policy="another"), now=5.0)
        await store.policies.post(spec(1, weights=7, lineage="run-b"), now=6.0)

    async def test_the_newest_version_may_come_by_another_way_an_older_one_may_not(self, store: SessionStore) -> None:
        first = await store.policies.post(spec(1), now=1.0)
        moved = await store.policies.post(spec(1, location="/elsewhere"), now=2.0)
        assert (moved.number, moved.version) == (2, first.version)
        assert (await store.policies.update(first.update_id)).state == "superseded"
        await store.policies.post(spec(2), now=3.0)
        with pytest.raises(Conflict, match="superseded"):
            await store.policies.post(spec(1, location="/third"), now=4.0)

    async def test_what_is_served_never_goes_back(self, store: SessionStore) -> None:
        rows = [await store.policies.post(spec(step), now=float(step)) for step in (1, 2, 3)]
        await store.policies.serve(rows[1].update_id)
        await store.policies.serve(rows[0].update_id)
        [head] = await store.policies.heads()
        assert (head.posted, head.served) == (rows[2].update_id, rows[1].update_id)
        await store.policies.serve(rows[2].update_id)
        await store.policies.serve(rows[2].update_id)
        assert (await store.policies.heads())[0].served == rows[2].update_id

    async def test_names_are_kept_until_they_are_retired(self, store: SessionStore) -> None:
        policies = store.policies
        assert await policies.names() == {} and not await policies.retire_name("π/judge")
        await policies.keep_names({"π/judge": "geprüft", "actor": "default"})
        await policies.keep_names({"actor": "default"})
        assert await policies.names() == {"actor": "default", "π/judge": "geprüft"}
        assert await policies.retire_name("π/judge") and not await policies.retire_name("π/judge")
        assert await policies.names() == {"actor": "default"}
        assert await policies.retire_name("actor")
        assert await policies.names() == {}

    async def test_a_name_has_the_policy_that_was_told_last(self, store: SessionStore) -> None:
        policies = store.policies
        await policies.keep_names({"actor": "default", "judge": "frozen"})
        await policies.keep_names({"actor": "second"})
        assert await policies.names() == {"actor": "second", "judge": "frozen"}
        assert await policies.retire_name("actor")
        await policies.keep_names({"actor": ""})
        assert await policies.names() == {"actor": "", "judge": "frozen"}, "what it had before it was retired is gone"

    async def test_a_failed_update_runs_again_when_it_is_posted_again(self, store: SessionStore) -> None:
        row = await store.policies.post(spec(1), now=1.0)
        await store.policies.end(row.update_id, "failed", now=5.0)
        failed = await store.policies.update(row.update_id)
        assert (failed.state, failed.ended_at) == ("failed", 5.0)
        again = await store.policies.post(spec(1), now=8.0)
        assert (again.state, again.ended_at, again.created_at, again.since) == ("running", None, 1.0, 8.0)
        assert (await store.policies.heads())[0].since == 8.0

    async def test_an_update_that_runs_again_says_so_though_the_clock_went_back(self, store: SessionStore) -> None:
        began = 1_800_000_000.123456
        row = await store.policies.post(spec(1), now=began)
        for _ in range(2):
            await store.policies.end(row.update_id, "failed", now=began + 1.0)
            again = await store.policies.post(spec(1), now=began - 60.0)
            assert (again.state, again.ended_at) == ("running", None)
            assert row.since + 0.0005 < again.since < row.since + 0.01
            assert await store.policies.update(row.update_id) == again
            assert (await store.policies.heads())[0].since == again.since
            row = again

    async def test_how_an_update_ended_stays_but_a_failed_one_may_be_done_after_all(self, store: SessionStore) -> None:
        row = await store.policies.post(spec(1), now=1.0)
        await store.policies.end(row.update_id, "failed", now=2.0)
        await store.policies.end(row.update_id, "done", now=3.0)
        await store.policies.end(row.update_id, "failed", now=4.0)
        done = await store.policies.update(row.update_id)
        assert (done.state, done.ended_at) == ("done", 3.0)
        await store.policies.post(spec(2), now=5.0)
        await store.policies.end(row.update_id, "done", now=6.0)
        assert ((await store.policies.update(row.update_id)).state, done.ended_at) == ("superseded", 3.0)

"""Policy updates through a real proxy, with workers that are scripted (I10)."""

from __future__ import annotations

import asyncio
import time

import pytest

from steno.contracts.errors import BadRequest, Conflict, NotFound
from steno.contracts.policy import PatchEntry, Probe, ShardEntry, UpdateSpec
from steno.contracts.wire.frames import Abandon, Apply, Prepare, Progress
from steno_proxy.policies import member
from tests.integration.policy.conftest import Fleet
from tests.support.contracts.policy import spec
from tests.support.waiting import until


async def test_every_worker_is_told_to_load_once_all_are_ready(fleet: Fleet) -> None:
    one, two = await fleet.workers("one", "two", auto=False)
    update = await fleet.steno.post_update(spec(1, probe=Probe(token_ids=[1, 2], logprobs=[-0.5])))
    assert (update.state, update.version, [w.state for w in update.workers]) == (
        "running",
        "run-a/1",
        ["waiting", "waiting"],
    )
    await until(lambda: one.count(Prepare) == two.count(Prepare) == 1)
    assert one.specs[update.update_id].probe == Probe(token_ids=[1, 2], logprobs=[-0.5])

    await one.stage(update.update_id)
    await until(lambda: fleet.policies._run(update.update_id).members["one"].state == "ready")
    assert one.count(Apply) == 0, "the other one is not ready"
    assert fleet.eligible() == ["one", "two"], "they generate while they stage"
    await two.stage(update.update_id)
    await until(lambda: one.count(Apply) == two.count(Apply) == 1)

    await one.load(update.update_id)
    await until(lambda: fleet.policies._run(update.update_id).members["one"].state == "served")
    assert fleet.eligible() == ["one", "two"], "who was told to load gets turns: they go on under the new version"
    await two.load(update.update_id)
    done = await fleet.ended(update.update_id)
    assert (done.state, [(w.worker_id, w.state, w.pause_s, w.load_s) for w in done.workers]) == (
        "done", [("one", "served", 0.01, 0.02), ("two", "served", 0.01, 0.02)],
    )  # fmt: skip
    assert done.ended_at is not None
    [policy] = await fleet.steno.policies()
    assert (policy.version, policy.update_id, policy.workers) == (
        "run-a/1",
        update.update_id,
        {"run-a/1": ["one", "two"]},
    )


async def test_a_proxy_told_to_stop_answers_who_waits_for_an_update(fleet: Fleet) -> None:
    """A restart waited for it, and then broke it off."""
    await fleet.worker("one", auto=False)
    update = await fleet.steno.post_update(spec(1))
    waits = asyncio.create_task(fleet.steno.update(update.update_id, wait_s=60))
    await until(lambda: fleet.policies._waiters)
    fleet.app.state.services.stopping.set()  # as the server does
    async with asyncio.timeout(30):
        assert (await waits).state == "running"


async def test_a_refusal_leaves_the_others_updated_and_takes_that_worker_out_of_routing(fleet: Fleet) -> None:
    await fleet.worker("good")
    bad = await fleet.worker("bad", refuse="shard model-0.safetensors has another digest")
    update = await fleet.ended((await fleet.steno.post_update(spec(1))).update_id)
    assert update.state == "done"
    assert [(w.worker_id, w.state, w.error) for w in update.workers] == [
        ("bad", "failed", "weights_refused: shard model-0.safetensors has another digest"),
        ("good", "served", None),
    ]
    assert fleet.eligible() == ["good"]
    assert await fleet.turns(6) == {"good": 6, "bad": 0}
    behind = {worker.id: worker.behind for worker in await fleet.steno.workers()}
    assert behind == {"bad": ["default"], "good": []}
    bad.refuse = ""
    fleet.policies._run(update.update_id).members["bad"].retry_at = 0.0  # its backoff is over
    fleet.policies._tick()
    await until(lambda: fleet.eligible() == ["bad", "good"])
    assert bad.version == "run-a/1"


async def test_weights_that_nobody_takes_fail_and_the_old_ones_go_on(fleet: Fleet) -> None:
    peers = await fleet.workers("one", "two")
    await fleet.ended((await fleet.steno.post_update(spec(1))).update_id)
    for peer in peers:
        peer.refuse = "tensor head has another shape"
    failed = await fleet.ended((await fleet.steno.post_update(spec(2))).update_id)
    assert (failed.state, {w.state for w in failed.workers}) == ("failed", {"failed"})
    assert fleet.eligible() == ["one", "two"]
    assert (await fleet.steno.policies())[0].version == "run-a/1"
    late = await fleet.worker("late")
    await until(lambda: fleet.eligible() == ["late", "one", "two"])
    assert late.version == "run-a/1", "brought to what the others serve, not to what failed"

    for peer in peers:
        peer.refuse = ""
    again = await fleet.steno.post_update(spec(2))
    assert (again.update_id, again.state) == (failed.update_id, "running"), "posted again, it is tried again"
    assert (await fleet.ended(again.update_id)).state == "done"
    await until(lambda: {peer.version for peer in [*peers, late]} == {"run-a/2"})


async def test_a_late_worker_gets_no_turns_until_it_has_caught_up(fleet: Fleet) -> None:
    await fleet.worker("early")
    update = await fleet.ended((await fleet.steno.post_update(spec(1))).update_id)
    late = await fleet.worker("late", auto=False)
    assert fleet.eligible() == ["early"]
    await until(lambda: late.count(Prepare) == 1)
    await late.stage(update.update_id)
    await until(lambda: late.count(Apply) == 1)
    assert fleet.eligible() == ["early"], "it may generate a token of the old version yet"
    await late.load(update.update_id)
    await until(lambda: fleet.eligible() == ["early", "late"])
    seen = await fleet.steno.update(update.update_id)
    assert (seen.state, [w.state for w in seen.workers]) == ("done", ["served", "served"])
    up_to_date = await fleet.worker("third", version="run-a/1", auto=False)
    assert fleet.eligible() == ["early", "late", "third"]
    assert up_to_date.frames == []


async def test_with_only_late_workers_there_is_no_worker(fleet: Fleet) -> None:
    early = await fleet.worker("early")
    await fleet.ended((await fleet.steno.post_update(spec(1))).update_id)
    await early.die()
    await until(lambda: not fleet.hub.workers())
    await fleet.worker("late", auto=False)
    assert fleet.hub.cards() == []


async def test_turns_that_wait_are_given_to_a_worker_as_soon_as_it_has_caught_up(fleet: Fleet) -> None:
    early = await fleet.worker("early")
    update = await fleet.ended((await fleet.steno.post_update(spec(1))).update_id)
    await early.die()
    await until(lambda: not fleet.hub.workers())
    late = await fleet.worker("late", auto=False)
    await until(lambda: late.count(Prepare) == 1)
    turns = asyncio.create_task(fleet.turns(2))
    await until(lambda: fleet.hub.waiting)
    await late.stage(update.update_id)
    await until(lambda: late.count(Apply) == 1)
    assert late.generated == []
    await late.load(update.update_id)
    assert await turns == {"early": 0, "late": 2}


async def test_a_worker_that_dies_while_it_receives_does_not_hold_up_the_others(fleet: Fleet) -> None:
    one = await fleet.worker("one")
    dying = await fleet.worker("dying", auto=False)
    update = await fleet.steno.post_update(spec(1))
    await until(lambda: dying.count(Prepare) == 1)
    await dying.die()
    done = await fleet.ended(update.update_id)
    assert (done.state, [(w.worker_id, w.state) for w in done.workers]) == (
        "done",
        [("dying", "failed"), ("one", "served")],
    )
    assert one.version == "run-a/1"
    assert "worker_lost" in (done.workers[0].error or "")
    again = await fleet.worker("dying")
    await until(lambda: fleet.eligible() == ["dying", "one"])
    assert again.version == "run-a/1"


async def test_the_only_worker_dies_between_ready_and_served_and_its_successor_finishes(fleet: Fleet) -> None:
    first = await fleet.worker("only", auto=False)
    update = await fleet.steno.post_update(spec(1))
    await until(lambda: first.count(Prepare) == 1)
    await first.stage(update.update_id)
    await until(lambda: first.count(Apply) == 1)
    await first.die()
    await until(lambda: not fleet.hub.workers())
    assert (await fleet.steno.update(update.update_id)).state == "running", "somebody will start it again"
    second = await fleet.worker("only")
    done = await fleet.ended(update.update_id)
    assert (done.state, second.version) == ("done", "run-a/1")


async def test_at_the_deadline_those_that_are_ready_load_and_the_slow_one_follows_later(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "FIRST_RETRY_S", member.MOST_RETRY_S)
    fast = await fleet.worker("fast")
    slow = await fleet.worker("slow", auto=False)
    update = await fleet.steno.post_update(spec(1))
    await fleet.past_deadline(update.update_id, "fast")
    done = await fleet.ended(update.update_id)
    assert (done.state, fast.version) == ("done", "run-a/1")
    assert [(w.worker_id, w.state, w.error) for w in done.workers if w.worker_id == "slow"] == [
        ("slow", "failed", "deadline: not received in time")
    ]
    assert fleet.eligible() == ["fast"]
    await slow.stage(update.update_id)
    await until(lambda: slow.count(Apply) == 1)
    await slow.load(update.update_id)
    await until(lambda: fleet.eligible() == ["fast", "slow"])


async def test_a_newer_update_takes_the_place_of_one_that_runs(fleet: Fleet) -> None:
    [peer] = await fleet.workers("one", auto=False)
    first = await fleet.steno.post_update(spec(1))
    await until(lambda: peer.count(Prepare) == 1)
    second = await fleet.steno.post_update(spec(2))
    await until(lambda: peer.count(Abandon, first.update_id) == 1 and peer.count(Prepare, second.update_id) == 1)
    assert (await fleet.steno.update(first.update_id)).state == "superseded"
    assert (await fleet.steno.post_update(spec(1))).state == "superseded", "nobody goes back to old weights"
    await peer.stage(first.update_id)
    await peer.stage(second.update_id)
    await until(lambda: peer.count(Apply) == 1)
    assert peer.count(Apply, second.update_id) == 1
    await peer.load(second.update_id)
    assert (await fleet.ended(second.update_id)).state == "done"


async def test_what_was_loading_when_a_newer_update_came_goes_on_generating(fleet: Fleet) -> None:
    [peer] = await fleet.workers("one", auto=False)
    first = await fleet.steno.post_update(spec(1))
    await until(lambda: peer.count(Prepare) == 1)
    await peer.stage(first.update_id)
    await until(lambda: peer.count(Apply) == 1)
    second = await fleet.steno.post_update(spec(2))
    await peer.load(first.update_id)
    await until(lambda: peer.count(Prepare, second.update_id) == 1)
    await until(lambda: fleet.policies._run(first.update_id).members["one"].state == "served")
    assert peer.count(Abandon) == 0
    assert fleet.eligible() == ["one"]


async def test_the_same_spec_is_the_same_update_and_other_weights_are_a_conflict(fleet: Fleet) -> None:
    await fleet.worker("one")
    first = await fleet.steno.post_update(spec(1))
    assert (await fleet.steno.post_update(spec(1))).update_id == first.update_id
    with pytest.raises(Conflict, match="other weights"):
        await fleet.steno.post_update(spec(1, weights=9))
    with pytest.raises(NotFound):
        await fleet.steno.update("0" * 32)


async def test_bad_specs_name_the_field(fleet: Fleet) -> None:
    two_names = spec(1)
    two_names.manifest.shards[1].name = two_names.manifest.shards[0].name
    for bad, field in (
        (spec(1, location=""), "location"), (spec(1, transport="stream"), "location"),
        (spec(1, shards=0), "manifest.shards"), (spec(1, transport="nccl"), "manifest.shards"),
        (spec(1, probe=Probe(token_ids=[1, 2, 3], logprobs=[-1.0])), "probe.logprobs"), (two_names, "manifest.shards"),
    ):  # fmt: skip
        with pytest.raises(BadRequest) as refused:
            await fleet.steno.post_update(bad)
        assert refused.value.field == field


async def test_patches_that_lead_nowhere_are_refused_by_name(fleet: Fleet) -> None:
    def patched(*ends: tuple[str, str], files: int = 2, end: str = "patch") -> UpdateSpec:
        one = spec(1)
        one.manifest.patches = [
            PatchEntry(before=before, after=after or one.manifest.digest, files=[
                ShardEntry(name=f"p{number}-{file}.{end}", size=1, digest="0" * 32) for file in range(files)
            ])
            for number, (before, after) in enumerate(ends)
        ]  # fmt: skip
        return one

    a, b = "a" * 32, "b" * 32
    twice = patched((a, ""))
    twice.manifest.patches[0].files[1].name = twice.manifest.patches[0].files[0].name
    for bad, says in (
        (patched((a, b)), f"after: got {b}, the digest of manifest.tensors is"),
        (patched((a, a), (b, "")), f"after: got {a}, `before` of patch 1 is {b}"),
        (patched((a, ""), files=1), "files: got 1, must be one for each of 2 shards"),
        (patched((a, ""), end="safetensors"), "files: got p0-0.safetensors, must be a .patch file"),
        (twice, "two shards or patches have the same name"),
    ):
        with pytest.raises(BadRequest, match=says):
            await fleet.steno.post_update(bad)
    await fleet.worker("one")
    assert (await fleet.steno.post_update(patched((a, b), (b, "")))).state == "running"


async def test_other_policies_and_upstreams_without_weights_are_left_alone(fleet: Fleet) -> None:
    await fleet.worker("one")
    frozen = await fleet.worker("frozen", policy="judge")
    text = await fleet.worker("text", text_only=True)
    done = await fleet.ended((await fleet.steno.post_update(spec(1))).update_id)
    assert [w.worker_id for w in done.workers] == ["one"]
    assert (frozen.frames, text.frames) == ([], [])
    assert fleet.eligible() == ["frozen", "one", "text"]


async def test_a_worker_that_says_what_cannot_be_loses_its_channel_and_nobody_else_does(fleet: Fleet) -> None:
    one, wild = await fleet.worker("one"), await fleet.worker("wild", auto=False)
    update = await fleet.steno.post_update(spec(1))
    await until(lambda: wild.count(Prepare) == 1)
    await wild.send(Progress(update.update_id, "rejoicing"))
    done = await fleet.ended(update.update_id)
    assert (done.state, one.version) == ("done", "run-a/1")
    assert [worker.id for worker in fleet.hub.workers()] == ["one"]


async def test_a_suspect_worker_is_trusted_again_once_a_probe_has_passed(fleet: Fleet) -> None:
    await fleet.worker("w")
    [worker] = fleet.hub._workers.values()
    for trial in "abc":
        worker._suspicion.bad_turn(trial, "nan", time.monotonic())
    await fleet.ended((await fleet.steno.post_update(spec(1))).update_id)
    assert fleet.hub.workers()[0].suspect == "nan", "weights that nobody has probed prove nothing"
    probed = spec(2, probe=Probe(token_ids=[1, 2], logprobs=[-0.5]))
    await fleet.ended((await fleet.steno.post_update(probed)).update_id)
    assert not fleet.hub.workers()[0].suspect

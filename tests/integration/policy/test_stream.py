"""Weights that come through the proxy (`stream`): forwarded as they come to all who lack them, resumed where they were cut."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

from steno.contracts.errors import BadRequest, Conflict, NotFound
from steno.contracts.policy import Want
from steno_proxy.policies import upload
from tests.integration.policy.conftest import Fleet, publish, running, shards_of
from tests.support.contracts.policy import spec
from tests.support.waiting import until
from tests.support.workers.update_peer import UpdatePeer

MIB = 1 << 20
STREAM = {"transport": "stream", "location": ""}


def assert_staged(peer: UpdatePeer, update_id: str, expected: dict[str, bytes]) -> None:
    assert {name: bytes(data) for name, data in peer.staged[update_id].items()} == expected


async def test_every_byte_arrives_at_every_worker_and_is_uploaded_once(fleet: Fleet) -> None:
    peers = [await fleet.worker("one", credit=100_000), await fleet.worker("two", credit=300_000)]
    asked = spec(1, size=MIB + 13, shards=3, **STREAM)
    done = await publish(fleet, asked)
    assert (done.state, done.wants, {w.received for w in done.workers}) == ("done", [], {3 * (MIB + 13)})
    for peer in peers:
        assert_staged(peer, done.update_id, shards_of(asked))
        assert peer.version == "run-a/1"
        assert peer.most_ahead <= peer.credit, "never more than it gave credit for"


async def test_a_worker_without_room_is_left_behind_and_served_later(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "PATIENCE_S", 0.5)
    fast = await fleet.worker("fast", credit=200_000)
    slow = await fleet.worker("slow", credit=50_000)
    asked = spec(1, size=MIB, **STREAM)
    slow.hold = True
    publishing = asyncio.create_task(publish(fleet, asked))
    await fleet.past_deadline((await fleet.steno.post_update(asked)).update_id, "fast")
    done = await publishing
    assert (done.state, fast.version, slow.version) == ("done", "run-a/1", "base/0")
    assert fleet.eligible() == ["fast"]
    slow.hold = False
    await slow.stage(done.update_id)
    await publish(fleet, asked)
    await until(lambda: slow.version == "run-a/1")
    assert_staged(slow, done.update_id, shards_of(asked))


async def test_an_upload_that_was_cut_goes_on_where_workers_are(fleet: Fleet) -> None:
    [peer] = await fleet.workers("one", credit=MIB)
    asked = spec(1, size=4 * MIB, shards=1, **STREAM)
    [(name, data)] = shards_of(asked).items()
    update = await fleet.steno.post_update(asked)
    await until(lambda: fleet.policies._run(update.update_id).wants() == [Want(shard=name, offset=0)])

    async def breaking_off():
        for at in range(0, 2 * MIB, 65536):
            yield data[at : at + 65536]
        await until(lambda: len(peer.staged[update.update_id].get(name, b"")) > MIB)
        raise ConnectionError("the network is gone")

    with contextlib.suppress(Exception):
        await fleet.steno.upload_shard(update.update_id, name, 0, breaking_off())
    await until(lambda: not fleet.policies._uploading[update.update_id, name])
    [want] = (await fleet.steno.update(update.update_id, wait_s=20)).wants
    assert MIB < want.offset <= 2 * MIB
    assert (await publish(fleet, asked)).state == "done"
    assert_staged(peer, update.update_id, shards_of(asked))


async def test_a_worker_that_starts_again_goes_on_with_what_it_had_staged(fleet: Fleet) -> None:
    first = await fleet.worker("one", credit=100_000)
    asked = spec(1, size=2 * MIB, shards=2, **STREAM)
    names = list(shards_of(asked))
    update = await fleet.steno.post_update(asked)
    await until(lambda: fleet.policies._run(update.update_id).wants())
    assert await fleet.steno.upload_shard(update.update_id, names[0], 0, shards_of(asked)[names[0]]) == 2 * MIB
    await until(lambda: [want.shard for want in fleet.policies._run(update.update_id).wants()] == [names[1]])
    await first.die()
    await until(lambda: not fleet.hub.workers())
    second = await fleet.worker("one", credit=100_000, staged=first.staged)
    await until(lambda: fleet.policies._run(update.update_id).wants() == [Want(shard=names[1], offset=0)])
    assert (await publish(fleet, asked)).state == "done"
    assert_staged(second, update.update_id, shards_of(asked))


async def test_a_late_workers_wants_appear_in_an_update_that_is_done(fleet: Fleet) -> None:
    await fleet.worker("early")
    asked = spec(1, size=MIB, **STREAM)
    done = await publish(fleet, asked)
    late = await fleet.worker("late")
    await until(lambda: fleet.policies._run(done.update_id).wants())
    waiting = await fleet.steno.update(done.update_id)
    assert (waiting.state, waiting.wants) == ("done", [Want(shard="model-0.safetensors", offset=0)])
    assert fleet.eligible() == ["early"]
    await publish(fleet, asked)
    await until(lambda: fleet.eligible() == ["early", "late"])
    assert_staged(late, done.update_id, shards_of(asked))


async def test_the_proxy_forgets_everything_in_an_update_and_the_same_post_goes_on() -> None:
    asked = spec(1, size=2 * MIB, shards=2, **STREAM)
    names = list(shards_of(asked))
    async with running() as before:
        peer = await before.worker("one", credit=100_000)
        update = await before.steno.post_update(asked)
        await until(lambda: before.policies._run(update.update_id).wants())
        await before.steno.upload_shard(update.update_id, names[0], 0, shards_of(asked)[names[0]])
        await until(lambda: len(peer.staged[update.update_id].get(names[0], b"")) == 2 * MIB)
        staged = peer.staged
    async with running() as after:
        again = await after.worker("one", credit=100_000, staged=staged)
        with pytest.raises(NotFound):
            await after.steno.update(update.update_id)
        posted = await after.steno.post_update(asked)
        assert posted.update_id == update.update_id
        await until(lambda: after.policies._run(update.update_id).wants() == [Want(shard=names[1], offset=0)])
        assert (await publish(after, asked)).state == "done"
        assert_staged(again, update.update_id, shards_of(asked))


async def test_what_nobody_confirms_is_sent_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that lost bytes on the way to its disk says the old position, and no more."""
    peer = await fleet.worker("one", auto=False, credit=100_000)
    asked = spec(1, size=10_000, shards=1, **STREAM)
    [(name, data)] = shards_of(asked).items()
    update = await fleet.steno.post_update(asked)
    await until(lambda: update.update_id in peer.specs)
    await peer.stage(update.update_id)
    run = fleet.policies._run(update.update_id)
    await until(run.wants)
    assert await fleet.steno.upload_shard(update.update_id, name, 0, data) == 10_000
    await until(lambda: len(peer.staged[update.update_id].get(name, b"")) == 10_000)
    assert run.wants() == []
    peer.staged[update.update_id].clear()
    await peer.stage(update.update_id)
    run.members["one"].cursor.moved_at = 0.0  # the time that it had to confirm is over
    await asyncio.sleep(0)
    fleet.policies._tick()
    assert run.wants() == [Want(shard=name, offset=0)]


async def test_uploads_that_nobody_can_want_are_refused(fleet: Fleet) -> None:
    await fleet.worker("one", auto=False)
    asked = spec(1, **STREAM)
    update = await fleet.steno.post_update(asked)
    for name, offset, error, field in (
        ("none.safetensors", 0, NotFound, "name"), ("model-0.safetensors", 1001, BadRequest, "offset"),
        ("model-0.safetensors", -1, BadRequest, "offset"),
    ):  # fmt: skip
        with pytest.raises(error) as refused:
            await fleet.steno.upload_shard(update.update_id, name, offset, b"x")
        assert refused.value.field == field
    with pytest.raises(NotFound):
        await fleet.steno.upload_shard("0" * 32, "model-0.safetensors", 0, b"x")
    assert await fleet.steno.upload_shard(update.update_id, "model-0.safetensors", 5, b"nobody is there") == 5
    assert await fleet.steno.upload_shard(update.update_id, "model-0.safetensors", 0, bytes(20 * MIB)) == 0, (
        "nor for much"
    )
    by_files = await fleet.steno.post_update(spec(2))
    with pytest.raises(BadRequest) as refused:
        await fleet.steno.upload_shard(by_files.update_id, "model-0.safetensors", 0, b"x")
    assert refused.value.field == "transport"
    with pytest.raises(Conflict, match="superseded"):
        await fleet.steno.upload_shard(update.update_id, "model-0.safetensors", 0, b"x")


async def test_only_the_operator_posts_polls_and_uploads() -> None:
    async with running(admin_key="the operator's") as fleet:
        agent = fleet.app.state.services.keys.agent_key("trial")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{fleet.port}", timeout=60) as http:
            for method, path in (
                ("GET", "/policy"), ("POST", "/policy/updates"), ("GET", "/policy/updates/x"),
                ("PUT", "/policy/updates/x/shards/model-0.safetensors?offset=0"),
            ):  # fmt: skip
                for key in ("none", "wrong", agent):
                    answer = await http.request(method, path, headers={"authorization": f"Bearer {key}"}, content=b"{}")
                    assert answer.status_code in (401, 403), (method, path, answer.text)

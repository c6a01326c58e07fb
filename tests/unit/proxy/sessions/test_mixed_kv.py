"""Turns that were sampled with a cache that older weights had a part in: marked on their way to the record and the trainer."""

from __future__ import annotations

import pytest

from steno.contracts.errors import EngineFailed
from steno.contracts.records import floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish
from steno_proxy.sessions.samples import samples
from tests.support.records.choices import Said, stream


def delta(version: str, mixed_kv: bool) -> Delta:
    return Delta(1, ids_to_bytes([7]), floats_to_bytes([-0.5]), version, "x", mixed_kv=mixed_kv)


KEPT = [delta("run/1", False), delta("run/2", True), Finish(1, "stop", 2)]
PLAIN = [delta("run/2", False), Finish(1, "stop", 1)]


@pytest.mark.parametrize("ended", [True, False])
async def test_the_turn_and_its_sample_are_marked_and_trained(ended: bool) -> None:
    said = await Said.begin()
    said.hear(*(KEPT if ended else KEPT[:-1]))
    (turn,) = await said.turns(None if ended else EngineFailed("gone"))
    assert turn.mixed_kv and turn.partial is not ended
    (sample,) = samples(await said.store.session("trial"), [turn]).items
    assert sample.completions[0].mixed_kv
    assert sample.loss_mask == b"\0\1\1"


async def test_a_turn_with_a_cache_of_one_version_is_not_marked() -> None:
    said = await Said.begin()
    said.hear(*PLAIN)
    (turn,) = await said.turns()
    assert not turn.mixed_kv


async def test_the_mark_stays_when_another_worker_goes_on() -> None:
    said = await Said.begin()
    said.hear(*KEPT[:-1])
    said.choice.moved(said.choice.order, stream())
    said.hear(*PLAIN)
    (turn,) = await said.turns()
    assert turn.mixed_kv and turn.completion_tokens == 3


async def test_a_turn_that_starts_again_from_nothing_leaves_it_with_what_was_lost() -> None:
    said = await Said.begin()
    said.hear(*KEPT[:-1])
    await said.choice.restart(EngineFailed("gone"), said.choice.plan)
    said.choice.moved(said.choice.order, stream())
    said.hear(*PLAIN)
    lost, turn = await said.turns()
    assert (lost.mixed_kv, lost.partial) == (True, True)
    assert (turn.mixed_kv, turn.partial) == (False, False)

"""Everything of an NCCL update but NCCL: who meets, what is sent and in which order, deadlines, and groups made anew."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from steno.contracts.errors import Conflict
from steno.contracts.policy import NcclRendezvous, Update, UpdateSpec, WorkerUpdate
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.errors import PushFailed
from steno_trainer.weights.nccl import transport
from steno_trainer.weights.nccl.transport import NcclTransport
from steno_trainer.weights.publisher import Publisher
from steno_trainer.weights.source import ModelWeights, TensorMeta
from tests.support.clock import ClockAhead
from tests.unit.trainer.weights.fake_proxy import FakeProxy
from tests.unit.trainer.weights.models import qwen

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def ports_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens on them."""
    monkeypatch.setattr(transport, "_free_port", itertools.count(30_000).__next__)


class Loading(FakeProxy):
    """All workers of a rendezvous begin to load at once, but those that are `dead`; they serve once `sent` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: set[str] = set()
        self.sent = threading.Event()
        self.meetings: list[NcclRendezvous] = []

    async def post_update(self, spec: UpdateSpec) -> Update:
        self.meetings.append(NcclRendezvous.model_validate_json(spec.location))
        self.state = "running"
        return await super().post_update(spec)

    async def update(self, update_id: str, *, wait_s: float = 0.0) -> Update:
        await asyncio.sleep(0.06)
        self._call(f"get {update_id}")
        return self._view(update_id)

    def _view(self, update_id: str) -> Update:
        ids = self.meetings[-1].rank_offsets
        alive: Any = "served" if self.sent.is_set() else "loading"
        self.workers = [WorkerUpdate(worker_id=w, state="failed" if w in self.dead else alive) for w in ids]
        self.state = "done" if self.sent.is_set() else "running"
        return super()._view(update_id)


class Recorded:
    """A group that keeps what is sent."""

    def __init__(self, meeting: NcclRendezvous, done: threading.Event) -> None:
        self.meeting, self.rounds, self.closed, self._done = meeting, [], False, done
        self.rounds: list[tuple[list[TensorMeta], list[tuple[str, Tensor]]]] = []

    def send(self, metas: list[TensorMeta], tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.rounds.append((metas, list(tensors)))
        self._done.set()

    def close(self) -> None:
        self.closed = True


class Fleet:
    """Workers that come and go, and the groups that were opened."""

    def __init__(self, **workers: float) -> None:
        self.workers = dict(workers)
        self.proxy = Loading()
        self.groups: list[Recorded] = []

    def nccl(self, open_group: Callable[[NcclRendezvous], Any] | None = None, **options: Any) -> NcclTransport:
        return NcclTransport(
            None, lambda: dict(self.workers), address=lambda: "127.0.0.1", open_group=open_group or self.open, **options
        )

    def until_told(self, meeting: NcclRendezvous) -> None:
        """Workers join once they have been told of it; and the next update is not posted before this one."""
        while meeting not in self.proxy.meetings:
            time.sleep(0.005)

    def open(self, meeting: NcclRendezvous) -> Recorded:
        self.until_told(meeting)
        self.groups.append(Recorded(meeting, self.proxy.sent))
        return self.groups[-1]


def at(step: int) -> PolicyVersion:
    return PolicyVersion("run", step)


def test_all_tensors_are_sent_as_announced_to_all_processes_of_all_workers() -> None:
    fleet, model = Fleet(b=1.0, a=1.0), qwen(tied=True)
    with Publisher(fleet.nccl(processes={"a": 2, "b": 4}), [fleet.proxy]) as publisher:
        publication = publisher.publish(at(1), ModelWeights(model, bucket_bytes=20_000, dtype=torch.bfloat16))
        assert publisher.wait(publication, PATIENCE_S).state == "done"
    [group] = fleet.groups
    assert (group.meeting.world_size, group.meeting.rank_offsets) == (7, {"a": 1, "b": 3})
    assert group.meeting.packed_buffer_size_bytes * group.meeting.packed_num_buffers == 256 << 20
    [(metas, pairs)] = group.rounds
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs] == [
        (meta.name, meta.dtype, meta.shape) for meta in metas
    ]
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name].bfloat16()) for name, tensor in pairs)
    announced = publication.spec.manifest.tensors
    assert [tensor.name for tensor in announced] == [meta.name for meta in metas]
    assert publication.spec.manifest.shards == [] and group.closed


def test_the_group_is_kept_for_as_long_as_the_same_workers_are_there() -> None:
    fleet, model = Fleet(a=1.0), qwen()
    with Publisher(fleet.nccl(), [fleet.proxy]) as publisher:
        for step, came in ((1, 1.0), (2, 1.0), (3, 9.0)):
            fleet.proxy.sent.clear()
            fleet.workers["a"] = came  # started again before the third
            with torch.no_grad():
                model.lm_head.weight.add_(1.0)
            publisher.wait(publisher.publish(at(step), ModelWeights(model)), PATIENCE_S)
    assert [len(group.rounds) for group in fleet.groups] == [2, 1] and fleet.groups[0].closed
    first, second, third = fleet.proxy.meetings
    assert first == second != third


def test_a_worker_that_fails_is_left_out_of_the_next_group() -> None:
    fleet = Fleet(a=1.0, b=1.0)
    fleet.proxy.dead = {"b"}
    offers = [{"a": 1.0, "b": 1.0}, {"a": 1.0}]
    nccl = NcclTransport(None, lambda: offers.pop(0), address=lambda: "127.0.0.1", open_group=fleet.open)
    with Publisher(nccl, [fleet.proxy]) as publisher:
        publication = publisher.publish(at(1), ModelWeights(qwen()))
        assert publisher.wait(publication, PATIENCE_S).state == "done"
    assert [list(meeting.rank_offsets) for meeting in fleet.proxy.meetings] == [["a", "b"], ["a"]]
    [group] = [group for group in fleet.groups if group.rounds]  # the first one's thread may open it after the second's
    assert list(group.meeting.rank_offsets) == ["a"]


def test_a_thread_that_starts_after_its_group_was_given_up_creates_none() -> None:
    fleet = Fleet(a=1.0)
    nccl, source = fleet.nccl(), ModelWeights(qwen())
    nccl.stage(at(1), source)
    given_up = nccl.meeting
    fleet.workers["a"] = 2.0  # started again: another group
    nccl.stage(at(1), source)
    assert given_up and nccl.meeting and given_up is not nccl.meeting
    with pytest.raises(PushFailed, match="given up"):
        nccl.open(given_up)
    assert fleet.groups == []


def test_a_group_that_does_not_form_or_stands_still_is_given_up_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, never, clock = Fleet(a=1.0), threading.Event(), ClockAhead()
    monkeypatch.setattr(transport, "time", clock)
    stuck: list[str] = []

    def stand_still(where: str) -> None:
        stuck.append(where)
        clock.by_s += 1000.0  # longer than the deadline
        never.wait(PATIENCE_S)

    class Stuck(Recorded):
        def send(self, metas: Any, tensors: Any) -> None:
            next(tensors)  # the others are gathering
            stand_still("send")

    def open_group(meeting: NcclRendezvous) -> Recorded:
        fleet.until_told(meeting)
        if not stuck:
            stand_still("open")
        elif len(stuck) == 1:
            return Stuck(meeting, fleet.proxy.sent)
        return fleet.open(meeting)

    taken: list[int] = []

    class Counted(ModelWeights):
        def buckets(self) -> Iterator[dict[str, Tensor]]:
            taken.append(0)
            for bucket in super().buckets():
                taken[-1] += 1
                yield bucket

    source = Counted(qwen(), bucket_bytes=20_000)
    assert len(source.plan()) > 2 * transport.QUEUED_BUCKETS, "or it has given all before one stands still"
    try:
        with Publisher(fleet.nccl(open_group, deadline_s=PATIENCE_S), [fleet.proxy]) as publisher:
            publisher.wait(publisher.publish(at(1), source), PATIENCE_S)
    finally:
        never.set()
    assert stuck == ["open", "send"] and len(fleet.proxy.meetings) == 3
    assert set(taken) == {len(source.plan())}, "ranks that stop gathering leave the others in a collective"


def test_what_fails_every_time_is_given_up_with_its_reason() -> None:
    fleet, ports = Fleet(a=1.0), []

    def broken(meeting: NcclRendezvous) -> Any:
        ports.append(meeting.master_port)
        raise RuntimeError("NCCL error: unhandled system error")

    with (
        Publisher(fleet.nccl(broken), [fleet.proxy]) as publisher,
        pytest.raises(PushFailed, match="unhandled system error"),
    ):
        publisher.publish(at(1), ModelWeights(qwen()))
    assert len(set(ports)) == 3


def test_a_refusal_is_not_tried_again() -> None:
    fleet = Fleet(a=1.0)
    fleet.proxy.faults = [Conflict("run/1 exists with other weights")]
    with (
        Publisher(fleet.nccl(), [fleet.proxy]) as publisher,
        pytest.raises(PushFailed, match="other weights"),
    ):
        publisher.publish(at(1), ModelWeights(qwen()))


def test_nobody_to_send_to_is_said() -> None:
    fleet = Fleet()
    with Publisher(fleet.nccl(), [fleet.proxy]) as publisher, pytest.raises(PushFailed, match="no worker"):
        publisher.publish(at(1), ModelWeights(qwen()))

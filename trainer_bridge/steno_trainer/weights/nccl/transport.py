"""Weights straight into the engines over NCCL: vLLM's own weight-transfer engine, fed bucket by bucket from a ZeRO-3 model.

    post -> every worker of the group is loading -> all ranks gather, the first one broadcasts -> workers prove and serve

The training loop stands still meanwhile: the weights may not change while they are sent. There is no full copy, so a worker that
comes late waits for the next version. NCCL waits for ever for a peer that has died; so what may wait runs in a thread with a
deadline, and after a failure the group is made anew of the workers that are still there.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from steno.client.client import Client
from steno.contracts.policy import Manifest, NcclRendezvous, TensorEntry
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.errors import PushFailed, WeightsUnavailable
from steno_trainer.weights.exchange import GlooExchange
from steno_trainer.weights.files.shards import DIGEST_BYTES, check_numbers, tensor_bytes
from steno_trainer.weights.publication import Publication
from steno_trainer.weights.source import TensorMeta, WeightSource
from steno_trainer.weights.transports import StagedWeights

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Attempts to form a group and send. If all fail, the cause is not a worker that has died."""
LOOK_S = 0.05
"""Between looks at how far the update is."""
PACKED_BYTES, PACKED_BUFFERS = 128 << 20, 2
"""What vLLM packs tensors into, on either end: 256 MiB in all, and more only for a tensor that is larger. Its own are 2 GiB."""
QUEUED_BUCKETS = 2
"""Gathered and not yet broadcast: the next bucket is gathered while one is on its way."""

Pairs = Iterator[tuple[str, Tensor]]


class NcclGroup(Protocol):
    """The processes that NCCL connects: this one, as rank 0, and those of the workers."""

    def send(self, metas: list[TensorMeta], tensors: Pairs) -> None:
        """Broadcast `tensors`, which are as `metas` says. Blocks for as long as any worker does."""
        ...

    def close(self) -> None:
        """Also in the middle of `send`, from another thread."""
        ...


class NcclTransport:
    """The `Transport`. Its group stays open between updates for as long as the same workers are there."""

    name: Literal["nccl"] = "nccl"

    def __init__(
        self,
        ranks: Ranks | None,
        workers: Callable[[], Mapping[str, float]],
        *,
        processes: Mapping[str, int] | int = 1,
        address: Callable[[], str],
        deadline_s: float = 600.0,
        open_group: Callable[[NcclRendezvous], NcclGroup] | None = None,
    ) -> None:
        """
        Args:
            workers: id -> when it came (another time: it was started again), of those that can take part now. First rank only.
            processes: of each worker's engine (tensor x pipeline x data parallel), for all or by worker id.
            address: of the first rank's machine, as these workers reach it (`meeting_address`).
            deadline_s: for a group to form, and again for a whole transfer.
        """
        self._exchange = GlooExchange(ranks)
        self._device = ranks.device if ranks else torch.device("cpu")
        self._workers = workers
        self._processes = processes
        self._address = address
        self._deadline_s = deadline_s
        self._open_group = open_group or _vllm_group
        self._members: dict[str, float] = {}
        self._meeting: NcclRendezvous | None = None
        self._group: NcclGroup | None = None
        self._attempts = 0
        self._lock = threading.Lock()  # of the group and its meeting: threads open it, the loop drops it

    def stage(self, version: PolicyVersion, source: WeightSource, *, full: bool = False) -> StagedWeights:
        """Digests of all tensors, each computed by one rank, and where to meet. Raises: PushFailed, on all ranks: no worker, or
        weights that are no numbers."""
        told_by_rank = self._exchange.gather(self._digests(source))
        self._exchange.first(lambda: _check(told_by_rank or []))
        tensors = (
            [[entry for entry in some if isinstance(entry, dict)] for some in told_by_rank] if told_by_rank else None
        )
        location = self._exchange.first(self._meet)
        manifest = None
        if tensors is not None:
            found = {entry["name"]: TensorEntry(**entry) for some in tensors for entry in some}
            manifest = Manifest(tensors=[found[meta.name] for bucket in source.plan() for meta in bucket])
        told = self._exchange.first(lambda: manifest.model_dump() if manifest else None)
        return StagedWeights(location, Manifest.model_validate(told), None)

    def carry(self, publication: Publication, source: WeightSource) -> bool:
        """Send what was posted. A collective. Returns: False: the group has to be made anew, and the update posted again.

        Raises: PushFailed, on all ranks: refused by the proxy, or failed too often.
        """
        sender = _Sender(self, publication, source) if self._exchange.is_first else None
        problem = self._exchange.first(sender.meet if sender else lambda: "")
        if not problem:
            for bucket in source.buckets():
                if sender is not None:
                    sender.give(bucket)
            problem = self._exchange.first(sender.finish if sender else lambda: "")
        if not problem:
            self._attempts = 0
            return True
        self._drop()
        self._attempts += 1
        if self._attempts >= ATTEMPTS or self._exchange.first(lambda: publication.settled and not publication.failed):
            self._attempts = 0
            raise PushFailed(f"update {publication.version}: {problem}")
        log.warning("update %s: %s; creating the NCCL group again", publication.version, problem)
        return False

    def close(self) -> None:
        self._drop()

    # -- the first rank's part ------------------------------------------------------------------------------------------------

    @property
    def meeting(self) -> NcclRendezvous | None:
        """The rendezvous of the update that was staged last."""
        return self._meeting

    def open(self, meeting: NcclRendezvous) -> NcclGroup:
        """The group of `meeting`; waits for its workers. Raises: PushFailed: given up in the meantime."""
        with self._lock:
            if meeting is not self._meeting:
                raise PushFailed("the NCCL group was given up before it was created")
            if self._group is not None:
                return self._group
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # this is a thread of its own, and devices are set for each
        group = self._open_group(meeting)
        with self._lock:
            if meeting is self._meeting:
                self._group = group
                return group
        group.close()
        raise PushFailed("the NCCL group was complete too late")

    @property
    def members(self) -> set[str]:
        return set(self._members)

    @property
    def deadline_s(self) -> float:
        return self._deadline_s

    def _meet(self) -> str:
        members = dict(self._workers())
        if not members:
            raise PushFailed("nccl: no worker is connected to send weights to")
        if self._meeting is None or members != self._members:
            self._drop()
            offsets, size = {}, 1
            for worker_id in sorted(members):
                offsets[worker_id] = size
                size += self._processes if isinstance(self._processes, int) else self._processes[worker_id]
            self._members = members
            self._meeting = NcclRendezvous(
                master_address=self._address(),
                master_port=_free_port(),
                world_size=size,
                rank_offsets=offsets,
                packed_buffer_size_bytes=PACKED_BYTES,
                packed_num_buffers=PACKED_BUFFERS,
            )
        return self._meeting.model_dump_json()

    def _drop(self) -> None:
        with self._lock:
            group, self._group, self._meeting, self._members = self._group, None, None, {}
        if group is not None:
            group.close()

    # -- every rank's part ----------------------------------------------------------------------------------------------------

    def _digests(self, source: WeightSource) -> list[dict[str, Any] | str]:
        """Digests of this rank's tensors; for one that can't be sent, the reason: other ranks go on gathering."""
        mine: list[dict[str, Any] | str] = []
        for index, bucket in enumerate(source.buckets()):
            if index % self._exchange.size != self._exchange.rank:
                continue
            for name, tensor in bucket.items():
                try:
                    check_numbers(name, tensor)
                except WeightsUnavailable as error:
                    mine.append(str(error))
                    continue
                digest = blake2b(tensor_bytes(tensor.cpu()), digest_size=DIGEST_BYTES).hexdigest()
                meta = TensorMeta(name, tensor.dtype, tuple(tensor.shape))
                mine.append({"name": name, "dtype": meta.dtype_name, "shape": list(meta.shape), "digest": digest})
        return mine


class _Sender:
    """One transfer on the first rank. What may wait for ever is done by its thread; its methods return in time, with the problem
    if there is one. From a problem on the gathering goes on, since the other ranks do, and nothing is sent."""

    def __init__(self, transport: NcclTransport, publication: Publication, source: WeightSource) -> None:
        self._transport = transport
        self._publication = publication
        self._metas = [meta for bucket in source.plan() for meta in bucket]
        self._queue: queue.Queue[dict[str, Tensor] | None] = queue.Queue(QUEUED_BUCKETS)
        self._until = time.monotonic() + transport.deadline_s
        self._joined = threading.Event()
        self._problem = ""
        meeting = transport.meeting  # read here: by the time the thread runs, the next one may be staged
        assert meeting is not None
        self._thread = threading.Thread(target=self._run, args=(meeting,), name="steno-nccl", daemon=True)
        self._thread.start()

    def meet(self) -> str:
        """Until the group is formed and every worker of it is loading. Returns: the problem, or ""."""
        while not self._problem:
            states = {
                w.worker_id: w.state for w in (self._publication.update.workers if self._publication.update else [])
            }
            gone = [worker_id for worker_id in sorted(self._transport.members) if states.get(worker_id) == "failed"]
            if gone:
                self._problem = f"workers missing from the NCCL group: {', '.join(gone)}"
            elif self._publication.settled:
                self._problem = f"the update ended before it was sent: {self._publication.outcome}"
            elif time.monotonic() > self._until:
                self._problem = f"the NCCL group was not complete within {self._transport.deadline_s:g} s"
            elif self._joined.is_set() and all(states.get(w) == "loading" for w in self._transport.members):
                self._until = time.monotonic() + self._transport.deadline_s
                return ""
            else:
                time.sleep(LOOK_S)
        return self._problem

    def give(self, bucket: dict[str, Tensor]) -> None:
        if not self._problem:
            own = {name: tensor.clone() for name, tensor in bucket.items()}
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # the thread that sends them works on other streams
            self._put(own)

    def finish(self) -> str:
        """Until all is sent. Returns: the problem, or ""."""
        self._put(None)
        self._thread.join(max(0.0, self._until - time.monotonic()))
        if self._thread.is_alive():
            self._problem = self._problem or f"the transfer did not end within {self._transport.deadline_s:g} s"
        return self._problem

    def _put(self, item: dict[str, Tensor] | None) -> None:
        while not self._problem:
            try:
                return self._queue.put(item, timeout=LOOK_S)
            except queue.Full:
                if time.monotonic() > self._until:
                    self._problem = f"the transfer made no progress for {self._transport.deadline_s:g} s"

    def _run(self, meeting: NcclRendezvous) -> None:
        try:
            group = self._transport.open(meeting)
            self._joined.set()
            group.send(self._metas, self._taken())
        except (
            Exception
        ) as error:  # NCCL's and vLLM's are of many kinds; reported: whoever carries raises it or tries again
            if not self._problem:
                log.warning("nccl: %s", error, exc_info=True)
                self._problem = f"{type(error).__name__}: {error}"

    def _taken(self) -> Pairs:
        while True:
            try:
                bucket = self._queue.get(timeout=LOOK_S)
            except queue.Empty:
                if self._problem:
                    raise PushFailed(self._problem) from None
                continue
            if bucket is None:
                return
            yield from bucket.items()


def _check(told_by_rank: list[list[dict[str, Any] | str]]) -> None:
    for problem in (entry for some in told_by_rank for entry in some if isinstance(entry, str)):
        raise PushFailed(problem)


def workers_of(steno: Client, policy: str) -> Callable[[], dict[str, float]]:
    """Asks the proxy for the workers that can take part now: connected, healthy, with weights of this policy."""

    def ask() -> dict[str, float]:
        return {
            worker.id: worker.since
            for worker in steno.workers()
            if worker.connected and worker.healthy and not worker.draining
            if any(card.policy == policy and not card.text_only for card in worker.models)
        }

    return ask


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _vllm_group(meeting: NcclRendezvous) -> NcclGroup:
    from steno_trainer.weights.nccl.vllm_group import VllmGroup  # vLLM is installed where GPUs are

    return VllmGroup(meeting)

"""One update on one worker: its step, which bytes it waits for, and the proxies that are told. No disk, no engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from enum import Enum

from steno.contracts.errors import ProtocolError, StenoError, WeightsRefused
from steno.contracts.policy import ShardEntry, UpdateSpec
from steno.contracts.wire.frames import Chunk, Frame, Progress
from steno_worker.interfaces import StagedUpdate
from steno_worker.weights.patching import PatchedStaging
from steno_worker.weights.staged_files import StreamStaging

Send = Callable[[Frame], None]
CREDIT_BYTES = 8 * 2**20
"""What may be under way to this worker: about 60 ms of a 1 GB/s link; renewed when half of it is used."""
MAX_MESSAGE_CHARS = 2000


class UpdateStep(Enum):
    """How far an update is; the values are the states of `WorkerUpdate`."""

    RECEIVING = "receiving"
    READY = "ready"
    LOADING = "loading"
    SERVED = "served"
    FAILED = "failed"


_MOVES = {
    UpdateStep.RECEIVING: {UpdateStep.READY, UpdateStep.SERVED, UpdateStep.FAILED},
    UpdateStep.READY: {UpdateStep.LOADING, UpdateStep.FAILED},
    UpdateStep.LOADING: {UpdateStep.SERVED, UpdateStep.FAILED},
    UpdateStep.SERVED: set[UpdateStep](),
    UpdateStep.FAILED: set[UpdateStep](),
}


class WeightUpdate:
    """One update of the weights at this worker.

    Attributes:
    listeners: where its progress is told.
    received: bytes staged.
    abandoned: set once nobody wants its bytes any more; threads look at it.
    task: stages it. A load is no task of one update: others may wait for its end.
    """

    def __init__(self, update_id: str, spec: UpdateSpec, listeners: set[Send]) -> None:
        self.id = update_id
        self.spec = spec
        self.digest = spec.manifest.digest
        self.listeners = listeners
        self.step = UpdateStep.RECEIVING
        self.received = 0
        self.pause_s = 0.0
        self.load_s = 0.0
        self.error: StenoError | None = None
        self.abandoned = threading.Event()
        self.task: asyncio.Task[None] | None = None
        self.staged: StagedUpdate | None = None
        self.staging: StreamStaging | PatchedStaging | None = None
        self.chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._shard: ShardEntry | None = None  # the one that bytes are wanted of
        self._asked = 0  # where the last asking began
        self._limit = 0  # bytes of the shard up to here have been asked for
        self._arrived = 0  # and up to here have come

    @property
    def version(self) -> str:
        return self.spec.version

    def check_digest(self, known: str) -> None:
        """Args: known: digest of its version, from elsewhere. Raises: WeightsRefused: it is another one."""
        if known != self.digest:
            raise WeightsRefused(f"manifest: {self.version} is known with other digests", field="manifest")

    def move(self, step: UpdateStep) -> None:
        """Take the next step, and tell it."""
        if step not in _MOVES[self.step]:
            raise RuntimeError(f"invalid change of an update's state: from {self.step.value} to {step.value}")
        self.step = step
        self.report()

    def progressed(self, count: int) -> None:
        if self.step is UpdateStep.RECEIVING:
            self.received = min(self.received + count, self.spec.manifest.size)

    # -- bytes of a stream

    def want(self, shard: ShardEntry, offset: int) -> None:
        """All bytes of `shard` before `offset` are staged. Asks for more once half of the requested bytes are staged."""
        limit = min(shard.size, offset + CREDIT_BYTES)
        if self._shard is not shard:
            self._shard, self._arrived = shard, offset
        elif limit == self._limit or offset - self._asked < CREDIT_BYTES // 2:
            return
        self._asked, self._limit = offset, limit
        self.report()

    def want_nothing(self) -> None:
        self._shard = None

    def arrived(self, chunk: Chunk, send: Send) -> None:
        """Queue a chunk that was asked for. Two proxies may send the same bytes: a chunk that does not begin at the next missing
        byte is left out, and its sender gets this worker's position. Raises: ProtocolError: more bytes than the credit."""
        shard = self._shard
        if self.step is not UpdateStep.RECEIVING or shard is None or not chunk.data:
            return
        if chunk.shard != shard.name or chunk.offset != self._arrived:
            self.report_to(send)
            return
        if chunk.offset + len(chunk.data) > self._limit:
            raise ProtocolError("Chunk: more bytes than the update's credit")
        self._arrived += len(chunk.data)
        self.chunks.put_nowait(chunk)

    def forget_bytes(self) -> None:
        self.staged = None
        self._shard = None
        self.chunks = asyncio.Queue()

    # -- telling

    def report(self) -> None:
        for send in list(self.listeners):
            self.report_to(send)

    def report_to(self, send: Send) -> None:
        """Send the update's progress. A `stream` update sends none while it is received and wants no bytes of any shard."""
        if self.step is UpdateStep.RECEIVING and self._shard is None and self.spec.transport == "stream":
            return
        progress = Progress(self.id, self.step.value, self.received, pause_s=self.pause_s, load_s=self.load_s)
        if self.step is UpdateStep.RECEIVING and self._shard is not None:
            progress.shard, progress.offset = self._shard.name, self._arrived
            progress.credit = self._limit - self._arrived
        if self.error is not None:
            progress.code, progress.message = self.error.code, self.error.message[:MAX_MESSAGE_CHARS]
        send(progress)

    @staticmethod
    def refusal(update_id: str, error: StenoError) -> Progress:
        """The progress that refuses an update which this worker does not keep."""
        return Progress(update_id, UpdateStep.FAILED.value, code=error.code, message=error.message[:MAX_MESSAGE_CHARS])

"""A worker made of its half of the protocol and nothing else: it takes policy updates as a test says, over a real WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
import zlib
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from steno.contracts.policy import UpdateSpec
from steno.contracts.wire.frames import (
    Abandon,
    Announce,
    Apply,
    Chunk,
    Frame,
    Generate,
    Hello,
    ModelCard,
    Prepare,
    Progress,
)
from steno.contracts.wire.peer import PeerState, PeerUp
from steno.contracts.wire.peer_ends import WorkerPeer


class Dropped(bytearray):
    """Knows how many bytes were added to it."""

    size = 0

    def __iadd__(self, data: Any) -> Any:
        self.size += len(data)
        return self

    def __len__(self) -> int:
        return self.size


class UpdatePeer:
    """One boot of a worker.

    Attributes:
        frames: of updates, as they came.
        staged: update_id -> shard -> the bytes that came of it.
        auto: stage and load what is prepared at once; otherwise the test says each step.
        credit: bytes that it takes before its next Progress (`stream`).
        hold: while it is set, no credit is given.
        most_ahead: bytes that came between two Progresses, at most.
        discard: count what comes, and keep none of it; what is sent again is left out.
    """

    def __init__(
        self, worker_id: str, *, version: str = "base/0", auto: bool = True, credit: int = 1 << 20, policy: str = "default",
        refuse: str = "", discard: bool = False, staged: dict[str, dict[str, bytearray]] | None = None, **card: Any,
    ) -> None:  # fmt: skip
        self.worker_id = worker_id
        self.auto = auto
        self.credit = credit
        self.refuse = refuse
        self.hold = False
        self.discard = discard
        self.frames: list[Frame] = []
        self.specs: dict[str, UpdateSpec] = {}
        self.staged: dict[str, dict[str, bytearray]] = {} if staged is None else staged
        self.most_ahead = 0
        self.generated: list[Generate] = []
        self.card = ModelCard(
            **({"name": "toy", "context_tokens": 100, "policy": policy, "policy_version": version} | card)
        )
        self.peer = WorkerPeer(
            Hello(1, 1, worker_id, uuid.uuid4().hex, [self.card], 8), grace_s=30.0, max_packet_bytes=64 * 2**20
        )
        self._socket: ClientConnection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def version(self) -> str:
        return self.card.policy_version

    async def dial(self, port: int, key: str = "") -> UpdatePeer:
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self._socket = await connect(
            f"ws://127.0.0.1:{port}/workers/connect", compression=None, max_size=64 * 2**20, ping_interval=None,
            additional_headers=headers,
        )  # fmt: skip
        self.peer.connected(time.monotonic())
        await self._flush()
        welcomed = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(welcomed))
        await asyncio.wait_for(welcomed, 60)
        return self

    async def die(self) -> None:
        """As by kill -9: the socket goes, nothing is said."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._socket is not None:
            self._socket.transport.abort()

    async def send(self, *frames: Frame) -> None:
        for frame in frames:
            self.peer.send(frame, time.monotonic())
        await self._flush()

    async def _flush(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(ConnectionClosed):
            for packet in self.peer.data_to_send():
                await self._socket.send(packet)

    async def _run(self, welcomed: asyncio.Future[None]) -> None:
        assert self._socket is not None
        while True:
            try:
                async with asyncio.timeout(0.2):
                    data = await self._socket.recv()
            except TimeoutError:
                self.peer.handle_timeout(time.monotonic())
                await self._flush()
                continue
            except ConnectionClosed:
                self.peer.disconnected(time.monotonic())
                return
            assert isinstance(data, bytes)
            for event in self.peer.receive(data, time.monotonic()):
                if isinstance(event, PeerUp):
                    welcomed.set_result(None)
                elif isinstance(event, Generate):
                    self.generated.append(event)
                elif isinstance(event, Prepare | Chunk | Apply | Abandon):
                    self.frames.append(event)
                    await self._take(event)
            if self.peer.state is PeerState.OPEN:
                await self._flush()

    # -- what a worker does with updates

    async def _take(self, frame: Prepare | Chunk | Apply | Abandon) -> None:
        if isinstance(frame, Prepare):
            self.specs[frame.update_id] = UpdateSpec.model_validate_json(frame.spec)
            self.staged.setdefault(frame.update_id, {})
        elif isinstance(frame, Chunk):
            shard = self.staged[frame.update_id].setdefault(frame.shard, Dropped() if self.discard else bytearray())
            assert zlib.crc32(frame.data) == frame.crc32
            known = len(shard) - frame.offset
            assert known >= 0 if self.discard else known == 0, "in order, none twice"
            data = frame.data[known:]
            self._ahead += len(data)
            self.most_ahead = max(self.most_ahead, self._ahead)
            shard += data
        if self.auto:
            await self.step(frame)

    _ahead = 0

    async def step(self, frame: Prepare | Chunk | Apply | Abandon) -> None:
        if isinstance(frame, Prepare | Chunk):
            if isinstance(frame, Chunk) and self._ahead < self.credit // 2 and not self._whole(frame):
                return
            await self.stage(frame.update_id)
        elif isinstance(frame, Apply):
            await self.load(frame.update_id)

    def _whole(self, chunk: Chunk) -> bool:
        sizes = {shard.name: shard.size for shard in self.specs[chunk.update_id].manifest.shards}
        return len(self.staged[chunk.update_id][chunk.shard]) == sizes[chunk.shard]

    async def stage(self, update_id: str) -> None:
        """Say what it lacks, or that it is ready."""
        spec = self.specs[update_id]
        if self.refuse:
            await self.send(Progress(update_id, "failed", code="weights_refused", message=self.refuse))
            return
        held = self.staged[update_id]
        received = sum(len(data) for data in held.values())
        if spec.transport == "stream":
            for shard in spec.manifest.shards:
                if len(have := held.get(shard.name, b"")) < shard.size:
                    credit = 0 if self.hold else self.credit
                    self._ahead = 0
                    await self.send(Progress(update_id, "receiving", received, shard.name, len(have), credit))
                    return
        await self.send(Progress(update_id, "ready", spec.manifest.size))

    async def load(self, update_id: str) -> None:
        await self.send(Progress(update_id, "loading"))
        self.card.policy_version = self.specs[update_id].version
        await self.send(Announce([self.card]), Progress(update_id, "served", pause_s=0.01, load_s=0.02))

    def count(self, kind: type, update_id: str | None = None) -> int:
        return sum(isinstance(frame, kind) and update_id in (None, frame.update_id) for frame in self.frames)  # type: ignore[union-attr]

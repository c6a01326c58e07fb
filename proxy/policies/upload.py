"""One upload of a shard's bytes, on to the workers that lack them (`stream`).

What comes is forwarded as it comes, to every worker whose position is there, as far as the credit of all of them goes: what is
not forwarded is not read, so a proxy holds one piece, and what workers gave credit for. A worker that has
held up the others for half of the time is left behind; its position appears in the update's wants again.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable

from proxy import metrics
from proxy.contracts.frames import Chunk
from proxy.contracts.policy import ShardEntry
from proxy.policies.member import Cursor
from proxy.policies.update import UpdateRun

CHUNK_BYTES = 256 * 1024
"""Of one frame: large enough that a gigabyte is some thousands of them, small enough that a turn's Generate waits little."""
PATIENCE_S = 2.0
"""How long one worker may hold up the others before it is asked how much of the time that was."""
STALL_S = 10.0
"""With credit from nobody for so long, the upload ends where it is: its client asks for the wants again."""


class Upload:
    """Args:
    send: a frame to a worker.
    changed: wait until something has changed, at most so many seconds.
    clock: seconds, as the update's.
    """

    def __init__(
        self, run: UpdateRun, shard: ShardEntry, offset: int, *, send: Callable[[str, Chunk], None],
        changed: Callable[[float], Awaitable[None]], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.run = run
        self.shard = shard
        self.at = offset
        self._send = send
        self._changed = changed
        self._clock = clock
        self._began = clock()
        self._held_up_s: defaultdict[str, float] = defaultdict(
            float
        )  # worker -> how long it had no room while others had
        self._left_behind: set[str] = set()

    async def forward(self, body: AsyncIterator[bytes]) -> int:
        """All of the body that somebody takes. Returns: the shard's byte up to which that was."""
        async for data in body:
            view = memoryview(data)[: self.shard.size - self.at]
            metrics.POLICY_UPLOADED.inc(len(data))
            while len(view):
                taken = await self._pass_on(view)
                if not taken:
                    return self.at
                self.at += taken
                view = view[taken:]
        return self.at

    async def _pass_on(self, view: memoryview) -> int:
        """Send the beginning of it; returns how much of it is done with, 0 if nobody wants any (any more)."""
        waited_s = 0.0
        while True:
            here, ahead = self._positions(len(view))
            if not here:
                return min(ahead) - self.at if ahead else 0
            able = {worker_id: cursor for worker_id, cursor in here.items() if cursor.room(self.shard.size)}
            if able:
                self._left_behind.update(
                    worker_id for worker_id in here.keys() - able.keys() if self._is_slow(worker_id)
                )
            if able and here.keys() - able.keys() <= self._left_behind:
                room = min(cursor.room(self.shard.size) for cursor in able.values())
                size = min([room, len(view), CHUNK_BYTES, *(position - self.at for position in ahead)])
                self._chunk(able, bytes(view[:size]))
                return size
            if waited_s >= STALL_S:
                return 0
            since = self._clock()
            await self._changed(PATIENCE_S / 2 if able else STALL_S - waited_s)
            waited_s += self._clock() - since
            for worker_id in here.keys() - able.keys() if able else ():
                self._held_up_s[worker_id] += self._clock() - since

    def _is_slow(self, worker_id: str) -> bool:
        """Whether the others do not wait for it: past the update's deadline, or when it costs them half of their speed."""
        if self.run.members[worker_id].state == "failed":
            return True
        held_up_s = self._held_up_s[worker_id]
        return held_up_s >= PATIENCE_S and held_up_s >= (self._clock() - self._began) / 2

    def _positions(self, size: int) -> tuple[dict[str, Cursor], list[int]]:
        """Who lacks the next byte, and where, within `size` bytes, others begin to lack some."""
        here: dict[str, Cursor] = {}
        ahead: list[int] = []
        if self.run.state == "superseded":
            return here, ahead
        for worker_id, member in self.run.members.items():
            cursor = member.cursor
            if cursor is None or cursor.shard != self.shard.name or worker_id in self._left_behind:
                continue
            if cursor.sent == self.at:
                here[worker_id] = cursor
            elif self.at < cursor.sent < self.at + size:
                ahead.append(cursor.sent)
        return here, ahead

    def _chunk(self, takers: dict[str, Cursor], data: bytes) -> None:
        frame = Chunk(self.run.update_id, self.shard.name, self.at, data, zlib.crc32(data))
        for worker_id, cursor in takers.items():
            cursor.advance(self.at + len(data), self._clock())
            self._send(worker_id, frame)

"""One upload of a shard's bytes, on to the workers that lack them (`stream`).

Bytes are forwarded as they come, to every worker that has got just as far, and only as far as the credit of all these workers
goes. Bytes that can't be forwarded are not read, so a proxy holds one piece, and what workers gave credit for. A worker that the
others no longer wait for is left behind; its position appears in the update's wants again.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from steno.contracts.policy import ShardEntry
from steno.contracts.wire.frames import Chunk
from steno_proxy import metrics
from steno_proxy.policies.member import ShardCursor
from steno_proxy.policies.update import UpdateRun

CHUNK_BYTES = 256 * 1024
"""Of one frame: large enough that a gigabyte is some thousands of them, small enough that a turn's Generate waits little."""
PATIENCE_S = 5.0
"""How long the others wait for a worker that takes nothing at all."""
STALL_S = 10.0
"""If no worker gives credit for so long, the upload ends where it is, and its client asks for the wants again."""


class Upload:
    """The upload of one shard: passes its bytes on to the workers that lack them.

    Args:
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
        self._full_since: dict[str, float] = {}  # worker -> since when others wait for it
        self._left_behind: set[str] = set()

    async def forward(self, body: AsyncIterator[bytes]) -> int:
        """Pass the body on as far as workers take it. Returns: the offset in the shard up to which it got."""
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
            full = here.keys() - able.keys()
            if able:
                self._left_behind.update(worker_id for worker_id in full if self._is_too_slow(worker_id, able))
            if able and full <= self._left_behind:
                room = min(cursor.room(self.shard.size) for cursor in able.values())
                size = min([room, len(view), CHUNK_BYTES, *(position - self.at for position in ahead)])
                self._chunk(able, bytes(view[:size]))
                return size
            if waited_s >= STALL_S:
                return 0
            since = self._clock()
            await self._changed(PATIENCE_S / 4 if able else STALL_S - waited_s)
            waited_s += self._clock() - since

    def _is_too_slow(self, worker_id: str, able: Iterable[str]) -> bool:
        """Whether the other workers go on without this one. They wait for one that is only slower: all are to load together, and
        bytes that it misses are uploaded again. They do not wait for one that has failed, came late, or took nothing for
        PATIENCE_S."""
        members = self.run.members
        if members[worker_id].state == "failed":
            return True
        if not members[worker_id].awaited and any(members[other].awaited for other in able):
            return True
        return self._clock() - self._full_since.setdefault(worker_id, self._clock()) >= PATIENCE_S

    def _positions(self, size: int) -> tuple[dict[str, ShardCursor], list[int]]:
        """Return the workers that lack the next byte, and the places within `size` bytes from which others lack some."""
        here: dict[str, ShardCursor] = {}
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

    def _chunk(self, takers: dict[str, ShardCursor], data: bytes) -> None:
        frame = Chunk(self.run.update_id, self.shard.name, self.at, data, zlib.crc32(data))
        for worker_id, cursor in takers.items():
            cursor.advance(self.at + len(data), self._clock())
            self._full_since.pop(worker_id, None)
            self._send(worker_id, frame)

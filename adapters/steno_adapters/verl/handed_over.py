"""Tells the proxy which groups verl has: they are leased and acknowledged once TransferQueue has the rows of all their sessions.

So the run's account at the proxy says what became of each token (I4): what is not handed over stays in hand. Any process of the
job may do it for any group; one that dies loses its leases, and another one goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection

from steno.client.client import AsyncSteno
from steno.contracts.errors import Conflict, Forbidden, StenoError, Unauthorized
from steno.contracts.leases import Lease, LeaseRequest
from steno_adapters.verl.prompt_groups import VERL

log = logging.getLogger(__name__)
TTL_S = 60.0
WAIT_S = 20.0
LOOK_S = 1.0
MOST = 64


class HandedOver:
    """Args: unfinished: of these uids, those whose rows are not all there yet."""

    def __init__(
        self, client: AsyncSteno, run: str, unfinished: Callable[[Collection[str]], Awaitable[set[str]]]
    ) -> None:
        self._client, self._run, self._unfinished = client, run, unfinished
        self._held: dict[str, Lease] = {}
        self._consumer = f"verl-{socket.gethostname()[:80]}-{os.getpid()}".replace("_", "-")

    async def run(self) -> None:
        """Until it is cancelled, or the key does not open leases."""
        looks = 0
        while True:
            try:
                for lease in await self._client.lease(self._request()):
                    self._held[lease.lease_id] = lease
                if self._held:
                    await self._look(extend=looks % round(TTL_S / LOOK_S / 4) == 0)
                    looks += 1
                    await asyncio.sleep(LOOK_S)
            except (Forbidden, Unauthorized) as error:
                log.warning(
                    "groups stay in hand at the proxy, since this key can't acknowledge them: %s", error.message
                )
                return
            except StenoError as error:
                log.info("groups are acknowledged later: %s", error.message)
                await asyncio.sleep(LOOK_S)

    def _request(self) -> LeaseRequest:
        wait_s = 0.0 if self._held else WAIT_S
        return LeaseRequest(run_id=self._run, consumer=self._consumer, max_groups=MOST, wait_s=wait_s, ttl_s=TTL_S)

    async def _look(self, *, extend: bool) -> None:
        open_ = await self._unfinished({_uid(lease) for lease in self._held.values()})
        for lease_id, lease in list(self._held.items()):
            try:
                if _uid(lease) not in open_:
                    await self._client.acknowledge(lease_id)
                    del self._held[lease_id]
                elif extend:
                    await self._client.extend(lease_id, TTL_S)
            except Conflict:
                del self._held[lease_id]  # another process has it by now


def _uid(lease: Lease) -> str:
    return str(lease.group.task[VERL]["uid"])

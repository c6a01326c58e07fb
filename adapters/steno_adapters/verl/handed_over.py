"""Tells the proxy which groups verl has: ready groups are leased, and acknowledged once TransferQueue has all their rows.

So the run's account at the proxy says what became of each token (I4): a group that is not handed over stays in hand. Any process
of the job may do this for any group; if a process dies, its leases run out and another process goes on. Groups that another start
of the trainer registered are left alone, trained or not: TransferQueue does not know them. Their leases lapse.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection

from steno.client.client import AsyncClient
from steno.contracts.errors import Conflict, Forbidden, NotFound, StenoError, Unauthorized
from steno.contracts.runs.leases import Lease, LeaseRequest
from steno_adapters.verl.prompt_groups import VERL

log = logging.getLogger(__name__)
TTL_S = 60.0
WAIT_S = 20.0
LOOK_S = 1.0
MOST = 64


class HandedOver:
    """Args: lineage: of this start of the trainer. unfinished: of these uids, those whose rows are not all there yet."""

    def __init__(
        self,
        client: AsyncClient,
        run: str,
        lineage: str,
        unfinished: Callable[[Collection[str]], Awaitable[set[str]]],
    ) -> None:
        self._client, self._run, self._lineage, self._unfinished = client, run, lineage, unfinished
        self._held: dict[str, str] = {}  # lease -> uid
        self._left_alone: set[str] = set()
        self._consumer = f"verl-{socket.gethostname()[:80]}-{os.getpid()}".replace("_", "-")

    async def run(self) -> None:
        """Until it is cancelled, or the key does not open leases."""
        looks = 0
        while True:
            try:
                for lease in await self._client.lease(self._request()):
                    self._take(lease)
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
            except Exception as error:  # TransferQueue's and Ray's have no common base
                log.warning("groups are acknowledged later: %s: %s", type(error).__name__, error)
                await asyncio.sleep(LOOK_S)

    def _request(self) -> LeaseRequest:
        wait_s = 0.0 if self._held else WAIT_S
        return LeaseRequest(run_id=self._run, consumer=self._consumer, max_groups=MOST, wait_s=wait_s, ttl_s=TTL_S)

    def _take(self, lease: Lease) -> None:
        of_verl = lease.group.task.get(VERL)
        if isinstance(of_verl, dict) and of_verl.get("lineage") == self._lineage:
            self._held[lease.lease_id] = str(of_verl.get("uid"))
        elif lease.group.group_id not in self._left_alone:
            self._left_alone.add(lease.group.group_id)
            log.warning("group %s stays in hand: this start of verl did not register it", lease.group.group_id)

    async def _look(self, *, extend: bool) -> None:
        open_ = await self._unfinished(set(self._held.values()))
        for lease_id, uid in list(self._held.items()):
            try:
                if uid not in open_:
                    await self._client.acknowledge(lease_id)
                    del self._held[lease_id]
                elif extend:
                    await self._client.extend(lease_id, TTL_S)
            except (Conflict, NotFound):  # another process has it by now, or a proxy without Redis was started again
                del self._held[lease_id]

"""Registers groups at the proxy. If a group of the same id is on record, the proxy answers with that group."""

from __future__ import annotations

import asyncio

from steno.client.client import AsyncClient
from steno.contracts.errors import Conflict, Forbidden, NotFound
from steno.contracts.rest import GroupTrials
from steno_rollouts.calls.posts import Stop, posted
from steno_rollouts.groups.plan import GroupOptions, Planned


class Registration:
    """Of one call of `Rollouts.run`."""

    def __init__(self, client: AsyncClient, options: GroupOptions) -> None:
        self._client = client
        self._options = options
        self._unanswered: list[tuple[Planned, asyncio.Task[GroupTrials]]] = []

    async def register(self, plan: Planned, group_id: str) -> GroupTrials:
        """Register a group. Cancelled: `answered` waits for the answer, since the proxy may have registered the group by now.

        Raises: Conflict: the group is on record with another task or other settings, or somebody else's session has its id.
            StoreFull; other StenoError: the proxy refuses, or can't be reached.
        """
        stop = Stop()
        asked = posted(self._client.create_group(self._options.spec(plan.task, group_id)), stop)
        try:
            return await asyncio.shield(asked)
        except Conflict as error:
            if (error.field or "").startswith("fork_of"):
                raise
            if error.field == "group_id":  # somebody else's session has an id of its trials
                raise Conflict(f"{error.message}: give another --run", field=error.field) from None
            raise Conflict(f"{error.message}: its task or its settings have changed; give another --run") from None
        except asyncio.CancelledError:
            stop.told = True
            asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody waits
            self._unanswered.append((plan, asked))
            raise

    async def is_registered(self, group_id: str) -> bool:
        try:
            await self._client.group(group_id)
        except (Forbidden, NotFound):  # a run's own key is told no more of a group that is not there
            return False
        return True

    async def answered(self) -> list[tuple[Planned, GroupTrials]]:
        """Wait for the answers that were still to come as `register` was cancelled. Returns: those groups."""
        found = []
        for plan, asked in self._unanswered:
            await asyncio.wait({asked})
            if not asked.cancelled() and asked.exception() is None:
                found.append((plan, asked.result()))
        self._unanswered.clear()
        return found

    def forget(self) -> None:
        """Cancel the posts that have no answer yet."""
        for _, asked in self._unanswered:
            asked.cancel()
        self._unanswered.clear()

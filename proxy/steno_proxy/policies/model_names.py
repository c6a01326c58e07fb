"""Names of models that workers have served, kept in the store until they are retired.

A request for such a name means that model and no other: while its workers are away it waits for them. Any other name means the
default policy (`steno_proxy/workers/routing.py`), since agents name models of their usual provider. So only workers tell names,
never a request; what a worker serves is told again for as long as it does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from steno.contracts.errors import Conflict, NotFound
from steno_proxy.store.policies import PolicyStore

log = logging.getLogger(__name__)
MOST_NAMES = 1024
"""More are not kept: a fleet that gives each of its workers a name of its own forgets to retire them."""
MOST_CHARS = 256


class KeptModelNames:
    """As far as this replica knows: others' news come with `sync`."""

    def __init__(self, store: PolicyStore) -> None:
        self._store = store
        self._kept: set[str] | None = None  # None: not read yet

    def __contains__(self, name: str) -> bool:
        """Until they have been read, any name may be one."""
        return bool(name) and (self._kept is None or name in self._kept)

    def hear(self, names: Iterable[str]) -> bool:
        """A worker serves these. Returns: whether some are new here, and `sync` is to tell the store."""
        if self._kept is None:
            return True
        new = self._room(names, self._kept)
        self._kept |= new
        return bool(new)

    async def sync(self, served: Iterable[str]) -> bool:
        """served: what workers serve here now. Returns: whether anything has changed. Raises StoreUnavailable."""
        served = list(served)  # workers come and go while the store is asked
        before = None if self._kept is None else set(self._kept)
        kept = set(await self._store.names())
        if new := self._room(served, kept):
            await self._store.keep_names(new)
        heard = set() if before is None or self._kept is None else self._kept - before
        self._kept = kept | new | heard
        return self._kept != before

    async def retire(self, name: str, workers: Iterable[str]) -> None:
        """The name means no model of its own any more. workers: ids of those that serve it here.

        Raises: Conflict: some do. NotFound: it is not kept. StoreUnavailable.
        """
        if serving := sorted(workers):
            raise Conflict(f"model {name!r} is served by {', '.join(serving)}: stop them first", field="name")
        if not await self._store.retire_name(name):
            raise NotFound(f"no worker has served a model {name[:MOST_CHARS]!r}, or it was retired", field="name")
        if self._kept is not None:
            self._kept.discard(name)
        log.info("model name %s is retired: it means the default policy from now on", name)

    def all(self) -> list[str]:
        return sorted(self._kept or ())

    def _room(self, names: Iterable[str], kept: set[str]) -> set[str]:
        """Those that are not kept yet and can be."""
        new = {name for name in names if name and name not in kept and len(name) <= MOST_CHARS}
        room = max(0, MOST_NAMES - len(kept))
        if len(new) > room:
            log.warning(
                "%d model names are kept, the maximum: %d new ones are not kept. Retire old ones (steno models retire)",
                len(kept),
                len(new) - room,
            )
        return set(sorted(new)[:room])

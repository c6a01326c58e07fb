"""Names of models that workers have served, kept in the store until they are retired.

A request for such a name means that model and no other: while its workers are away it waits for them. Any other name means the
default policy (`steno_proxy/workers/routing.py`), since agents name models of their usual provider; it waits likewise where a
kept name is of that policy. Names come from workers, never from requests; a served name that the store lacks is written again at
each `sync`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from steno.contracts.errors import Conflict, NotFound
from steno.contracts.wire.frames import ModelCard
from steno_proxy.store.policies import PolicyStore
from steno_proxy.workers.routing import DEFAULT_POLICY

log = logging.getLogger(__name__)
MOST_NAMES = 1024
"""More are not kept: a fleet that gives each of its workers a name of its own forgets to retire them."""
MOST_CHARS = 256


class ServedModelNames:
    """The model names that workers have served, as far as this replica knows; those served at other replicas come with `sync`.
    `served` maps each name that workers serve here to its policy."""

    def __init__(self, store: PolicyStore) -> None:
        self._store = store
        self._kept: dict[str, str] | None = None  # name -> its policy, "": not known; None: not read yet
        self._too_many = False  # more are served than can be kept, and the log says so

    def __contains__(self, name: str) -> bool:
        """Whether the name is kept; until the store was read, True for any name but ""."""
        return bool(name) and (self._kept is None or name in self._kept)

    def has_default(self) -> bool:
        """Whether a kept name is of the default policy; True until the store was read."""
        return self._kept is None or DEFAULT_POLICY in self._kept.values()

    def hear(self, served: Mapping[str, str]) -> bool:
        """Workers serve these. Returns: whether `sync` must write: a name or its policy is new, or nothing was read yet."""
        if self._kept is None:
            return True
        news = self._news(served, self._kept)
        self._kept |= news
        return bool(news)

    async def sync(self, served: Mapping[str, str]) -> bool:
        """served: what workers serve here now. Returns: whether anything has changed. Raises StoreUnavailable."""
        before = None if self._kept is None else dict(self._kept)
        kept = await self._store.names()
        if news := self._news(served, kept):
            await self._store.keep_names(news)
        heard: dict[str, str] = {}
        retired: set[str] = set()
        if before is not None and self._kept is not None:  # since the store was asked
            heard = dict(self._kept.items() - before.items())
            retired = before.keys() - self._kept.keys()
        self._kept = {name: policy for name, policy in (kept | news | heard).items() if name not in retired}
        return self._kept != before

    async def retire(self, name: str, workers: Iterable[str]) -> None:
        """Stop keeping a name: it then means the default policy. workers: ids of the workers here that serve it.

        Raises: Conflict: some do. NotFound: it is not kept. StoreUnavailable.
        """
        if serving := sorted(workers):
            raise Conflict(f"model {name!r} is served by {', '.join(serving)}: stop them first", field="name")
        if not await self._store.retire_name(name):
            raise NotFound(f"no worker has served a model {name[:MOST_CHARS]!r}, or it was retired", field="name")
        if self._kept is not None:
            self._kept.pop(name, None)
        log.info("model name %s is retired: it means the default policy from now on", name)

    def all(self) -> dict[str, str]:
        """Every name with its policy, by name."""
        return dict(sorted((self._kept or {}).items()))

    def _news(self, served: Mapping[str, str], kept: Mapping[str, str]) -> dict[str, str]:
        """The served names that must be written: those that are kept with another policy, and new ones that there is room for."""
        new = [name for name in served if name and name not in kept and len(name) <= MOST_CHARS]
        room = max(0, MOST_NAMES - len(kept))
        said, self._too_many = self._too_many, len(new) > room
        if self._too_many and not said:  # once until it is over: workers are asked about every second
            log.warning(
                "%d model names are kept, the maximum: %d new ones are not kept. Retire old ones (steno models retire)",
                len(kept),
                len(new) - room,
            )
        moved = [name for name, policy in served.items() if name in kept and kept[name] != policy]
        return {name: served[name] for name in [*moved, *sorted(new)[:room]]}


def policies_of(cards: Iterable[ModelCard]) -> dict[str, str]:
    """The policy of each name. If a name has several: the default one if it is among them, else that of the last card."""
    found: dict[str, str] = {}
    for card in cards:
        if found.get(card.name) != DEFAULT_POLICY:
            found[card.name] = card.policy
    return found

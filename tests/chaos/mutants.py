"""Proxies and workers made wrong on purpose, each in a way that is easily done by mistake: what the suite must
find, so that its checks bite. Those that unit tests are to find are in `tests/mutants`.

`python -m tests.chaos --mutant NAME --seeds 100` plays seeds until one finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any, TypeVar

import msgspec

from steno.contracts.errors import Conflict, StenoError, StoreUnavailable
from steno.contracts.wire.frames import Delta, Started
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.store.redis import runs
from steno_proxy.store.redis.link.redis_link import RedisLink
from steno_proxy.store.redis.runs import RedisRuns
from steno_proxy.turns import turn_record
from steno_proxy.turns.choice import OpenChoice
from steno_proxy.turns.transcript import ChoiceTranscript
from steno_proxy.workers import hub, placement, routing
from steno_worker.relay.generations import Generations
from steno_worker.relay.outlet import ChannelOutlet

T = TypeVar("T")
BEHIND_S = 0.3


def breaks_unrecorded() -> None:
    """A turn that broke leaves nothing (I4)."""
    right = OpenChoice._commit

    async def wrong(self: OpenChoice, error: StenoError | None, in_one_piece: bool) -> None:
        if error is None:
            await right(self, error, in_one_piece)

    _put(OpenChoice, "_commit", wrong)


def written_behind() -> None:
    """An answer leaves before it is on record (I3)."""

    async def wrong(self: OpenChoice, error: StenoError | None, *, in_one_piece: bool = False) -> None:
        if self.transcript.started is not None and self.commit is None:
            self.commit = _later(self._commit(error, in_one_piece))

    _put(OpenChoice, "committed", wrong)


def blocks_unsaved() -> None:
    """A block closes before it is on record (I3)."""

    async def wrong(self: OpenChoice) -> None:
        self.saving = asyncio.ensure_future(asyncio.sleep(0))

    _put(OpenChoice, "saved", wrong)


def store_optional() -> None:
    """A failure of the store is logged, and the agent gets its answer (I3)."""
    right = OpenChoice.committed

    async def wrong(self: OpenChoice, error: StenoError | None, *, in_one_piece: bool = False) -> None:
        with contextlib.suppress(StoreUnavailable):
            await right(self, error, in_one_piece=in_one_piece)

    _put(OpenChoice, "committed", wrong)


def all_resumable() -> None:
    """A completion that no other worker can continue is announced as resumable (I9)."""
    _change_events(lambda self, event: msgspec.structs.replace(event, resumable=True) if _is(event, Started) else event)


def first_version() -> None:
    """A turn has the version that it began with (I10)."""

    def change(self: ChoiceTranscript, event: Any) -> Any:
        if _is(event, Delta) and self._spans:
            return msgspec.structs.replace(event, version=self._spans[0][0])
        return event

    _change_events(change)


def replicas_unheard() -> None:
    """Writes wait for no replica, whatever is set (I3)."""
    right = RedisLink.__init__

    def wrong(self: RedisLink, url: str, **options: Any) -> None:
        right(self, url, **(options | {"wait": None}))

    _put(RedisLink, "__init__", wrong)


def leases_endless() -> None:
    """Whoever had a lease may acknowledge it, though another has the group by now (I4)."""
    right = RedisRuns.acknowledge

    async def wrong(self: RedisRuns, lease_id: str, *, now: float | None = None) -> float | None:
        try:
            return await right(self, lease_id, now=now)
        except Conflict:
            return None

    _put(RedisRuns, "acknowledge", wrong)


def others_unseen() -> None:
    """A replica that knows a session does not look for what another one recorded of it (I2)."""
    right = Recorder.enter

    async def wrong(self: Recorder, trial_id: str, **options: Any) -> Any:
        known = self._recordings.get(trial_id)
        return known if known is not None and known.session is not None else await right(self, trial_id, **options)

    _put(Recorder, "enter", wrong)


def descriptors_kept() -> None:
    """Each request costs a descriptor, for good."""
    right = Recorder.enter

    async def wrong(self: Recorder, trial_id: str, **options: Any) -> Any:
        os.dup(0)
        return await right(self, trial_id, **options)

    _put(Recorder, "enter", wrong)


def epochs_unheard() -> None:
    """A trainer whose run another one has taken over goes on as before (I4)."""
    right = runs.new_grant
    _put(runs, "new_grant", lambda epoch: right(None))


def names_unheard() -> None:
    """A model's name means the default policy, whatever is served under it."""
    right = routing.offers
    for user in (placement, hub):
        _put(user, "offers", lambda workers, model, **rules: right(workers, "any", **rules))


def takers_unnamed() -> None:
    """A turn that was taken over is said to be of the last worker alone (I1)."""

    _put(turn_record, "_workers", lambda transcript, stream: [])


def old_streams_speak() -> None:
    """Generations of a channel that is over go on, and send frames on the next channel under their old stream numbers (I9)."""

    def wrong(self: ChannelOutlet, frame: Any) -> None:
        self._send(frame)

    _put(ChannelOutlet, "__call__", wrong)
    _put(Generations, "abandon", lambda self: set())


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__.replace("_", "-"): mutant
    for mutant in (
        breaks_unrecorded, written_behind, blocks_unsaved, store_optional, all_resumable, first_version, replicas_unheard,
        leases_endless, others_unseen, descriptors_kept, epochs_unheard, names_unheard, takers_unnamed,
    )
}  # fmt: skip
"""Name -> what makes the proxy of this process so."""
WORKER_MUTANTS: dict[str, Callable[[], None]] = {"old-streams-speak": old_streams_speak}
"""Name -> what makes the worker of this process so."""


def _put(owner: type | ModuleType, name: str, wrong: Callable[..., Any]) -> None:
    if name not in vars(owner):
        raise AttributeError(f"{owner.__name__} has no {name} any more")
    setattr(owner, name, wrong)


def _change_events(change: Callable[[ChoiceTranscript, Any], Any]) -> None:
    right = ChoiceTranscript.take

    def wrong(self: ChoiceTranscript, event: Any) -> Any:
        return right(self, change(self, event))

    _put(ChoiceTranscript, "take", wrong)


def _is(event: Any, kind: type) -> bool:
    return type(event) is kind


def _later(write: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    async def wait() -> None:
        await asyncio.sleep(BEHIND_S)
        await write

    return asyncio.ensure_future(wait())

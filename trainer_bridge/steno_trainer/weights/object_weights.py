"""Weights in an object store that trainer and workers reach (`weights_url`): copies on disk, brought there file by file.

    <url>/steno-weights.json          whose place this is: {"run", "policy"}
    <url>/<lineage>/<digest>.<kind>   files of one start of the trainer; each is named after what is in it

A version is named, by its update, only once all its files are there, so no worker is ever sent to half a copy. A file that
several versions refer to (a full copy's, that patches go onto) is brought there once. As long as the trainer lives it removes
what the newest versions do not refer to, and, once, what starts before it left. Nobody else's objects are touched.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from functools import partial
from typing import Any, Literal

from steno.config.object_store import ObjectStore
from steno.contracts.errors import ObjectMissing, ObjectStoreFailed
from steno.contracts.policy import LINEAGE, Manifest
from steno_trainer.data.staleness import PolicyVersion
from steno_trainer.distributed.ranks import Ranks
from steno_trainer.errors import CopyFailed
from steno_trainer.weights.exchange import GlooExchange
from steno_trainer.weights.files.copies import DEFAULT_KEEP, WeightsCopies, WeightsCopy
from steno_trainer.weights.publication import Publication
from steno_trainer.weights.source import WeightSource
from steno_trainer.weights.transports import StagedWeights

log = logging.getLogger(__name__)
OWNER = "steno-weights.json"
OURS = re.compile(r"[0-9a-f]{32}\.(safetensors|patch)")


class ObjectPlace:
    """What one start of a trainer has in an object store. Lives on the first rank; `claim` first."""

    def __init__(self, store: ObjectStore, run: str, policy: str, *, keep: int = DEFAULT_KEEP) -> None:
        """Args: keep: how many versions stay, the newest."""
        self._store = store
        self._owner = {"run": run, "policy": policy}
        self._keep = keep
        self._lock = threading.Lock()  # one copy is brought at a time
        self._before: list[str] = []  # lineages of earlier starts
        self._newest: WeightsCopy | None = None
        self._brought: list[Manifest] = []

    def claim(self) -> None:
        """It is this run's and policy's from here on. It is read and written, so that what can't be is said before anything is
        trained.

        Raises: CopyFailed: it is another's; ObjectStoreFailed.
        """
        mine = json.dumps(self._owner).encode()
        found = self._found_owner()
        if found is None:
            self._store.create(mine, OWNER)
            found = self._found_owner()  # another's, where two claimed it at the same moment
        if found != self._owner:
            raise CopyFailed(
                f"weights_url: {self._store.url} has weights of {found}, and this is {self._owner}: set one of its own"
            )
        self._store.put_bytes(mine, OWNER)
        self._before = [name for name in self._store.folders() if re.fullmatch(LINEAGE, name)]

    def _found_owner(self) -> Any:
        """None: nobody's."""
        try:
            return json.loads(self._store.get_bytes(OWNER))
        except ObjectMissing:
            return None
        except ValueError:
            return "somebody else"

    def stage(self, version: PolicyVersion, copy: WeightsCopy) -> StagedWeights:
        """What the update says of the copy. The thread that posts it uploads the copy, unless a newer one comes."""
        self._newest = copy
        location = f"{self._store.url}/{version.lineage}"
        return StagedWeights(location, copy.manifest, copy.folder, partial(self._bring, version.lineage, copy))

    def give_up(self) -> None:
        """Begin no further upload of a file."""
        self._newest = None

    def _bring(self, lineage: str, copy: WeightsCopy) -> int:
        """Upload the files that are not there yet. Idempotent. Returns: their bytes. Raises: ObjectStoreFailed; CopyFailed."""
        sent = 0
        with self._lock:
            there = self._store.sizes(lineage)
            for file in copy.manifest.files:
                if there.get(file.object_name) == file.size:
                    continue
                if self._newest is not copy:
                    raise ObjectStoreFailed("given up: a newer version came, or the trainer ends")
                try:
                    self._store.put(copy.folder / file.name, f"{lineage}/{file.object_name}")
                except OSError as error:
                    raise CopyFailed(f"{copy.folder / file.name} can't be read: {error}") from error
                there[file.object_name] = file.size
                sent += file.size
            self._brought = [manifest for manifest in self._brought if manifest is not copy.manifest] + [copy.manifest]
            self._tidy(lineage, set(there))
        return sent

    def _tidy(self, lineage: str, there: set[str]) -> None:
        """Remove files of versions that are no longer kept. What can't be removed now is removed after the next push."""
        self._brought = self._brought[-self._keep :]
        newest = [self._newest.manifest] if self._newest is not None else []
        needed = {file.object_name for manifest in [*self._brought, *newest] for file in manifest.files}
        try:
            self._store.remove([f"{lineage}/{name}" for name in sorted(there - needed) if OURS.fullmatch(name)])
            while len(self._brought) == self._keep and self._before:
                old = self._before[-1]
                if old != lineage:
                    names = [name for name in self._store.sizes(old) if OURS.fullmatch(name)]
                    self._store.remove([f"{old}/{name}" for name in names])
                self._before.pop()
        except ObjectStoreFailed as error:
            log.warning("old weights could not be removed, and will be after the next push: %s", error.message)


class ObjectTransport:
    """Workers read the copies from an object store. The first rank brings them there while training goes on, so its machine must
    have whole copies: let the ranks beside it write (`WeightsCopies(writers=beside_first(ranks))`)."""

    name: Literal["filesystem"] = "filesystem"

    def __init__(self, copies: WeightsCopies, place: ObjectPlace, *, ranks: Ranks | None = None) -> None:
        self._copies = copies
        self._place = place
        self._exchange = GlooExchange(ranks)
        self._claimed = False

    def stage(self, version: PolicyVersion, source: WeightSource, *, full: bool = False) -> StagedWeights:
        if not self._claimed:
            self._exchange.first(self._place.claim, failure=CopyFailed)
            self._claimed = True
        copy = self._copies.write(version, source, full=full)
        return self._place.stage(version, copy)

    def carry(self, publication: Publication, source: WeightSource) -> bool:
        return True

    def close(self) -> None:
        """No more is uploaded. The copies and what is in the store stay: workers may be reading, and late ones will."""
        self._place.give_up()

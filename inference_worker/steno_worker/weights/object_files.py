"""Files of an update from an object store, into the folder where updates are staged.

Their names come from digests, and their place from this worker's own setting: whoever posts an update can't make a worker read
anything else with its credentials. Blocking, as `staged_files.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from steno.config.object_store import ObjectStore
from steno.contracts.errors import ObjectMissing, ObjectStoreFailed, WeightsRefused
from steno.contracts.policy import UpdateSpec
from steno_worker.weights.shard_files import file_refusal
from steno_worker.weights.staged_files import StreamStaging, UpdateAbandoned

PIECE_BYTES = 64 << 20
"""Read at a time, by eight requests, and held in memory."""


def is_url(location: str) -> bool:
    return "://" in location


def readable_store(store: ObjectStore | None, spec: UpdateSpec) -> ObjectStore:
    """The store to read the update from. Args: store: of `weights_url`. Raises: WeightsRefused: no store, or `location` is
    not in it."""
    if store is None:
        raise WeightsRefused(
            f"location: got {spec.location!r}, but this worker has no weights_url: set it to the trainer's",
            field="location",
        )
    if spec.location != (wanted := f"{store.url}/{spec.lineage}"):
        raise WeightsRefused(
            f"location: got {spec.location!r}, must be {wanted!r}: below this worker's weights_url", field="location"
        )
    return store


def fetch(
    store: ObjectStore, spec: UpdateSpec, staging: StreamStaging, abandoned: threading.Event,
    on_bytes: Callable[[int], None],
) -> None:  # fmt: skip
    """Everything that `staging` lacks. Raises: WeightsRefused naming the file; ObjectStoreFailed; UpdateAbandoned."""
    while (position := staging.position) is not None:
        file, offset = position
        key = f"{spec.lineage}/{file.object_name}"
        try:
            data = store.read(key, offset, min(offset + PIECE_BYTES, file.size))
        except ObjectMissing as error:
            raise file_refusal(file.name, f"can't be read: {error.message}") from error
        except ObjectStoreFailed:
            size = _size(store, key)  # not before: that would be a request more for each file
            if size is None or size == file.size:
                raise
            raise file_refusal(file.name, f"has {size} bytes in {key}, the manifest says {file.size} (size)") from None
        if abandoned.is_set():
            raise UpdateAbandoned
        staging.take(file.name, offset, data)
        on_bytes(len(data))


def _size(store: ObjectStore, key: str) -> int | None:
    with contextlib.suppress(ObjectStoreFailed):
        return store.size(key)
    return None

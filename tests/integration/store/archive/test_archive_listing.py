"""What is in an archive that Redis does not know: what can't be read is not taken for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from steno.contracts.errors import ArchiveUnreadable
from steno_proxy.archive.objects import ArchiveIdentity
from tests.integration.store.archive.support import FaultyFileSystem, move, replica
from tests.support.machine.redis_server import RedisServer


async def test_an_archive_whose_identity_can_not_be_read_is_not_taken_over(server: RedisServer, tmp_path: Path) -> None:
    store, archiver = replica(server, f"faulty://{tmp_path.name}")
    theirs = ArchiveIdentity("theirs", "another Redis")
    await archiver._objects.begin(theirs)
    FaultyFileSystem.fault = "info archive.json"
    with pytest.raises(ArchiveUnreadable, match="Input/output error"):
        await move(store, archiver)
    assert await archiver._objects.identity() == theirs
    await store.close()

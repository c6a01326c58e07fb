"""One Ray and one TransferQueue for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    import ray
    import transfer_queue as tq

    from tests.integration.verl.verl_job import start_cluster

    start_cluster()
    yield
    tq.close()
    ray.shutdown()

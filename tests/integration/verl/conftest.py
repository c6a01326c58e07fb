"""One Ray, one TransferQueue, and one server of mini-swe-agent for all tests of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs.mini_agent import mini_server


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    import ray
    import transfer_queue as tq

    from tests.integration.verl.verl_job import MINI_SERVER, start_cluster

    with (
        mini_server(Path(os.environ["STENO_AGENTS_VENV"]) / "bin/python") as mini,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv(MINI_SERVER, str(mini))
        start_cluster()
        yield
        tq.close()
        ray.shutdown()

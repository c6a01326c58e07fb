"""`weights_url`: a trainer of two ranks and a worker that share an object store, and no folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.loop.product import WORKER, product, rolling, thread
from tests.support.machine.object_server import BUCKET, ObjectServer, object_server

pytestmark = [pytest.mark.loop, pytest.mark.timeout(1800)]
URL = f"s3://{BUCKET}/demo"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server() as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server


async def test_a_run_trains_by_weights_from_an_object_store(server: ObjectServer, tmp_path: Path) -> None:
    staging = ("--staging-dir", str(tmp_path / "staged"), "--weights-url", URL)
    with product(tmp_path, worker=(*WORKER, *staging)) as one:
        trainer = one.train(total_steps=2, push="delta", weights_url=URL)
        async with rolling(one, "task", groups=4) as done:
            await thread(trainer.wait)
            assert all(result.reward is not None for result in await done)
        version = "{}/{}".format(*trainer.saved()["path"][-1])
        assert version.endswith("/2") and one.in_force() == version, trainer.said()
        assert "was not taken" not in trainer.said() and "does not serve" not in trainer.said()
        lineage = version.partition("/")[0]
        there = server.objects()
        assert {key for key in there if not key.startswith(f"demo/{lineage}/")} == {"demo/steno-weights.json"}
        assert any(key.endswith(".patch") for key in there) and any(key.endswith(".safetensors") for key in there)
        await thread(one.balance, trainer)

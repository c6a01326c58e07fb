"""An engine that does not answer a probe, or answers with an exception of its own: updates go on, or fail, in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from steno.contracts.wire.frames import Apply
from tests.unit.worker.weights.test_updates import PROBE, SHARDS, Bench, Proxy, bench, folder_spec, idle, write

__all__ = ["bench"]
Score = Callable[[], Awaitable[list[float]]]


async def breaks() -> list[float]:
    raise RuntimeError("the engine is currently busy")


async def hangs() -> list[float]:
    await asyncio.Event().wait()
    raise AssertionError


def score_with(bench: Bench, version: str, answer: Score) -> None:
    """What the engine does with a probe by these weights; by others it answers as ever."""
    usual = bench.engine.score

    async def score(token_ids: list[int]) -> list[float]:
        return await (answer() if bench.engine.version == version else usual(token_ids))

    bench.engine.score = score  # type: ignore[method-assign]


def start_from(bench: Bench, folder: Path) -> None:
    write(folder, {"model.safetensors": {name: one for of in SHARDS.values() for name, one in of.items()}})
    bench.engine.folder, bench.engine.check_files = folder, False


async def ready(proxy: Proxy, tmp_path: Path, step: int, **fields: object) -> str:
    """Prepare it; returns its id."""
    proxy.prepare(folder_spec(tmp_path, step, probe=PROBE, **fields), f"u{step}")
    await proxy.until("ready")
    return f"u{step}"


@pytest.mark.parametrize("answer", [breaks, hangs])
async def test_the_first_update_is_loaded_also_where_what_was_there_before_can_not_be_probed(
    bench: Bench, tmp_path: Path, answer: Score
) -> None:
    start_from(bench, tmp_path / "model")
    score_with(bench, "base/0", answer)
    proxy = bench.proxy()
    proxy.tell(Apply(await ready(proxy, tmp_path, 1, deadline_s=0.5)))
    await proxy.until("served")
    assert bench.updates.healthy


async def test_weights_whose_probe_is_not_answered_in_time_fail_and_may_come_again(
    bench: Bench, tmp_path: Path
) -> None:
    start_from(bench, tmp_path / "model")
    score_with(bench, "run/1", hangs)
    proxy = bench.proxy()
    proxy.tell(Apply(await ready(proxy, tmp_path, 1, deadline_s=0.5)))
    failed = await proxy.until("failed")
    assert "probe: the engine did not score it within 0.5 s" in failed.message
    await idle(bench)
    assert bench.updates.healthy and bench.updates.cards()[0].policy_version == "base/0"
    await ready(proxy, tmp_path, 1, deadline_s=0.5)  # not as weights whose probe was answered, and with other numbers


async def test_refused_weights_are_nothing_to_go_back_to(bench: Bench, tmp_path: Path) -> None:
    """Nothing was there to go back to at the first refusal either: the start could not be probed."""
    start_from(bench, tmp_path / "model")
    score_with(bench, "base/0", breaks)
    proxy = bench.proxy()
    for step in (1, 2):
        bench.engine.scores = [-5.0, -7.0]
        proxy.tell(Apply(await ready(proxy, tmp_path, step)))
        await proxy.until("failed")
        await idle(bench)
        assert not bench.updates.healthy, step

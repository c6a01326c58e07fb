"""A vLLM whose queue is full refuses the probe of new weights: that says nothing of the weights (I10).

vLLM is not installed here: `test_vllm_salt.py` has what stands in its place.
"""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.errors import BadRequest, EngineFailed
from tests.unit.worker.engines.vllm.test_vllm_salt import Bench, engine_module

__all__ = ["engine_module"]


def answers(module: Any, monkeypatch: pytest.MonkeyPatch, *given: Any) -> Bench:
    """The engine, which answers one probe after the other with these."""
    left = list(given)

    async def score(*_: Any) -> Any:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module, "score", score)
    monkeypatch.setattr(module, "FULL_S", 0.0)
    return Bench(module, monkeypatch)


async def test_a_probe_is_tried_again_until_a_full_engine_takes_it(
    engine_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = engine_module.GracefulHTTPError("the engine is currently busy")
    bench = answers(engine_module, monkeypatch, full, full, [-1.0])
    assert await bench.engine.score([1, 2]) == [-1.0]


@pytest.mark.parametrize(("named", "raised"), [("VLLMClientError", BadRequest), ("EngineDeadError", EngineFailed)])
async def test_what_else_vllm_says_of_a_probe_is_said_at_once(
    engine_module: Any, monkeypatch: pytest.MonkeyPatch, named: str, raised: type[Exception]
) -> None:
    bench = answers(engine_module, monkeypatch, getattr(engine_module, named)("no"))
    with pytest.raises(raised, match="no"):
        await bench.engine.score([1, 2])

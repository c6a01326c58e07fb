"""What a worker's log says to who started it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from websockets.datastructures import Headers
from websockets.exceptions import InvalidProxyStatus, InvalidStatus
from websockets.http11 import Response

from steno.contracts.errors import ConfigError
from steno.contracts.wire.frames import ModelCard
from steno.contracts.wire.peer import PeerUp
from steno_worker import main
from steno_worker.config import WorkerSettings
from steno_worker.main import build_engine, remarks
from steno_worker.metrics import WorkerMetrics
from steno_worker.relay import connection
from steno_worker.relay.connection import ProxyConnection
from steno_worker.relay.dialling import unreachable
from steno_worker.weights.update_runner import UpdateRunner
from tests.support.workers.counting import CountingEngine


def test_a_model_whose_tool_calls_nobody_parses_is_named() -> None:
    parsed, unparsed = ModelCard("a", 1, capabilities=["tools"]), ModelCard("b", 1)
    assert remarks([parsed]) == [] and remarks([ModelCard("c", 1, text_only=True)]) == []
    [said] = remarks([parsed, unparsed])
    assert "tool calls of b as text" in said and "--tool-call-parser" in said


def test_a_wrong_address_is_told_from_a_proxy_that_is_away() -> None:
    refused = InvalidStatus(Response(403, "Forbidden", Headers(), b""))
    assert "HTTP 403" in unreachable(refused) and "http://HOST:PORT" in unreachable(refused)
    assert "http://" not in unreachable(InvalidStatus(Response(502, "Bad Gateway", Headers(), b"")))
    assert unreachable(TimeoutError()) == "TimeoutError"
    between = unreachable(InvalidProxyStatus(Response(403, "Forbidden", Headers(), b"")))
    assert "an HTTP proxy stands between" in between and "HTTP 403" in between and "no_proxy" in between


async def test_a_name_without_a_proxy_is_told_at_once_and_then_every_ten_minutes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a chart scales, workers dial names that no proxy has, for days."""
    now, reason = 0.0, "Name or service not known"

    async def dial(*args: Any, **options: Any) -> None:
        raise OSError(reason)

    monkeypatch.setattr(connection, "Dial", dial)
    metrics, engine = WorkerMetrics(CollectorRegistry()), CountingEngine()
    updates = UpdateRunner(engine, metrics, announce=lambda: None)
    one = ProxyConnection(
        "ws://proxy-7.test", WorkerSettings(worker_id="w"), boot_id="b", engine=engine, updates=updates, metrics=metrics,
        on_engine_death=lambda reason: None, clock=lambda: now,
    )  # fmt: skip

    async def said(attempts: int) -> list[str]:
        nonlocal now
        caplog.clear()
        for _ in range(attempts):
            await one._dial(again=True)
            now += 10.0
        return caplog.messages

    names_it = "can't reach ws://proxy-7.test: Name or service not known"
    assert await said(1) == [names_it]
    assert await said(180) == [f"{names_it} ({count} attempts so far)" for count in (61, 121, 181)]
    reason = "Connection refused"
    assert await said(2) == ["can't reach ws://proxy-7.test: Connection refused (182 attempts so far)"]
    with caplog.at_level(logging.INFO):
        one._handle(PeerUp(resumed=False))
        assert "connected to ws://proxy-7.test" in caplog.text
    assert await said(2) == ["can't reach ws://proxy-7.test: Connection refused"]
    await updates.close()


@pytest.mark.parametrize(("engine", "extra"), [("vllm", "vllm"), ("transformers", "worker"), ("litellm", "litellm")])
def test_an_engine_that_is_not_installed_says_what_brings_it(
    engine: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'it'", name="it")

    monkeypatch.setattr(main.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=rf"needs it: .*pip install .*\[{extra}\]'"):
        build_engine(WorkerSettings(engine=engine))

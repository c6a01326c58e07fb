"""What a worker's log says to who started it."""

from __future__ import annotations

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import InvalidProxyStatus, InvalidStatus
from websockets.http11 import Response

from steno.contracts.errors import ConfigError
from steno.contracts.wire.frames import ModelCard
from steno_worker import main
from steno_worker.config import WorkerSettings
from steno_worker.main import build_engine, remarks
from steno_worker.relay.connection import unreachable


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


@pytest.mark.parametrize(("engine", "extra"), [("vllm", "vllm"), ("transformers", "worker"), ("litellm", "litellm")])
def test_an_engine_that_is_not_installed_says_what_brings_it(
    engine: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'it'", name="it")

    monkeypatch.setattr(main.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=rf"needs it: .*pip install .*\[{extra}\]'"):
        build_engine(WorkerSettings(engine=engine))

"""A company's HTTP proxy is not asked for what runs on this machine."""

from __future__ import annotations

import httpx
import pytest
from websockets.proxy import get_proxy
from websockets.uri import parse_uri

from steno_cli.terminal.http_proxies import reach_loopback_directly

THERE = "http://proxy.example:3128"


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "all_proxy"])
@pytest.mark.parametrize(
    ("known", "hosts"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "10.0.0.1, 127.0.0.1"}, "10.0.0.1,127.0.0.1,localhost,::1"),
        ({"no_proxy": "*"}, "*"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,b,localhost,127.0.0.1,::1"),
    ],
)
def test_this_machine_is_named_beside_what_was(name: str, known: dict[str, str], hosts: str) -> None:
    environment = {name: THERE, **known}
    reach_loopback_directly(environment)
    assert environment == {name: THERE, "no_proxy": hosts, "NO_PROXY": hosts}


def test_without_an_http_proxy_nothing_is_changed() -> None:
    environment = {"NO_PROXY": "a", "http_proxy": ""}
    reach_loopback_directly(environment)
    assert environment == {"NO_PROXY": "a", "http_proxy": ""}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_what_dials_reads_it(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"http_proxy": THERE, "https_proxy": THERE}
    reach_loopback_directly(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert get_proxy(parse_uri("ws://elsewhere.example:8000")) == THERE
    assert get_proxy(parse_uri(f"ws://{host}:8000")) is None
    with httpx.Client() as client:
        direct = client._transport_for_url(httpx.URL(f"http://{host}:8000/"))  # httpx says it nowhere else
        assert direct is client._transport is not client._transport_for_url(httpx.URL("http://elsewhere.example:8000/"))

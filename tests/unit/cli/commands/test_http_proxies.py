"""A company's HTTP proxy is not asked for what runs on this machine."""

from __future__ import annotations

import os

import httpx
import pytest
from websockets.proxy import get_proxy
from websockets.uri import parse_uri

from steno_cli.terminal.http_proxies import leave_out_socks, mend_no_proxy, reach_loopback_directly

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


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("all_proxy", "socks5://u:secret@127.0.0.1:7890", "got socks5://…, needs: pip install socksio"),
        ("ALL_PROXY", "socks5h://127.0.0.1:7890", "got socks5h://…, needs: pip install socksio"),
        ("https_proxy", "socks://127.0.0.1:7890/", "got socks://…, must be http, https, socks5 or socks5h"),
    ],
)
def test_a_socks_proxy_that_ends_httpx_is_left_out_and_said(
    name: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises((ImportError, ValueError)):
        httpx.Client()
    said = list(leave_out_socks(os.environ))
    assert said == [f"{name} is left out: {why}"] and name not in os.environ
    httpx.Client().close()


def test_proxies_that_httpx_can_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"http_proxy": THERE, "HTTPS_PROXY": "10.0.0.1:3128", "all_proxy": "HTTP://proxy.example", "ALL_PROXY": ""}
    environment = dict(given)
    assert not list(leave_out_socks(environment)) and environment == given
    monkeypatch.setattr("steno_cli.terminal.http_proxies.find_spec", lambda name: name)  # it is installed
    environment["all_proxy"] = "socks5://127.0.0.1:7890"
    assert not list(leave_out_socks(environment)) and environment["all_proxy"] == "socks5://127.0.0.1:7890"


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a, [::1],.svc", "a,::1,.svc"),
        ("::1/128,10.0.0.0/8", "::1,10.0.0.0/8"),
        ("fd00::/8,fe80::1", "fe80::1"),
        ("[fd00::]/8,[::1", "::1"),
        ("[::1]:80,host:port,http://h:port,http://[::1]:80", "http://[::1]:80"),
        ("fd00::/8", ""),
        ("intranet.müller.de,.b", ".b"),
        ("a:b:c,1::2::3,::1:80:x,::1", "::1"),
    ],
)
def test_what_httpx_refuses_in_no_proxy_is_written_as_it_reads_it_or_left_out(
    name: str, given: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dual-stack clusters set ranges of IPv6: each command ended in `Invalid port: ':1'`, also where no HTTP proxy is set."""
    for other in [each for each in os.environ if each.lower().endswith("_proxy")]:
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, given)
    with pytest.raises(httpx.InvalidURL):
        httpx.Client()
    assert list(mend_no_proxy(os.environ)) == [] and os.environ[name] == kept
    httpx.Client().close()


def test_what_is_left_out_of_no_proxy_is_said_once_where_an_http_proxy_is_set() -> None:
    why = "is left out: must be a name, an address, HOST:PORT or a range of IPv4"
    environment = {"https_proxy": THERE, "no_proxy": "a,fd00::/8", "NO_PROXY": "fd00::/8,host:port"}
    assert list(mend_no_proxy(environment)) == [f"no_proxy: fd00::/8 {why}", f"NO_PROXY: host:port {why}"]
    assert environment == {"https_proxy": THERE, "no_proxy": "a", "NO_PROXY": ""}


def test_what_httpx_reads_in_no_proxy_stays() -> None:
    given = {"https_proxy": THERE, "no_proxy": "a, .b.c:443,1.2.3.4:80 ,::1,*,10.0.0.0/8,http://[::1]", "NO_PROXY": ""}
    environment = dict(given)
    assert not list(mend_no_proxy(environment)) and environment == given

"""What a proxy without keys lets in: heads as ASGI gives them, from agents and from web pages."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.errors import ConfigError
from steno_proxy.api.origin_guard import MOST_KNOWN, OriginGuard, from_a_page
from steno_proxy.config.settings import ProxySettings

DOOR = OriginGuard("https://gateway.example/rl/steno", ["host.docker.internal", "FD00::0001", "lan-box."])
HOST = (b"host", b"127.0.0.1:8000")


def asked(*headers: tuple[bytes, bytes], **scope: Any) -> Any:
    return {"type": "http", "scheme": "http", "headers": list(headers), **scope}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LocalHost:1",
        "localhost.",
        "localhost.:8000",
        "localhost:",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.9.9.9:65535",
        "[::1]",
        "[::1]:8000",
        "[0:0:0:0:0:0:0:1]:8000",
        "gateway.example",
        "Gateway.Example:8443",
        "gateway.example.",
        "host.docker.internal:8000",
        "[fd00::1]:8000",
        "lan-box",
    ],
)
def test_requests_for_this_machine_and_for_names_that_were_given_pass(host: str) -> None:
    for _ in range(2):  # the second time it is known
        assert DOOR.refusal(asked((b"host", host.encode()))) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example@localhost",
        "localhost@evil.example",
        "user:word@localhost:8000",
        "localhost:8000/x",
        "localhost:eight",
        "localhost:8000:1",
        "localhost#",
        "http://localhost",
        "0.0.0.0:8000",
        "10.0.0.1",
        "[::2]",
        "[fe80::1%25lo]",
        "::1",
        "",
        " ",
        "localhost, evil.example",
        "local\xe9",
        "app.localhost",
        "sub.gateway.example",
        "127.1",
        "2130706433",
        "0x7f.1",
        "[::",
        "127.0.0.256",
        "localhost..",
        "null",
    ],
)
def test_requests_for_any_other_name_are_refused_and_told_the_setting(host: str) -> None:
    refused = DOOR.refusal(asked((b"host", host.encode("latin-1"))))
    assert refused is not None and refused.status == 403
    assert refused.field == "allowed_hosts" and "--allowed-hosts" in refused.message


def test_what_names_no_host_is_no_browsers_and_passes() -> None:
    assert DOOR.refusal(asked()) is None
    assert DOOR.refusal(asked((b"user-agent", b"probe"), http_version="1.0")) is None


def test_of_two_hosts_none_counts() -> None:
    for first, second in (
        (b"localhost", b"evil.example"),
        (b"evil.example", b"localhost"),
        (b"localhost", b"localhost:1"),
    ):
        assert DOOR.refusal(asked((b"host", first), (b"host", second))) is not None
    assert DOOR.refusal(asked(HOST, HOST)) is None


@pytest.mark.parametrize(
    ("origin", "host", "scheme"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "http"),
        ("HTTP://LOCALHOST:8000", "localhost:8000", "http"),
        ("http://localhost", "localhost:80", "http"),
        ("http://[::1]:8000", "[::1]:8000", "http"),
        ("https://localhost", "localhost", "https"),
        ("http://host.docker.internal:8000", "host.docker.internal:8000", "http"),
        ("https://gateway.example", "127.0.0.1:8000", "http"),  # what stands before the proxy says another Host
        ("https://gateway.example:443", "gateway.example", "http"),
    ],
)
def test_pages_of_the_address_asked_and_of_the_public_url_pass(origin: str, host: str, scheme: str) -> None:
    assert DOOR.refusal(asked((b"host", host.encode()), (b"origin", origin.encode()), scheme=scheme)) is None


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "http://evil.example",
        "http://127.0.0.1",
        "http://127.0.0.1:3000",
        "http://localhost:8000",
        "https://127.0.0.1:8000",
        "http://127.0.0.1:8000.evil.example",
        "http://127.0.0.1:8000/",
        "http://a@127.0.0.1:8000",
        "file://",
        "chrome-extension://abc",
        "http://gateway.example",
        "https://gateway.example:8443",
        "http://127.0.0.1:8000 http://evil.example",
        "127.0.0.1:8000",
    ],
)
def test_pages_of_any_other_origin_are_refused(origin: str) -> None:
    refused = DOOR.refusal(asked(HOST, (b"origin", origin.encode())))
    assert refused is not None and (refused.status, refused.field) == (403, "origin")
    assert "admin_key" in refused.message


def test_an_origin_beside_a_good_one_and_one_without_a_host_are_refused() -> None:
    same = (b"origin", b"http://127.0.0.1:8000")
    assert DOOR.refusal(asked(HOST, same)) is None
    assert DOOR.refusal(asked(HOST, same, (b"origin", b"http://evil.example"))) is not None
    assert DOOR.refusal(asked(same)) is not None


@pytest.mark.parametrize(
    ("name", "value", "passes"),
    [
        ("sec-fetch-site", "same-origin", True),
        ("sec-fetch-site", "none", True),
        ("sec-fetch-site", "same-site", False),
        ("sec-fetch-site", "cross-site", False),
        ("sec-fetch-site", "", False),
        ("sec-fetch-mode", "cors", True),  # Node's own fetch says this, and neither a site nor an origin
        ("content-type", "application/json", True),
        ("content-type", "application/x-www-form-urlencoded", True),  # `curl -d`
        ("content-type", "application/octet-stream", True),
        ("content-type", "text/plain", False),
        ("content-type", "Text/Plain;charset=UTF-8", False),
    ],
)
def test_what_a_browser_adds_or_a_form_may_send(name: str, value: str, passes: bool) -> None:
    assert (DOOR.refusal(asked(HOST, (name.encode(), value.encode()))) is None) is passes


def test_no_more_hosts_are_remembered_than_a_few() -> None:
    door = OriginGuard()
    for port in range(2 * MOST_KNOWN):
        assert door.refusal(asked((b"host", b"localhost:%d" % port))) is None
    assert door.refusal(asked((b"host", b"evil.example"))) is not None
    assert len(door._known) == MOST_KNOWN


def test_a_workers_socket_has_no_origin_not_even_the_proxys_own() -> None:
    assert from_a_page(asked(HOST)) is None
    for origin in (b"http://127.0.0.1:8000", b"null", b""):
        assert from_a_page(asked(HOST, (b"origin", origin))) is not None


def test_with_keys_there_is_no_door() -> None:
    assert OriginGuard.of(ProxySettings(admin_key="k")) is None  # type: ignore[arg-type]
    assert OriginGuard.of(ProxySettings(allowed_hosts=["a.b"])) is not None


@pytest.mark.parametrize("name", ["http://a", "a:8000", "a/b", "", "*", ".a", "a b", "a@b", "::1:x"])
def test_what_is_no_hosts_name_is_refused_by_the_setting(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed-hosts") as refused:
        ProxySettings.load({"allowed_hosts": [name]}, None)
    assert refused.value.field == "allowed_hosts"


def test_names_come_from_the_environment_between_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_ALLOWED_HOSTS", "host.docker.internal,10.0.0.7,[fd00::1]")
    assert ProxySettings.load({}, None).allowed_hosts == ["host.docker.internal", "10.0.0.7", "[fd00::1]"]

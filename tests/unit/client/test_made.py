"""What a client is made with: a URL, a timeout, certificates, and the HTTP proxies of its environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

import certifi
import httpx
import pytest

from steno.client import client as module
from steno.client.client import AsyncClient, Client
from steno.contracts.errors import ConfigError


async def test_clients_of_one_process_read_the_trusted_certificates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """35 ms of processor time each, else."""
    times = []
    read = httpx.create_ssl_context
    monkeypatch.setattr(module.httpx, "create_ssl_context", lambda: times.append(1) or read())
    module._trusted.cache_clear()
    for _ in range(2):
        Client("https://proxy").close()
        await AsyncClient("https://proxy").close()
    assert len(times) == 1


def test_a_client_with_a_transport_of_its_own_reads_no_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/not/there")
    module._trusted.cache_clear()
    for kind in (Client, AsyncClient):
        assert kind("http://proxy", transport=httpx.MockTransport(lambda _: httpx.Response(200)))
        with pytest.raises(ConfigError):
            kind("http://proxy")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_certificates_that_can_not_be_read_are_refused_by_the_variable_that_names_them(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("x")
    for file, why in ((no_pem, ".*certificate"), (tmp_path / "none", "No such file or directory")):
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        wanted = f"^SSL_CERT_FILE: got '{file}', must be a file of certificates .PEM.: {why}"
        with pytest.raises(ConfigError, match=wanted) as caught:
            kind("http://proxy")
        assert caught.value.field == "SSL_CERT_FILE"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"NO_PROXY": "a,fd00::/8"}, "NO_PROXY: httpx can't read it: must be names"),
        ({"NO_PROXY": "a,fd00::/8", "https_proxy": "http://p"}, "NO_PROXY: httpx can't read it: must be names"),
        ({"HTTPS_PROXY": "http://u:geheim@proxy:port"}, "HTTPS_PROXY: httpx can't read it: must be http"),
        ({"http_proxy": "http://u:geh/eim@proxy", "no_proxy": "a"}, "http_proxy: httpx can't read it: must be http"),
        ({"all_proxy": "ftp://u:geheim@proxy"}, "all_proxy: httpx can't read it: must be http"),
        ({"ALL_PROXY": "socks5://u:geheim@h:7890"}, "ALL_PROXY: got a SOCKS proxy, needs: pip install socksio"),
    ],
)
def test_an_http_proxy_that_httpx_can_not_read_is_refused_by_its_variable_and_not_quoted(
    kind: type, variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in os.environ if each.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        kind("http://proxy")
    assert caught.value.message.startswith(says) and "geh" not in caught.value.message


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "", "proxy", "http://h:port", "http://1.2.3.400", "http://[::1", "ws://h"]
)
def test_a_url_that_is_no_proxys_is_refused_when_the_client_is_made(kind: type, url: str) -> None:
    """Some were `Unreachable` after all attempts, which patient callers repeat for hours, others an error of httpx."""
    with pytest.raises(ConfigError, match=f"^base_url: got {re.escape(repr(url))}, must be http") as caught:
        kind(url)
    assert caught.value.field == "base_url"


@pytest.mark.parametrize(
    "url", ["https://u:geheim@h:port", "ftp://u:geheim@h", "http://u:geh/eim@h", "http://u:geheim@1.2.3.400"]
)
def test_a_url_that_is_refused_is_told_without_its_password(url: str) -> None:
    wanted = rf"^base_url: got '{url.partition('://')[0]}://\*\*\*@.*', must be http"
    with pytest.raises(ConfigError, match=wanted) as caught:
        Client(url)
    assert "geh" not in caught.value.message and "eim" not in caught.value.message


def test_certificates_that_can_be_read_are_not_blamed_for_another_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_key_log(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")  # SSLKEYLOGFILE in a folder that is not there

    monkeypatch.setattr(module, "_trusted", no_key_log)
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    with pytest.raises(FileNotFoundError):
        Client("http://proxy")


def test_a_url_with_spaces_around_it_is_the_url() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://proxy/steno/sessions/a"
        return httpx.Response(204)

    Client(" http://proxy/steno/\n", transport=httpx.MockTransport(answer)).delete("a")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), 1e10])
def test_a_timeout_that_sockets_do_not_take_is_refused_when_the_client_is_made(kind: type, seconds: float) -> None:
    with pytest.raises(ConfigError, match=f"^timeout_s: got {re.escape(str(seconds))}, must be above 0") as caught:
        kind("http://proxy", timeout_s=seconds)
    assert caught.value.field == "timeout_s"


def test_new_clients_have_the_certificates_that_are_named_or_were_rotated_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import certifi

    times: list[int] = []
    monkeypatch.setattr(module.httpx, "create_ssl_context", lambda: times.append(1) or True)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    module._trusted.cache_clear()

    def read() -> int:
        for _ in range(2):
            Client("https://proxy").close()
        return len(times)

    assert read() == 1
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert read() == 2
    file = tmp_path / "trusted.pem"
    file.write_text(Path(certifi.where()).read_text())
    os.utime(tmp_path, (1, 1))
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    assert read() == 3
    os.utime(file, (2, 2))
    assert read() == 4

"""Keys open what they are for, and nothing else (I8)."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from proxy.config import ProxySettings
from proxy.contracts.errors import ConfigError, Forbidden, Unauthorized
from proxy.keys import Keyring, key_of


def test_each_key_opens_its_own_thing_only() -> None:
    keys = Keyring("admin")
    agent, harness = keys.agent_key("a"), keys.harness_key("a")
    assert agent and harness
    keys.check_agent(agent.encode(), "a")
    keys.check_harness(harness.encode(), "a")
    keys.check_harness(b"admin", "a")
    keys.check_admin(b"admin")
    for wrong in (agent, harness, "", "x", "é"):
        with pytest.raises((Forbidden, Unauthorized)):
            keys.check_admin(wrong.encode())
    for key in (harness, "admin"):
        with pytest.raises(Forbidden):
            keys.check_agent(key.encode(), "a")
    with pytest.raises(Forbidden):
        keys.check_agent(agent.encode(), "b")
    with pytest.raises(Forbidden):
        keys.check_harness(agent.encode(), "a")
    with pytest.raises(Forbidden):
        keys.check_harness(harness.encode(), None)
    with pytest.raises(Unauthorized):
        keys.check_agent(None, "a")


def test_a_trial_secret_outlives_the_admin_key() -> None:
    assert Keyring("one", None, "s").agent_key("a") == Keyring("two", None, "s").agent_key("a")
    assert Keyring("one").agent_key("a") != Keyring("two").agent_key("a")


def test_the_worker_key_is_the_admin_key_unless_there_is_one() -> None:
    assert (Keyring("a").worker, Keyring("a", "w").worker, Keyring(None).worker) == ("a", "w", "")


def test_without_an_admin_key_nothing_is_asked_for() -> None:
    keys = Keyring(None)
    keys.check_agent(None, "a")
    keys.check_admin(None)
    assert keys.agent_key("a") is None and keys.harness_key("a") is None


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], None),
        ([(b"authorization", b"Bearer  k ")], b"k"),
        ([(b"authorization", b"bearer k")], b"k"),
        ([(b"authorization", b"Basic k")], None),
        ([(b"x-api-key", b"k")], b"k"),
        ([(b"x-goog-api-key", b"k")], b"k"),
        ([(b"x-api-key", b"other"), (b"authorization", b"Bearer k")], b"k"),
    ],
)
def test_where_a_key_is_carried(headers: list[tuple[bytes, bytes]], key: bytes | None) -> None:
    assert key_of(headers) == key


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "steno.example"])
def test_another_host_without_an_admin_key_is_refused(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProxySettings(host=host).check()
    assert caught.value.field == "host"
    ProxySettings(host=host, admin_key=SecretStr("k")).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_no_key(host: str) -> None:
    ProxySettings(host=host).check()


@pytest.mark.parametrize(
    ("given", "base_path"), [(None, ""), ("https://h", ""), ("https://h/", ""), ("http://h:1/a/b/", "/a/b")]
)
def test_the_base_path_is_the_public_urls(given: str | None, base_path: str) -> None:
    assert ProxySettings(public_url=given).base_path == base_path

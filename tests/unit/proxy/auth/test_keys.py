"""Keys open what they are for, and nothing else (I8)."""

from __future__ import annotations

import inspect
import re

import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr

from steno.contracts.errors import ConfigError, Forbidden, Unauthorized
from steno_proxy.auth import keys as keys_module
from steno_proxy.auth.keys import Keyring, check_generation, key_of
from steno_proxy.config.settings import ProxySettings


def test_each_key_opens_its_own_thing_only() -> None:
    keys = Keyring("admin")
    agent, harness, run = keys.agent_key("a"), keys.harness_key("a"), keys.run_key("a")
    assert agent and harness and run
    keys.check_agent(agent.encode(), "a")
    keys.check_harness(harness.encode(), "a")
    keys.check_harness(b"admin", "a")
    keys.check_admin(b"admin")
    keys.check_harness(run.encode(), None, "a")
    for wrong in (agent, harness, run, "", "x", "é"):
        with pytest.raises((Forbidden, Unauthorized)):
            keys.check_admin(wrong.encode())
    for key, group_id, run_id in ((run, "a", None), (run, "a", "b"), (harness, None, "a"), (agent, "a", "a")):
        with pytest.raises(Forbidden):
            keys.check_harness(key.encode(), group_id, run_id)
    for key in (harness, run, "admin"):
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


def test_a_metrics_key_opens_the_metrics_alone() -> None:
    keys = Keyring("admin", None, None, "m1\nm2")
    for good in (b"m1", b"m2", b"admin"):
        keys.check_metrics(good)
    for key in ("m1", "m2"):
        with pytest.raises(Forbidden):
            keys.check_admin(key.encode())
        with pytest.raises(Forbidden):
            keys.check_harness(key.encode(), "g")
        with pytest.raises(Forbidden):
            keys.check_agent(key.encode(), "a")
        assert not keys.is_worker(key)
    for wrong in (None, b"m3", (keys.agent_key("a") or "").encode(), (keys.harness_key("g") or "").encode()):
        with pytest.raises((Forbidden, Unauthorized)):
            keys.check_metrics(wrong)
    keys.replace("admin", None, None, "m2")
    with pytest.raises(Forbidden):
        keys.check_metrics(b"m1")
    with pytest.raises(Forbidden):
        Keyring("admin").check_metrics(b"m1")


def test_what_a_key_did_not_open_is_counted_by_plane() -> None:
    def counted(plane: str) -> float:
        return REGISTRY.get_sample_value("steno_proxy_refused_keys_total", {"plane": plane}) or 0.0

    keys, before = Keyring("admin"), {plane: counted(plane) for plane in ("agents", "control")}
    for attempt in (
        lambda: keys.check_agent(None, "a"),
        lambda: keys.check_agent(b"admin", "a"),
        lambda: check_generation(1, 2),
        lambda: keys.check_admin(b"x"),
        lambda: keys.check_harness(b"x", "g"),
    ):
        with pytest.raises((Forbidden, Unauthorized)):
            attempt()
    keys.check_admin(b"admin")
    assert {plane: counted(plane) - before[plane] for plane in before} == {"agents": 3.0, "control": 2.0}


def test_who_shows_a_wrong_key_at_an_agents_route_is_told_which_opens_it_whatever_was_shown() -> None:
    keys, said = Keyring("admin"), set()
    for key in (
        b"admin",
        b"x",
        (keys.agent_key("other") or "").encode(),
        (keys.agent_key("a", 2) or "").encode() + b"x",
    ):
        with pytest.raises(Forbidden) as refused:
            keys.check_agent(key, "a")
        said.add(refused.value.message)
    assert said == {
        "this key has no access to this route: it takes the trial's own key, which POST /sessions/TRIAL answers and "
        "`steno env` prints"
    }
    with pytest.raises(Forbidden, match=r"this key has no access to this route$"):
        keys.check_admin(b"x")


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


def test_a_later_generation_is_another_key_and_says_which_it_is() -> None:
    keys = Keyring("admin")
    shown = [keys.agent_key("a", generation) for generation in (1, 2, 12)]
    assert len(set(shown)) == 3
    for generation, key in zip((1, 2, 12), shown, strict=True):
        assert key is not None and keys.check_agent(key.encode(), "a") == generation
        with pytest.raises(Forbidden):
            keys.check_agent(key.encode(), "b")
    first = (shown[0] or "").removeprefix("sk-steno-")
    for forged in (
        f"sk-steno-2-{first}",
        f"sk-steno-1-{first}",
        f"sk-steno-02-{first}",
        f"sk-steno-{'9' * 4000}-{first}",
    ):
        with pytest.raises(Forbidden):
            keys.check_agent(forged.encode(), "a")
    check_generation(None, 7)
    check_generation(7, 7)
    for other in (6, 8):
        with pytest.raises(Forbidden):
            check_generation(other, 7)


def test_every_comparison_of_a_key_is_of_constant_time() -> None:
    """By construction: `hmac.compare_digest`, over all candidates, and no other comparison."""
    source = inspect.getsource(keys_module)
    assert "hmac.compare_digest(key, candidate)" in inspect.getsource(keys_module._is_one_of)
    for line in source.splitlines():
        assert not re.search(r"\bkey\b\s*(==|!=|in)\s", line) or "for key in" in line or "(key in" in line, line
    for method in (
        Keyring.check_admin,
        Keyring.check_agent,
        Keyring.check_harness,
        Keyring.is_admin,
        Keyring.is_worker,
    ):
        assert "_check(" in inspect.getsource(method) or "_is_one_of(" in inspect.getsource(method)


def test_a_keyring_shows_nothing_of_its_keys() -> None:
    keys = Keyring("ak-secret", "wk-secret", "ts-secret")
    shown = f"{keys!r} {keys} {ProxySettings(admin_key=SecretStr('ak-secret'))!r}"
    assert "secret" not in shown.replace("trial_secret", "") and keys.own not in shown

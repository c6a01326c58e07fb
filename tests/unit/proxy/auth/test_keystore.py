"""Keys that nobody gave: made once, kept, readable by their owner only, and never in the way of given ones."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno_proxy.auth import generated_keys
from steno_proxy.auth.keys import Keyring
from steno_proxy.config.settings import ProxySettings


def settings(folder: Path | None, **cli: str) -> ProxySettings:
    return ProxySettings.load({"keys_dir": folder, **cli} if folder else cli, None)


def shown(given: ProxySettings) -> list[str | None]:
    keys = (given.admin_key, given.worker_key, given.trial_secret)
    return [key.get_secret_value() if key else None for key in keys]


def test_without_a_folder_nothing_is_made() -> None:
    before = settings(None)
    assert generated_keys.fill(before) == (before, {})


def test_the_first_start_makes_all_keys_and_later_ones_find_them(tmp_path: Path) -> None:
    first, made = generated_keys.fill(settings(tmp_path / "keys"))
    again, made_again = generated_keys.fill(settings(tmp_path / "keys"))
    assert set(made) == set(generated_keys.PREFIXES) and made_again == {}
    assert shown(first) == shown(again) and len(set(shown(first))) == 3
    for path in (tmp_path / "keys").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert len(list((tmp_path / "keys").iterdir())) == 3


def test_a_given_key_counts_and_rotating_the_admin_key_keeps_agents_keys(tmp_path: Path) -> None:
    first, _ = generated_keys.fill(settings(tmp_path, admin_key="one"))
    second, made = generated_keys.fill(settings(tmp_path, admin_key="two"))
    assert shown(second)[0] == "two" and made == {}
    assert not (tmp_path / "admin_key").exists()
    assert Keyring.of(first).agent_key("t") == Keyring.of(second).agent_key("t")


def test_the_announcement_shows_what_people_need_and_not_the_trial_secret(tmp_path: Path) -> None:
    _, made = generated_keys.fill(settings(tmp_path))
    text = generated_keys.announcement(made, tmp_path)
    assert made["admin_key"] in text and made["worker_key"] in text and made["trial_secret"] not in text


def test_proxies_that_start_together_agree(tmp_path: Path) -> None:
    found: list[list[str | None]] = []
    start = threading.Barrier(8)

    def proxy() -> None:
        start.wait()
        found.append(shown(generated_keys.fill(settings(tmp_path))[0]))

    threads = [threading.Thread(target=proxy) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(keys == found[0] for keys in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(generated_keys.PREFIXES)


def test_a_folder_that_is_none_and_a_key_that_is_empty_or_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="keys_dir") as caught:
        generated_keys.fill(settings(tmp_path / "file" / "keys"))
    assert caught.value.field == "keys_dir"
    (tmp_path / "admin_key").write_text("\n")
    with pytest.raises(ConfigError, match="admin_key is empty"):
        generated_keys.fill(settings(tmp_path))
    (tmp_path / "admin_key").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"^keys_dir: .*admin_key: not text"):
        generated_keys.fill(settings(tmp_path))

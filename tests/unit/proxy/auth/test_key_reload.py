"""Keys that are read again: which are good afterwards, and when nothing changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.errors import Forbidden
from steno_proxy.auth import generated_keys, key_reload
from steno_proxy.auth.key_reload import KeyReloader
from steno_proxy.auth.keys import Keyring
from steno_proxy.config.settings import ProxySettings
from tests.support.waiting import until


class Kept:
    """A proxy's keys in files, and the rotation that looks at them."""

    def __init__(self, folder: Path, **keys: str) -> None:
        self.folder = folder
        for name, value in keys.items():
            self.write(name, value)
        files = {f"{name}_file": str(folder / name) for name in keys}
        self.settings = ProxySettings.load(files, None)
        self.keys = Keyring.of(self.settings)
        self.changes = 0
        self.rotation = KeyReloader(self.keys, self.settings, self.changed)

    def write(self, name: str, value: str) -> None:
        (self.folder / name).write_text(value + "\n")

    def changed(self) -> None:
        self.changes += 1


async def test_admin_keys_are_added_handed_out_and_taken_away(tmp_path: Path) -> None:
    kept = Kept(tmp_path, admin_key="old")
    kept.write("admin_key", "new\nold")
    await kept.rotation.look(at_once=True)
    assert kept.keys.is_admin(b"old") and kept.keys.is_admin(b"new") and kept.changes == 1
    assert not kept.keys.is_admin(b"new\nold") and not kept.keys.is_admin(b"")
    kept.write("admin_key", "new")
    await kept.rotation.look(at_once=True)
    assert kept.keys.is_admin(b"new") and not kept.keys.is_admin(b"old")


async def test_without_a_signal_a_change_counts_when_it_is_seen_twice(tmp_path: Path) -> None:
    kept = Kept(tmp_path, admin_key="old")
    kept.write("admin_key", "ne")
    await kept.rotation.look()
    kept.write("admin_key", "new")
    await kept.rotation.look()
    assert kept.keys.is_admin(b"old") and not kept.keys.is_admin(b"ne")
    await kept.rotation.look()
    await kept.rotation.look()
    assert kept.keys.is_admin(b"new") and not kept.keys.is_admin(b"old") and kept.changes == 1


async def test_a_mounted_secret_that_is_swapped_by_its_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v2").mkdir()
    (tmp_path / "v1" / "admin_key").write_text("old")
    (tmp_path / "v2" / "admin_key").write_text("new")
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "admin_key").symlink_to("data/admin_key")
    settings = ProxySettings.load({"admin_key_file": str(tmp_path / "admin_key")}, None)
    keys = Keyring.of(settings)
    rotation = KeyReloader(keys, settings, lambda: None)
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").replace(tmp_path / "data")
    await rotation.look()
    await rotation.look()
    assert keys.is_admin(b"new") and not keys.is_admin(b"old")


@pytest.mark.parametrize("spoil", ["missing", "empty", "no text"])
async def test_what_cannot_be_read_changes_nothing_and_is_said_once(
    spoil: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path, admin_key="old-admin-key", worker_key="old-worker-key")
    path = tmp_path / "admin_key"
    kept.write("worker_key", "new-worker-key")
    path.unlink() if spoil == "missing" else path.write_bytes(b" \n" if spoil == "empty" else b"\xff\xfe")
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            await kept.rotation.look(at_once=True)
    assert kept.keys.is_admin(b"old-admin-key") and kept.keys.is_worker("old-worker-key") and kept.changes == 0
    assert (
        len(caplog.records) == 1 and "admin_key" in caplog.text and "-key" not in caplog.text.replace("admin_key", "")
    )
    kept.write("admin_key", "newer-admin-key")
    await kept.rotation.look(at_once=True)
    assert kept.keys.is_admin(b"newer-admin-key") and kept.keys.is_worker("new-worker-key")
    assert "-admin-key" not in caplog.text and "worker-key" not in caplog.text


async def test_a_look_that_fails_unforeseen_is_logged_and_the_next_one_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_reload, "LOOK_S", 0.0)
    kept = Kept(tmp_path, admin_key="old")
    kept.write("admin_key", "new")
    real, failed = asyncio.to_thread, False

    async def to_thread(*given: Any) -> Any:
        nonlocal failed
        if not failed:
            failed = True
            raise RuntimeError("can't start new thread")
        return await real(*given)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    running = asyncio.create_task(kept.rotation.run())
    await until(lambda: kept.changes)
    running.cancel()
    assert kept.keys.is_admin(b"new") and not kept.keys.is_admin(b"old")
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1 and "can't start new thread" in caplog.text


async def test_agents_keys_of_a_listed_secret_stay_good_and_new_ones_come_of_the_first(tmp_path: Path) -> None:
    kept = Kept(tmp_path, admin_key="admin", trial_secret="one")
    agent, harness, run = kept.keys.agent_key("t"), kept.keys.harness_key("g"), kept.keys.run_key("r")
    assert agent and harness and run
    kept.write("trial_secret", "two\none")
    await kept.rotation.look(at_once=True)
    newer = kept.keys.agent_key("t")
    assert newer and newer != agent
    for key in (agent, newer):
        assert kept.keys.check_agent(key.encode(), "t") == 1
        with pytest.raises(Forbidden):
            kept.keys.check_agent(key.encode(), "u")
    kept.keys.check_harness(harness.encode(), "g")
    kept.keys.check_harness(run.encode(), "g", "r")
    kept.write("trial_secret", "two")
    await kept.rotation.look(at_once=True)
    kept.keys.check_agent(newer.encode(), "t")
    for check in (
        lambda: kept.keys.check_agent(agent.encode(), "t"),
        lambda: kept.keys.check_harness(harness.encode(), "g"),
        lambda: kept.keys.check_harness(run.encode(), "g", "r"),
    ):
        with pytest.raises(Forbidden):
            check()


async def test_a_new_admin_key_changes_no_agents_key_where_no_secret_was_given(tmp_path: Path) -> None:
    kept = Kept(tmp_path, admin_key="old")
    kept.keys.settle(b"k" * 32)
    agent = kept.keys.agent_key("t")
    kept.write("admin_key", "new")
    await kept.rotation.look(at_once=True)
    assert kept.keys.agent_key("t") == agent


async def test_workers_keys_follow_the_admin_keys_where_they_have_none_of_their_own(tmp_path: Path) -> None:
    kept = Kept(tmp_path, admin_key="old")
    own = kept.keys.own
    kept.write("admin_key", "new")
    await kept.rotation.look(at_once=True)
    assert kept.keys.is_worker("new") and not kept.keys.is_worker("old") and kept.keys.is_worker(own)
    assert not kept.keys.is_admin(own.encode())


async def test_made_keys_are_looked_at_in_their_folder(tmp_path: Path) -> None:
    settings, made = generated_keys.fill(ProxySettings.load({"keys_dir": tmp_path, "worker_key": "given"}, None))
    keys = Keyring.of(settings)
    rotation = KeyReloader(keys, settings, lambda: None)
    assert sorted(settings.secret_files) == ["admin_key", "trial_secret"]
    (tmp_path / "admin_key").write_text(f"fresh\n{made['admin_key']}\n")
    await rotation.look(at_once=True)
    assert keys.is_admin(b"fresh") and keys.is_admin(made["admin_key"].encode()) and keys.is_worker("given")


def test_keys_that_are_in_no_file_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "k").write_text("from-a-file")
    assert not KeyReloader(Keyring("k"), ProxySettings.load({"admin_key": "k"}, None), lambda: None)
    file = tmp_path / "steno.yaml"
    file.write_text(f"admin_key_file: {tmp_path / 'k'}\n")
    assert ProxySettings.load({}, file).secret_files == {"admin_key": tmp_path / "k"}
    assert ProxySettings.load({"admin_key": "given"}, file).secret_files == {}

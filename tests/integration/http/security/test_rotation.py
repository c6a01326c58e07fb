"""Every kind of key is rotated while agents' streams run: none of them breaks, and what is old opens nothing afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.programs.processes import until
from tests.support.programs.stack import ROOT, Stack, running

WORDS = " ".join(f"word{number}" for number in range(150))
SCRIPT = f'def say(request):\n    return {{"content": {WORDS!r}}}\n'


class Agent(threading.Thread):
    """One stream of one trial, from its first event to its last."""

    def __init__(self, stack: Stack, trial_id: str, key: str) -> None:
        super().__init__(daemon=True)
        self.begun, self.text, self.done, self.failure = threading.Event(), "", False, ""
        self._ask = (stack.base_url(trial_id) + "/chat/completions", {"authorization": f"Bearer {key}"})
        self.start()

    def run(self) -> None:
        url, headers = self._ask
        body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
        try:
            with httpx.stream("POST", url, headers=headers, json=body, timeout=180) as answer:
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: {"):
                        self.text += line
                        self.begun.set()
                    elif answer.status_code != 200:
                        self.failure += line
        except httpx.HTTPError as error:
            self.failure = repr(error)


class Keys:
    """The proxy's keys, in the files that it reads."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        self.folder, self.stack, self.admin = folder, stack, "admin-one"

    def write(self, name: str, *keys: str) -> None:
        fresh = self.folder / f".{name}"
        fresh.write_text("\n".join(keys))
        fresh.replace(self.folder / name)

    def rotate(self, name: str, *keys: str) -> None:
        said = self.log().count("new keys:")
        self.write(name, *keys)
        self.stack.proxy.send_signal(signal.SIGHUP)
        until(lambda: self.log().count("new keys:") > said)

    def log(self) -> str:
        return (self.stack.folder / "proxy.log").read_text()

    def ask(self, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.admin}"}
        return httpx.request(method, self.stack.url + path, headers=headers, timeout=60, **options)

    def register(self, trial_id: str) -> str:
        return str(self.ask("POST", f"/sessions/{trial_id}").raise_for_status().json()["api_key"])

    def models(self, trial_id: str, key: str) -> int:
        return self.ask("GET", f"/{trial_id}/v1/models", key).status_code


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keys]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "keys"
    folder.mkdir()
    for name, text in (
        ("admin_key", "admin-one"),
        ("worker_key", "worker-a\nworker-b"),
        ("trial_secret", "secret-one"),
    ):
        (folder / name).write_text(text)
    flags = [f"--{name.replace('_', '-')}-file={folder / name}" for name in ("admin_key", "worker_key", "trial_secret")]
    with running(tmp_path / "run", None, proxy=flags) as stack:
        for name in ("a", "b"):
            stack.start_worker(
                *("--engine", "scripted", "--script", f"{script}:say", "--model", str(ROOT / "steno/models/tiny")),
                *("--key", f"worker-{name}", "--worker-id", name, "--", "--pace-s", "0.1"),
                name=f"worker-{name}",
            )
        found = Keys(folder, stack)
        until(lambda: len(found.ask("GET", "/workers").json()["items"]) == 2)
        yield found


def test_every_key_is_rotated_under_streams_that_run(keys: Keys) -> None:
    trials = {f"trial-{number}": keys.register(f"trial-{number}") for number in range(8)}
    agents = [Agent(keys.stack, trial_id, key) for trial_id, key in trials.items()]
    assert all(agent.begun.wait(120) for agent in agents), [agent.failure for agent in agents]
    before = {worker["id"]: worker for worker in keys.ask("GET", "/workers").json()["items"]}
    assert all(worker["in_flight"] for worker in before.values())
    assert {worker["address"] for worker in before.values()} == {"127.0.0.1"}

    # The admin's: for a while both, then the new one alone.
    keys.rotate("admin_key", "admin-two", "admin-one")
    assert [keys.ask("GET", "/sessions", key).status_code for key in ("admin-one", "admin-two")] == [200, 200]
    keys.admin = "admin-two"
    keys.rotate("admin_key", "admin-two")
    assert keys.ask("GET", "/sessions", "admin-one").status_code == 403

    # One trial's.
    rotated = keys.ask("POST", "/sessions/trial-0/rotate-key").json()
    assert rotated["session"]["key_generation"] == 2
    again = keys.ask("POST", "/sessions/trial-0/rotate-key", json={"generation": 2}).json()
    assert again["api_key"] == rotated["api_key"] != trials["trial-0"]
    assert keys.ask("POST", "/sessions/trial-0/rotate-key", json={"generation": 1}).status_code == 409
    assert (keys.models("trial-0", trials["trial-0"]), keys.models("trial-0", rotated["api_key"])) == (403, 200)

    # All trials': what was handed out stays good while its secret is listed.
    keys.rotate("trial_secret", "secret-two", "secret-one")
    fresh = keys.register("trial-1")
    assert fresh != trials["trial-1"]
    assert (keys.models("trial-1", trials["trial-1"]), keys.models("trial-1", fresh)) == (200, 200)

    # A worker's is revoked: what it ran goes on at the other, which notices nothing.
    assert not any(agent.done for agent in agents), "the streams were too short for this test"
    keys.rotate("worker_key", "worker-b", "worker-c")
    [left] = keys.ask("GET", "/workers").json()["items"]
    assert (left["id"], left["since"]) == ("b", before["b"]["since"])
    assert keys.stack.workers[0].wait(120) == 2
    said = (keys.stack.folder / "worker-a.log").read_text()
    assert "key" in said and "worker-a" not in said.replace("worker-a.log", "")

    for agent in agents:
        agent.join(180)
        assert agent.done and not agent.failure, agent.failure
    for trial_id in trials:
        [turn] = [turn for turn in turns(keys, trial_id) if not turn["partial"]]
        assert turn["reply"]["content"] == WORDS if "reply" in turn else turn["finish_reason"] == "stop"

    keys.rotate("trial_secret", "secret-two")
    assert (keys.models("trial-1", trials["trial-1"]), keys.models("trial-1", fresh)) == (403, 200)
    for secret in (
        "admin-one",
        "admin-two",
        "worker-b",
        "worker-c",
        "secret-one",
        "secret-two",
        fresh,
        *trials.values(),
    ):
        assert secret not in keys.log()


def test_a_changed_file_needs_no_signal_and_a_worker_with_a_new_key_comes_in(keys: Keys) -> None:
    keys.write("worker_key", "worker-b")
    until(lambda: [worker["id"] for worker in keys.ask("GET", "/workers").json()["items"]] == ["b"])
    assert keys.stack.workers[0].wait(120) == 2
    (keys.folder / "worker_key").unlink()
    until(lambda: "can't read the keys again, the old ones stay valid" in keys.log())
    assert len(keys.ask("GET", "/workers").json()["items"]) == 1
    assert keys.stack.proxy.poll() is None


def turns(keys: Keys, trial_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = keys.ask("GET", f"/sessions/{trial_id}/turns").raise_for_status().json()["items"]
    return found


def test_without_files_a_hangup_ends_the_proxy_as_ever(tmp_path: Path) -> None:
    with running(tmp_path / "run", None) as stack:
        stack.proxy.send_signal(signal.SIGHUP)
        assert stack.proxy.wait(60) == -signal.SIGHUP

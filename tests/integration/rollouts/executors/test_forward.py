"""The way out of a trial's containers, at the proxy that runs: WebSockets pass, and nothing is smuggled behind one."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import websockets
from websockets.asyncio.client import unix_connect

from steno.client.client import Steno
from steno.contracts.rest import Trial
from steno_rollouts.trials.containers.forward import SOCKET, Forward, Route

OWNER = (os.geteuid(), os.getegid())


def forward(folder: Path, trial: Trial) -> Forward:
    return Forward(folder / "socket", Route(trial.urls["anthropic"]), OWNER)


async def test_a_websocket_of_the_trial_passes(client: Steno, tmp_path: Path) -> None:
    trial = client.register("sockets")
    path = str(tmp_path / "socket" / SOCKET)
    url, headers = "ws://127.0.0.1:8080/sockets/v1/responses", {"authorization": f"Bearer {trial.api_key}"}
    async with forward(tmp_path, trial):
        async with unix_connect(path, url, additional_headers=headers) as socket:
            for said in ("hello", "again"):
                await socket.send(json.dumps({"type": "response.create", "model": "m", "input": said}))
                while (event := json.loads(await socket.recv()))["type"] != "response.completed":
                    assert event["type"] != "error", event
        for refused, status in (
            (url.replace("sockets/", "others/"), "403"),
            (url.replace("responses", "models"), "404"),
        ):
            with pytest.raises(websockets.InvalidStatus, match=status):
                await unix_connect(path, refused, additional_headers=headers)
    assert client.session("sockets").counts.turns == 2


async def test_what_comes_behind_a_socket_that_is_refused_goes_nowhere(client: Steno, tmp_path: Path) -> None:
    trial = client.register("smuggler")
    asked = "upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    asked += "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    async with forward(tmp_path, trial):
        for target in ("v1/models", "v1/responses"):  # no socket; and one without a key
            reader, writer = await asyncio.open_unix_connection(tmp_path / "socket" / SOCKET)
            writer.write(
                f"GET /smuggler/{target} HTTP/1.1\r\n{asked}\r\nGET /healthz HTTP/1.1\r\nhost: x\r\n\r\n".encode()
            )
            answer = await asyncio.wait_for(reader.read(), 30)
            assert answer.count(b"HTTP/1.1 ") == 1 and not answer.startswith(b"HTTP/1.1 101"), answer
            writer.close()


async def test_whoever_runs_the_forwarder_may_enter_its_folder_whatever_the_umask_is(
    client: Steno, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[Path, tuple[int, int]] = {}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, *owner: given.update({Path(path): owner}))
    trial, before = client.register("umask"), os.umask(0o077)
    try:
        async with Forward(tmp_path / "socket", Route(trial.urls["anthropic"]), (1000, 1000)):
            assert given == dict.fromkeys((tmp_path / "socket", tmp_path / "socket" / SOCKET), (1000, 1000))
    finally:
        os.umask(before)

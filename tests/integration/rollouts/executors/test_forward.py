"""The way out of a trial's containers, at the proxy that runs: WebSockets pass, and nothing is smuggled behind one."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from pathlib import Path

import pytest
import websockets
from websockets.asyncio.client import unix_connect

from steno.client.client import Client
from steno.contracts.rest import Trial
from steno_rollouts.trials.containers import forward as forwards
from steno_rollouts.trials.containers.forward import SOCKET, Forward, Route
from tests.support.certificates import certificate

OWNER = (os.geteuid(), os.getegid())


def forward(folder: Path, trial: Trial) -> Forward:
    return Forward(folder / "socket", Route(trial.urls["anthropic"]), OWNER)


async def test_a_websocket_of_the_trial_passes(client: Client, tmp_path: Path) -> None:
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


async def test_what_comes_behind_a_socket_that_is_refused_goes_nowhere(client: Client, tmp_path: Path) -> None:
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
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


async def test_trusted_certificates_are_read_once_for_all_requests_of_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """28 ms of the launcher's event loop for each request, else."""
    monkeypatch.setattr(forwards, "CONNECT_S", 60.0)
    certificate(tmp_path / "ca.crt", tmp_path / "key.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key.pem")
    read, times = ssl.create_default_context, []
    monkeypatch.setattr(ssl, "create_default_context", lambda: times.append(1) or read(cafile=tmp_path / "ca.crt"))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + asked.split(b" ")[1])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as proxy:
        route = Route(f"https://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/g.0")
        async with Forward(tmp_path / "socket", route, OWNER):
            for number in range(3):
                reader, writer = await asyncio.open_unix_connection(tmp_path / "socket" / SOCKET)
                writer.write(f"GET /g.0/{number} HTTP/1.1\r\n\r\n".encode())
                said = await asyncio.wait_for(reader.read(), 60)
                assert said == f"HTTP/1.1 200 OK\r\n\r\n/g.0/{number}".encode()
                writer.close()
    assert len(times) == 1

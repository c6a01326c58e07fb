"""Bad input: no 500, no memory, no neighbour's harm."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from tests.integration.http.conftest import Proxy, running

CHAT = "/t/v1/chat/completions"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\x00\xff", b'{"messages": 1}', b'{"messages":' + b"[" * 30_000, b'{"messages":[{"role":NaN}]}',
     b'{"messages":[{"role":"user","content":"\\ud80"}]}', b'{"messages":[{"role":"user","content":1e400}]}',
     b'{"messages":[{"role":"user","content":"\xe9"}]}', b"\xef\xbb\xbf\xff"],
)  # fmt: skip
async def test_malformed_bodies_are_400(proxy: Proxy, body: bytes) -> None:
    for path in (CHAT, "/t/v1/completions"):
        response = await proxy.http.post(path, content=body)
        assert response.status_code == 400 and response.json()["error"]["message"], response.text
        assert response.headers["x-request-id"]


def memory_kib(name: str) -> int:
    """Of this process, in which the proxy runs: VmRSS is what it holds, VmHWM the most that it has held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


async def test_a_hundred_megabytes_are_refused_unread(proxy: Proxy) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 2**20

    read = 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = memory_kib("VmRSS")
    for path in (CHAT, "/sessions/t", "/sessions/v1/complete", "/t/v1/sessions"):
        for kwargs in ({"headers": {"content-length": str(100 * 2**20)}}, {}):
            try:
                response = await proxy.http.post(path, content=chunks(), **kwargs)  # type: ignore[arg-type]
            except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
                continue  # the answer was on its way, and the connection closed under what we still sent
            assert response.status_code == (404 if path == "/t/v1/sessions" else 413)
            assert response.headers.get_list("x-request-id")
            read += 1
    assert memory_kib("VmHWM") - before < 60 * 1024
    assert read, "no answer came"
    assert (await proxy.chat("t", "x")).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_the_413_reaches_a_client_that_reads(declared: bool) -> None:
    async with running(worker=False, max_body_bytes=2000) as proxy:
        body = b'{"x": "' + b" " * 3000 + b'"}'

        async def chunked() -> AsyncIterator[bytes]:
            yield body

        response = await proxy.http.post(CHAT, content=body if declared else chunked())
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("path", ["/t/v1/chat/completions", "/t/v1/messages/count_tokens", "/sessions"])
async def test_a_body_that_never_comes_is_a_408_and_holds_up_nobody(path: str) -> None:
    async with running(body_timeout_s=2) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode())
        assert (await proxy.chat("t", "x")).status_code == 200
        # To its end: the rest of the body would be taken for a request.
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
        writer.close()


@pytest.mark.parametrize(
    "trial_id",
    ["..", ".", "a b", "a/b", "x" * 129, "é", "a\n", "a\x00", "%2e%2e", "sessions", "workers", "groups", "v1", "t?x", "t#x",
     "metrics", "<script>", "*", "{t}", "openapi.json"],
)  # fmt: skip
async def test_hostile_trial_ids_are_refused(proxy: Proxy, trial_id: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    path = quote(trial_id, safe="")
    for url in (f"/{path}/v1/chat/completions", f"/{path}/v1/completions"):
        response = await proxy.http.post(url, json=body)
        assert response.status_code in (404, 405), (url, response.status_code)
    assert (await proxy.http.post("/sessions", json={"trial_id": trial_id})).status_code == 400
    assert (await proxy.http.get("/sessions")).json()["items"] == []


async def test_requests_of_one_trial_never_answer_another(proxy: Proxy) -> None:
    await asyncio.gather(*(proxy.chat(f"t{i}", f"secret {i}") for i in range(10)))
    for i in range(10):
        [turn] = await proxy.turns(f"t{i}")
        assert turn.messages == [{"role": "user", "content": f"secret {i}"}]


async def test_integers_beyond_the_wire_are_named(proxy: Proxy) -> None:
    parameters = {"type": "object", "maximum": 2**80}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    response = await proxy.chat("t", "x", tools=tools)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools.0.function.parameters")


async def test_half_a_request_and_a_closed_socket_leave_nothing(proxy: Proxy) -> None:
    for sent in (b"POST", b"POST /t/v1/chat/completions HTTP/1.1\r\ncontent-length: 10\r\n\r\n{", b"\x16\x03\x01" * 50):
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(sent)
        await writer.drain()
        writer.close()
    assert (await proxy.chat("t", "x")).status_code == 200


@pytest.mark.parametrize(
    ("path", "named"), [(CHAT, "param"), ("/t/v1/completions", "param"), ("/sessions", "field"), ("/groups", "field")]
)
async def test_a_compressed_body_is_refused_by_name(proxy: Proxy, path: str, named: str) -> None:
    response = await proxy.http.post(path, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"][named]) == (400, "content-encoding")


async def test_nobody_is_sent_to_another_address(proxy: Proxy) -> None:
    for path, status in ((CHAT + "/", 400), ("/sessions/", 404), ("//sessions", 404), ("/t//v1/models/", 405)):
        answer = await proxy.http.post(path, json={})
        assert answer.status_code == status and "location" not in answer.headers, (path, answer.text)

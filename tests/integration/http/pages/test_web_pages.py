"""A proxy without keys, and the web pages that its developer visits: what a browser may be made to send, at every route."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from steno.contracts.wire.channel import encode_alone
from steno.contracts.wire.frames import Hello, ModelCard
from steno_proxy.server.front import Application
from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until

EVIL = "http://evil.example"
CHAT = {"messages": [{"role": "user", "content": "who reads this?"}]}
PAGES = (
    {"origin": EVIL},
    {"origin": "null"},  # a sandboxed frame, a `data:` page, a form under `no-referrer`
    {"origin": "http://127.0.0.1:1"},  # another program's page on this machine
    {"host": "evil.example"},  # a name that was made to mean 127.0.0.1
    {"sec-fetch-site": "cross-site"},  # an image, a script, a link: GET has no Origin
    {"sec-fetch-site": "same-site"},
)


def every_route(proxy: Proxy) -> list[tuple[str, str]]:
    """(method, path) of all there is, and of the spellings and the fast path of agents' clients."""
    app: Application = proxy.app
    documented = [
        (method.upper(), re.sub(r"\{[^}]*\}", "t", path))
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    ]
    fast = [(method, f"/t{path}") for method, path in app.turns]
    return (
        documented
        + fast
        + [("POST", "/t//chat/completions"), ("GET", "/openapi.json"), ("GET", "/"), ("GET", "/nothing")]
    )


async def test_no_route_answers_a_page_of_another_origin_and_none_does_anything() -> None:
    async with running(public_url="https://gateway.example/rl") as proxy:
        routes = every_route(proxy)
        assert len(routes) > 40 and ("POST", "/t/v1/chat/completions") in routes
        for method, path in routes:
            for page in PAGES[:1] + PAGES[3:4] if method != "GET" else PAGES:
                answer = await proxy.http.request(method, path, headers=page, json=CHAT)
                if path == "/healthz":
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 403, (method, path, page)
                told = answer.json()["error"]
                assert ("allowed_hosts" if "host" in page else "admin_key") in told["message"]
                assert not [name for name in answer.headers if name.startswith("access-control")]
        assert (await proxy.http.get("/sessions")).json()["items"] == []
        assert (await proxy.http.get("/rl/healthz", headers={"host": "evil.example"})).status_code == 200
        assert (await proxy.http.get("/rl/sessions", headers={"host": "evil.example"})).status_code == 403


async def test_what_a_page_may_send_without_asking_first_is_not_recorded(proxy: Proxy) -> None:
    body = json.dumps(CHAT)
    for kind in (
        "text/plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        None,
    ):
        for page in PAGES:
            headers = page | ({"content-type": kind} if kind else {})
            answer = await proxy.http.post("/t/v1/chat/completions", content=body, headers=headers)
            assert answer.status_code in (400, 403), headers
    # Of a browser that says nothing of its pages: what a form can send there is no JSON under any type but this.
    plain = await proxy.http.post("/t/v1/chat/completions", content=body, headers={"content-type": "text/plain"})
    assert (plain.status_code, plain.json()["error"]["field"]) == (400, "content-type")
    preflight = {
        "origin": EVIL,
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    answer = await proxy.http.options("/t/v1/chat/completions", headers=preflight)
    assert answer.status_code == 403 and not [name for name in answer.headers if name.startswith("access-control")]
    assert (await proxy.http.get("/sessions")).json()["items"] == []
    assert (await proxy.chat("t", "an agent's")).status_code == 200
    assert [item["trial_id"] for item in (await proxy.http.get("/sessions")).json()["items"]] == ["t"]


async def test_agents_and_pages_of_the_proxys_own_address_go_on_working(proxy: Proxy) -> None:
    body = json.dumps(CHAT).encode()
    for extra in (
        {},
        {"origin": proxy.url},
        {"sec-fetch-mode": "cors"},
        {"sec-fetch-site": "same-origin", "origin": proxy.url},
    ):
        answer = await proxy.http.post("/t/v1/chat/completions", content=body, headers=extra)  # no content-type at all
        assert answer.status_code == 200, answer.text
    assert (await said(proxy.port, b"GET /sessions HTTP/1.0\r\n")).startswith(b"HTTP/1.1 200")  # HTTP/1.0 needs no Host
    assert (await said(proxy.port, b"GET http://localhost/sessions HTTP/1.1\r\nhost: LOCALHOST.:8000\r\n")).startswith(
        b"HTTP/1.1 200"
    )


HEADS = (
    b"GET http://localhost/sessions HTTP/1.1\r\nhost: evil.example\r\n",
    b"GET /sessions HTTP/1.1\r\nhost: localhost\r\nHost: evil.example\r\n",
    b"GET /sessions HTTP/1.1\r\nHost: evil.example\r\nhost: localhost\r\n",
    b"GET /sessions HTTP/1.1\r\nhost: localhost@evil.example\r\n",
    b"GET /sessions HTTP/1.1\r\nhost: \r\n",
    b"GET /sessions HTTP/1.0\r\nhost: evil.example\r\n",
    b"GET /%73essions HTTP/1.1\r\nhost: evil.example\r\n",
    b"GET /healthz/../sessions HTTP/1.1\r\nhost: evil.example\r\n",
)


async def test_a_name_spelled_in_any_way_is_looked_at(proxy: Proxy) -> None:
    for head in HEADS:
        assert (await said(proxy.port, head)).startswith((b"HTTP/1.1 403", b"HTTP/1.1 400")), head


async def said(port: int, head: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + b"connection: close\r\n\r\n")
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


def socket_of(proxy: Proxy, **headers: str) -> Any:
    return connect(proxy.url.replace("http", "ws") + "/workers/connect", additional_headers=headers, compression=None)


@pytest.mark.parametrize("key", [None, "admin"])
async def test_a_page_becomes_no_worker_with_keys_or_without(key: str | None) -> None:
    given = {"admin_key": key} if key else {}
    async with running(**given) as proxy:
        shown = {"authorization": f"Bearer {key}"} if key else {}
        for origin in (EVIL, "null", proxy.url):
            with pytest.raises(InvalidStatus) as refused:
                await socket_of(proxy, origin=origin, **shown)
            assert refused.value.response.status_code == 403
            assert "Origin" in json.loads(refused.value.response.body)["error"]["message"]
        assert len((await proxy.http.get("/workers")).json()["items"]) == 1
        async with socket_of(proxy, **shown) as worker:
            await worker.send(encode_alone(Hello(1, 1, "second", "boot", [ModelCard("m", 100)], 4), 0))
            await until(lambda: len(proxy.app.state.hub.workers()) == 2)


async def test_a_socket_that_names_a_strangers_host_is_refused_without_keys(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    offer = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    offer += "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    writer.write(f"GET /workers/connect HTTP/1.1\r\nhost: evil.example\r\n{offer}\r\n".encode())
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 403") and b"allowed_hosts" in answer


async def test_with_keys_the_key_guards_and_any_page_that_has_one_may_ask() -> None:
    async with running(admin_key="admin") as proxy:
        trial = (await proxy.http.post("/sessions/t")).json()
        for page in PAGES:
            headers = page | {"authorization": f"Bearer {trial['api_key']}"}
            answer = await proxy.http.post("/t/v1/chat/completions", json=CHAT, headers=headers)
            assert answer.status_code == 200, page
            assert not [
                name for name in answer.headers if name.startswith("access-control")
            ]  # its page may not read it
            assert (await proxy.http.get("/sessions", headers=page)).status_code == 200
            async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as stranger:
                assert (await stranger.get("/sessions", headers=page)).status_code == 401


async def test_a_name_that_was_allowed_is_the_proxys_own() -> None:
    async with running(allowed_hosts=["host.docker.internal"]) as proxy:
        host = {"host": f"host.docker.internal:{proxy.port}"}
        trial = (await proxy.http.post("/sessions/t", headers=host)).json()
        assert trial["urls"]["openai"] == f"http://host.docker.internal:{proxy.port}/t/v1"
        own = host | {"origin": f"http://host.docker.internal:{proxy.port}"}
        assert (await proxy.http.post("/t/v1/chat/completions", json=CHAT, headers=own)).status_code == 200
        assert (await proxy.http.get("/sessions", headers=host | {"origin": proxy.url})).status_code == 403

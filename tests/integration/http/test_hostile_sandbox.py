"""A sandbox with one trial's key against a proxy as it runs (I8): real processes, real sockets, everything it can think of.

After each attempt: others are served, another trial's record is what it was, no key is in any log, each record of the log is
one line of ours, and the proxy is no larger than it may be.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import websockets.sync.client
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.support.stack import ROOT, Stack, running

ADMIN, WORKER = "ak-test-Zq81", "wk-test-Zq82"
SCRIPT = """
def say(request):
    slow = "SLOW" in str(request["messages"])
    return {"content": "one two three " * (400 if slow else 1)}
"""
CHAT = "/v1/chat/completions"
HTTP = httpx.Client(timeout=60)
"""Shared: a client of its own for each request would read the system's certificates each time."""
MOST_MB = 220
"""Of memory: what the proxy takes at rest, and what the largest bodies of these tests may add."""


class Target:
    """The proxy, and what the sandbox knows of it: its own trial `mine` and that trial's key."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.port, self.url = stack, stack.port, stack.url
        self.key = self.register("mine")
        self.victims_key = self.register("victim")
        assert self.ask("victim", self.victims_key, "a secret").status_code == 200
        self.victim = self.admin("/sessions/victim").json(), self.admin("/sessions/victim/turns").json()

    def admin(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        return HTTP.request(
            method, self.url + path, headers={"authorization": f"Bearer {ADMIN}"}, timeout=60, **options
        )

    def register(self, trial_id: str) -> str:
        return str(self.admin(f"/sessions/{trial_id}", "POST").raise_for_status().json()["api_key"])

    def ask(self, trial_id: str, key: str, text: str = "x", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}]} | fields
        headers = {"authorization": f"Bearer {key}"}
        return HTTP.post(f"{self.url}/{trial_id}{CHAT}", json=body, headers=headers, timeout=60)

    def connect(self, timeout_s: float = 30) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)

    def raw(self, data: bytes, *, half: bool = False, silence_s: float = 1.0) -> bytes:
        """What comes back for these bytes, until the proxy closes or has been silent for a while. half: we then say no more."""
        with self.connect() as client:
            found = b""
            with contextlib.suppress(ConnectionError, TimeoutError):
                client.sendall(data)
                if half:
                    client.shutdown(socket.SHUT_WR)
                client.settimeout(3)
                while piece := client.recv(65536):
                    found += piece
                    client.settimeout(silence_s)
            return found

    def head(self, path: str, method: str = "POST", trial_key: str | None = None) -> bytes:
        return f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {trial_key or self.key}\r\n".encode()

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.stack.folder.glob("*.log")))

    def check(self) -> None:
        """What is true after everything."""
        assert self.stack.proxy.poll() is None
        served = self.ask("mine", self.key, "still there?")
        assert served.status_code == 200, served.text
        assert self.victim == (self.admin("/sessions/victim").json(), self.admin("/sessions/victim/turns").json())
        assert [worker["id"] for worker in self.admin("/workers").json()["items"]] == ["w"]
        log = self.log()
        for key in (ADMIN, WORKER, self.key, self.victims_key):
            assert key not in log and key[-20:] not in log
        ours = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) [a-z]")
        for line in (self.stack.folder / "proxy.log").read_text(errors="replace").split("\n"):
            assert not line or ours.match(line), line
            assert line.isprintable(), ascii(line)
        assert "not foreseen" not in log and "Traceback" not in log
        status = Path(f"/proc/{self.stack.proxy.pid}/status").read_text()
        peak = next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        assert peak < MOST_MB, peak


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("hostile")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    flags = ["--admin-key", ADMIN, "--worker-key", WORKER, "--log-level", "debug", "--body-timeout-s", "2"]
    flags += ["--max-body-bytes", str(4 * 2**20)]
    with running(folder / "run", None, proxy=flags) as stack:
        stack.start_worker(
            *("--engine", "scripted", "--script", f"{script}:say", "--model", str(ROOT / "steno/models/tiny")),
            *("--key", WORKER, "--worker-id", "w"),
        )
        until = time.monotonic() + 120
        admin = {"authorization": f"Bearer {ADMIN}"}
        while not HTTP.get(stack.url + "/workers", headers=admin, timeout=30).json()["items"]:
            assert time.monotonic() < until, stack.logs()
            time.sleep(0.1)
        yield Target(stack)


@pytest.fixture(autouse=True)
def unharmed(proxy: Target) -> Iterator[None]:
    yield
    proxy.check()


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


# -- what its key opens


CONTROL = """GET /sessions|POST /sessions|GET /sessions/victim|GET /sessions/mine|POST /sessions/mine|DELETE /sessions/victim
DELETE /sessions/mine|GET /sessions/mine/turns|GET /sessions/victim/turns|GET /sessions/mine/samples|GET /sessions/mine/events
POST /sessions/mine/complete|POST /sessions/victim/complete|POST /sessions/mine/rotate-key|POST /groups|GET /groups/g
POST /leases|POST /leases/l/ack|POST /leases/l/release|POST /leases/l/extend|GET /runs/r|GET /workers|GET /policy
POST /policy/updates|GET /policy/updates/u|PUT /policy/updates/u/shards/s|DELETE /policy/updates/u|GET /metrics"""


@pytest.mark.parametrize("call", re.split(r"[|\n]", CONTROL))
def test_its_key_opens_nothing_of_the_control_plane(proxy: Target, call: str) -> None:
    method, path = call.split()
    body = {"reward": 1.0} if path.endswith("complete") else {}
    carried = [{"authorization": f"Bearer {proxy.key}"}, {"x-api-key": proxy.key}, {"x-goog-api-key": proxy.key}, {}]
    for headers in carried:
        for query in ("", f"?key={proxy.key}"):
            answer = HTTP.request(method, proxy.url + path + query, json=body, headers=headers, timeout=60)
            assert answer.status_code in (401, 403, 404, 405), (answer.status_code, answer.text)
            assert proxy.key not in answer.text and "a secret" not in answer.text
    assert proxy.admin("/sessions/mine").json()["status"] == "open"


def test_a_harness_key_made_of_its_own_opens_nothing(proxy: Target) -> None:
    for key in (
        proxy.key.replace("sk-", "hk-"),
        proxy.key.replace("sk-steno-", "sk-steno-2-"),
        proxy.key + "\x00",
        proxy.key[:-1],
        "",
        proxy.key.upper(),
        proxy.key + " " + ADMIN,
        "é",
        "Bearer " + proxy.key,
    ):
        for path in ("/sessions/mine", "/sessions/mine/turns", f"/victim{CHAT}"):
            answer = proxy.raw(f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode())
            assert statuses(answer)[0] in (400, 401, 403, 405), answer


NAMES = [
    "victim",
    "%76ictim",
    "mine/../victim",
    "mine/%2e%2e/victim",
    "mine%2f..%2fvictim",
    "/victim",
    "//victim",
    "./victim",
    "victim%00",
    "victim%20",
    "%20victim",
    "VICTIM",
    "mine;victim",
    "mine\\..\\victim",
    "victim%0d%0aHost:x",
    "%2576ictim",
    "mine%00victim",
    "%ef%bd%96%ef%bd%89%ef%bd%83%ef%bd%94%ef%bd%89%ef%bd%8d",
    "mine/v1/../../victim",
    "%c0%ae%c0%ae/victim",
    "mine,victim",
    "%ff",
    "victim%e2%80%8b",
    "http://127.0.0.1/victim",
    "mine%3fx%3d/victim",
    "..;/victim",
    "mine%23/victim",
    "%u0076ictim",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_spelling_of_another_trials_id_opens_it(proxy: Target, name: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "taken"}]}'
    length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
    for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1beta/models/m:generateContent"):
        answer = proxy.raw(proxy.head(f"/{name}{path}") + length + body)
        assert statuses(answer) and statuses(answer)[0] in (400, 401, 403, 404, 405), answer
        assert b"a secret" not in answer
    answer = proxy.raw(proxy.head(f"/{name}/v1/models", "GET") + b"connection: close\r\n\r\n")
    assert statuses(answer)[0] != 200, answer


def test_no_path_of_its_own_leads_out_of_its_trial(proxy: Target) -> None:
    for path in (
        "/mine/../sessions/victim",
        "/mine/v1/../../sessions",
        "/mine/v1/models/../../../sessions/victim",
        "/mine//sessions",
        "/mine/sessions/victim",
        "/mine/v1/models/%2e%2e/%2e%2e/%2e%2e/metrics",
        "/mine/v1/responses/..%2f..%2fsessions",
        "/mine/v1/responses/resp_victim",
        "/mine/metrics",
        "/mine/v1/v1/v1/models",
        "/mine/v1/chat/completions/../../../workers",
        "/mine/v1beta/models/../../../sessions:generateContent",
        "http://x/sessions",
        "*",
        "/%2fsessions",
        "/\\sessions",
    ):
        for method in ("GET", "POST", "DELETE", "PATCH", "TRACE", "CONNECT"):
            answer = proxy.raw(proxy.head(path, method) + b"content-length: 0\r\nconnection: close\r\n\r\n")
            assert not statuses(answer) or statuses(answer)[0] >= 400, (path, method, answer)


def test_another_trials_stored_response_is_not_read(proxy: Target) -> None:
    made = HTTP.post(
        f"{proxy.url}/mine/v1/responses", json={"input": "x"}, headers={"x-api-key": proxy.key}, timeout=60
    ).json()["id"]
    victim = proxy.register("other")
    for trial, key in (("other", victim), ("other", proxy.key), ("victim", proxy.key)):
        for method in ("GET", "DELETE"):
            answer = HTTP.request(
                method, f"{proxy.url}/{trial}/v1/responses/{made}", headers={"x-api-key": key}, timeout=60
            )
            assert answer.status_code in (403, 404)
    own = HTTP.get(f"{proxy.url}/mine/v1/responses/{made}", headers={"x-api-key": proxy.key}, timeout=60)
    assert own.status_code == 200


def test_the_workers_socket_does_not_take_its_key_nor_the_admins(proxy: Target) -> None:
    where = proxy.url.replace("http", "ws") + "/workers/connect"
    for headers in (
        {"authorization": f"Bearer {proxy.key}"},
        {"authorization": f"Bearer {ADMIN}"},
        {"x-api-key": WORKER},
        {},
    ):
        with (
            websockets.sync.client.connect(where, additional_headers=headers, open_timeout=60) as socket_,
            pytest.raises(ConnectionClosed),
        ):
            socket_.send(b"\x93\x01\x02\x03")
            for _ in range(5):
                socket_.recv(timeout=60)
        assert socket_.close_code in (4400, 4401)
    for path in (CHAT, "/v1/models", "/v1/messages"):
        with pytest.raises(InvalidStatus):
            websockets.sync.client.connect(
                f"{proxy.url.replace('http', 'ws')}/mine{path}",
                additional_headers={"authorization": f"Bearer {proxy.key}"},
            )


def test_a_key_in_the_query_opens_only_what_googles_clients_ask_for(proxy: Target) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert HTTP.post(f"{proxy.url}/mine{CHAT}?key={proxy.key}", json=body, timeout=60).status_code == 401
    gemini = {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}
    for trial, wanted in (("mine", 200), ("victim", 403)):
        url = f"{proxy.url}/{trial}/v1beta/models/m:generateContent?key={proxy.key}"
        assert HTTP.post(url, json=gemini, timeout=60).status_code == wanted


# -- framing


SMUGGLED = b"GET /sessions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + ADMIN.encode() + b"\r\n\r\n"
"""With the admin's key, so that whoever reads it as a request is found out."""
AMBIGUOUS = {
    "both": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, other order": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 0\r\ncontent-length: 200\r\n\r\n",
    "a list of lengths": b"content-length: 0, 200\r\n\r\n",
    "a signed length": b"content-length: +0\r\n\r\n",
    "a negative length": b"content-length: -1\r\n\r\n",
    "a length in hex": b"content-length: 0x0\r\n\r\n",
    "a huge length": b"content-length: 99999999999999999999999999\r\n\r\n",
    "an unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked not last": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "twice chunked": b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "a space before the colon": b"transfer-encoding : chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "a folded header": b"x-a: 1\r\n transfer-encoding: chunked\r\n\r\n",
    "a bad chunk": b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "a chunk larger than memory": b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    "a NUL": b"x-a: \x00\r\n\r\n",
    "a bare CR": b"x-a: 1\rtransfer-encoding: chunked\r\n\r\n",
    "no colon": b"nonsense\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_request_of_unclear_length_carries_no_other(proxy: Target, name: str) -> None:
    answer = proxy.raw(proxy.head("/mine" + CHAT) + AMBIGUOUS[name] + SMUGGLED)
    found = statuses(answer)
    assert all(status >= 400 for status in found), answer
    assert b"next_cursor" not in answer
    assert len(found) <= 1, answer  # and the connection is not gone on with


def test_two_keys_in_one_request_are_no_more_than_one(proxy: Target) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    rest = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
    for extra in (f"authorization: Bearer {proxy.victims_key}x", "x-api-key: no", "authorization: Basic x"):
        for path, status in (("/mine", 200), ("/victim", 403)):
            assert statuses(proxy.raw(proxy.head(path + CHAT) + extra.encode() + b"\r\n" + rest))[0] == status


def test_huge_and_countless_headers_are_refused(proxy: Target) -> None:
    for headers in (
        b"x-a: " + b"a" * 400_000,
        b"\r\n".join(b"x-%d: 1" % n for n in range(60_000)),
        b"a" * 400_000 + b": 1",
    ):
        assert statuses(proxy.raw(proxy.head("/mine" + CHAT) + headers + b"\r\n\r\n")) in ([400], [])
    assert statuses(proxy.raw(b"GET /" + b"a" * 400_000 + b" HTTP/1.1\r\n\r\n")) in ([400], [])


def test_many_requests_in_one_packet_are_answered_in_order_each_by_its_own_trial(proxy: Target) -> None:
    both = [proxy.head(f"/{trial}/v1/models", "GET") + b"\r\n" for trial in ("mine", "victim") * 25]
    found = statuses(proxy.raw(b"".join(both)))
    assert found == [200, 403] * 25


def test_who_asks_whether_to_go_on_is_told_or_refused(proxy: Target) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    asked = b"expect: 100-continue\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    assert statuses(proxy.raw(proxy.head("/mine" + CHAT) + asked % len(body) + body)) == [100, 200]
    assert statuses(proxy.raw(proxy.head("/mine" + CHAT) + asked % 2**40)) == [413]
    assert statuses(proxy.raw(proxy.head("/victim" + CHAT) + asked % 2**40)) == [403]
    assert statuses(proxy.raw(proxy.head("/mine" + CHAT) + asked % len(body), silence_s=20))[-1] == 408


def test_no_other_protocol_is_spoken(proxy: Target) -> None:
    for data in (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"\x00" * 5000,
        b"GET /\r\n\r\n",
        b"*1\r\n$8\r\nFLUSHALL\r\n",
        b"GET /sessions HTTP/9.9\r\n\r\n",
        b"\r\n" * 2000,
        b"EHLO x\r\n",
    ):
        assert all(status >= 400 for status in statuses(proxy.raw(data, half=True)))


# -- bodies


def bomb() -> bytes:
    return gzip.compress(b"[" * 50_000_000)


@pytest.mark.parametrize(
    "coding", ["gzip", "x-gzip", "deflate", "br", "zstd", "gzip, gzip", "identity, gzip", "GZIP", "compress"]
)
def test_compressed_bodies_are_refused_and_never_unpacked(proxy: Target, coding: str) -> None:
    data = zlib.compress(b"[" * 10**6) if coding == "deflate" else bomb()
    for path in (
        f"/mine{CHAT}",
        "/mine/v1/messages",
        "/mine/v1/responses",
        "/mine/v1beta/models/m:countTokens",
        "/sessions",
    ):
        headers = {"authorization": f"Bearer {proxy.key}", "content-encoding": coding}
        answer = HTTP.post(proxy.url + path, content=data, headers=headers, timeout=60)
        assert answer.status_code in (400, 403), (path, answer.status_code)


def user(content: str) -> str:
    return f'{{"messages": [{{"role": "user", "content": {content}}}]}}'


def asked(**fields: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "x"}]} | fields)


def image(url: str) -> str:
    return user(json.dumps([{"type": "image_url", "image_url": {"url": url}}]))


BODIES = [
    "[" * 1_000_000,
    '{"a":' * 300_000,
    user("[" * 5000 + "]" * 5000),
    user('"\\ud800"'),
    user('"\\u0000"'),
    user("1e400"),
    user("9" * 5000),
    user("NaN"),
    user('"' + "\\u202e" * 1000 + '"'),
    user('"x", "role": "assistant"'),
    asked().replace('"x"', '"x"}], "n": ' + "9" * 4000 + ', "a": [{"b": 1'),
    asked(max_tokens=-1),
    asked(max_tokens=1e308),
    asked(seed=2**70),
    asked(n=2147483648),
    asked(model="m" * 10**6),
    asked(stop=["s"] * 100_000),
    asked(messages=[{"role": "user"}] * 100_000),
    asked(messages=[{"role": "\x1b[31m\nadmin", "content": "x"}]),
    asked(**{"\x1b[2J\n": 1}),
    user(json.dumps([{"type": "\x1b[31m\n2026 INFO", "x": 1}])),
    asked(tools=[{"type": "\n\x1b[1m2026-01-01 00:00:00,000 INFO x"}]),
    '{"__proto__": {}, "messages": {"$ref": "#"}}',
    image("file:///etc/passwd"),
    image("http://169.254.169.254/latest"),
]
GENERATES = (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1beta/models/m:generateContent")
COUNTS = ("/v1/messages/count_tokens", "/v1beta/models/m:countTokens", "/v1/responses/input_tokens")


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_no_body_is_a_surprise(proxy: Target, number: int) -> None:
    text = BODIES[number]
    for path in (*GENERATES, *COUNTS):
        answer = HTTP.post(f"{proxy.url}/mine{path}", content=text, headers={"x-api-key": proxy.key}, timeout=120)
        assert answer.status_code < 500, (path, answer.status_code, answer.text[:300])
        assert len(answer.content) < 100_000


def test_slow_bodies_are_cut_off_and_hold_up_nobody(proxy: Target) -> None:
    clients = [proxy.connect() for _ in range(50)]
    for client in clients:
        client.sendall(proxy.head("/mine" + CHAT) + b"content-length: 1000\r\n\r\n{")
    assert proxy.ask("mine", proxy.key).status_code == 200
    for client in clients:
        with contextlib.suppress(ConnectionError):
            client.sendall(b" ")
        assert client.recv(4096).startswith(b"HTTP/1.1 408")
        client.close()


# -- connections


def test_thousands_of_connections_that_say_nothing_or_little(proxy: Target) -> None:
    clients = []
    try:
        for number in range(3000):
            clients.append(proxy.connect())
            if number % 3:
                clients[-1].sendall(b"POST /mine/v1/chat/completions HTTP/1.1\r\nx-a: " if number % 3 == 1 else b"G")
        assert proxy.ask("mine", proxy.key).status_code == 200
    finally:
        for client in clients:
            client.close()


def test_streams_that_nobody_reads_or_that_are_torn_down_end(proxy: Target) -> None:
    trial, body = (
        proxy.register("torn"),
        json.dumps({"messages": [{"role": "user", "content": "SLOW"}], "stream": True}).encode(),
    )
    clients = []
    for number in range(40):
        client = proxy.connect()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(proxy.head("/torn" + CHAT, trial_key=trial) + b"content-length: %d\r\n\r\n" % len(body) + body)
        if number % 4 == 1:
            client.shutdown(socket.SHUT_WR)
        elif number % 4 == 2:
            client.recv(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            client.close()
        clients.append(client)
    assert proxy.ask("mine", proxy.key).status_code == 200
    for client in clients:
        client.close()
    until = time.monotonic() + 60
    while proxy.admin("/workers").json()["items"][0]["in_flight"]:
        assert time.monotonic() < until, "a stream that nobody reads goes on"
        time.sleep(0.1)


# -- logs


def test_nothing_that_it_sends_makes_a_line_of_the_log_its_own(proxy: Target) -> None:
    evil = "x\n2026-01-01 00:00:00,000 INFO proxy.api session victim ended\x1b[31m\u202e\u2028"
    for name in (quote(evil, safe=""), "%0a%0d%1b%5b31m", "%e2%80%ae", "%c2%85", "a" * 5000):
        for path in (
            CHAT,
            "/v1/models",
            "/v1/responses/%0aINFO%1b",
            "/v1beta/models/%0aevil:generateContent",
            "/v1/models/%0a%1b",
        ):
            for trial in (name, "mine"):
                proxy.raw(
                    proxy.head(f"/{trial}{path}", "GET" if "models/" in path else "POST") + b"connection: close\r\n\r\n"
                )
    headers = {
        "authorization": f"Bearer {proxy.key}",
        "user-agent": "\x1b[31mevil",
        "x-request-id": "\x1b[2J",
        "x-forwarded-for": "evil",
    }
    body = {"messages": [{"role": "user", "content": "x"}], "model": evil, "user": evil, "stop": evil, evil: evil}
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    HTTP.post(f"{proxy.url}/mine{CHAT}", json=body, headers=raw, timeout=60)
    HTTP.post(
        f"{proxy.url}/mine{CHAT}",
        json={"messages": body["messages"], "tools": [{"type": evil}]},
        headers=raw,
        timeout=60,
    )
    log = proxy.log()
    assert "\x1b" not in log and "\u202e" not in log and "\u2028" not in log
    assert not re.search(r"^2026-01-01 00:00:00,000", log, re.MULTILINE)


def test_many_at_once_try_everything_while_others_work(proxy: Target) -> None:
    failures: list[str] = []

    def attack(number: int) -> None:
        for name in NAMES[number::4]:
            proxy.raw(proxy.head(f"/{name}{CHAT}") + b"content-length: 2\r\nconnection: close\r\n\r\n{}")
        for kind in list(AMBIGUOUS.values())[number::4]:
            proxy.raw(proxy.head("/mine" + CHAT) + kind + SMUGGLED)

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    trial = proxy.register("busy")
    for number in range(20):
        answer = proxy.ask("busy", trial, f"turn {number}")
        if answer.status_code != 200:
            failures.append(answer.text)
    for thread in threads:
        thread.join()
    assert not failures
    assert proxy.admin("/sessions/busy").json()["counts"]["turns"] == 20

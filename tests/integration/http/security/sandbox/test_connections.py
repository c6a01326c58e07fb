"""Many connections, readers that do not read, what reaches the log and the metrics, and all of it at once."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from urllib.parse import quote

from tests.integration.http.security.sandbox.conftest import CHAT, HTTP, NAMES, Target
from tests.integration.http.security.sandbox.test_framing import AMBIGUOUS, SMUGGLED


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


def test_nothing_that_it_sends_makes_a_line_of_the_log_its_own(proxy: Target) -> None:
    evil = "x\n2026-01-01 00:00:00,000 INFO steno_proxy.api session victim ended\x1b[31m\u202e\u2028"
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


def test_no_name_that_it_makes_up_is_a_series_of_the_metrics(proxy: Target) -> None:
    def series() -> set[str]:
        lines = proxy.admin("/metrics").text.splitlines()
        return {line.rpartition(" ")[0] for line in lines if line.startswith("steno_")}

    def say(word: str) -> None:
        item = {"type": word, "text": "x"}
        headers = {
            "x-api-key": proxy.key,
            "user-agent": word,
            "x-stainless-lang": word,
            "x-stainless-retry-count": word,
        }
        body = {
            "messages": [{"role": "user", "content": [item, {"type": "text", "text": "x"}]}],
            "model": word,
            "user": word,
        }
        HTTP.post(f"{proxy.url}/mine{CHAT}", json=body, headers=headers)
        HTTP.post(
            f"{proxy.url}/mine{CHAT}", json=body | {"messages": [{"role": word, "content": "x"}]}, headers=headers
        )
        HTTP.post(f"{proxy.url}/mine/v1/responses", json={"input": [item], "tools": [item]}, headers=headers)
        HTTP.post(f"{proxy.url}/mine/v1/messages", json=body | {"max_tokens": 1, "tools": [item]}, headers=headers)
        HTTP.post(f"{proxy.url}/mine/v1beta/models/{word}:{word}", json={}, headers=headers)
        HTTP.request(word.upper()[:8], f"{proxy.url}/mine/{word}", headers=headers)

    for n in range(60):  # more than are counted by their names
        say(f"made.up.{n}")
    before = series()
    for n in range(60, 100):
        say(f"made.up.{n}")
    assert series() == before
    assert len(before) < 2000


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

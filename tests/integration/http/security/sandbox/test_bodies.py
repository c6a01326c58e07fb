"""Bodies that unpack, recurse, count or name what they should not, and those that never come."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from typing import Any

import pytest

from tests.integration.http.security.sandbox.conftest import ADMIN, CHAT, HTTP, Target


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


def tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


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
    image("gopher://127.0.0.1:6379/_FLUSHALL"),
    image("http://127.0.0.1:6379/" + "a" * 100_000),
    user(json.dumps("a" * 1_000_000)),
    user(json.dumps("\u0301" * 200_000)),
    asked(stop=["a" * 1_000_000]),
    asked(stop=["(a+)+$", "^(a|a)*b"]),
    asked(n=10**9, best_of=10**9, top_logprobs=10**9, logprobs=True),
    asked(logit_bias={str(n): 1 for n in range(50_000)}),
    asked(temperature=1e300, top_p=-1e300, top_k=2**40, min_p=1e300),
    asked(previous_response_id="resp_" + "x" * 100_000),
    asked(metadata={f"k{n}": "v" * 100 for n in range(10_000)}, user="u" * 10**6),
    asked(chat_template="{{ ''.__class__.__mro__ }}", chat_template_kwargs={"chat_template": "x", "tools": 1}),
    asked(tools=[tool({"$ref": "#"})], tool_choice="required"),
    asked(tools=[tool({"$ref": "file:///etc/passwd"})], tool_choice="required"),
    asked(tools=[tool(nested(90))], tool_choice="required"),
    asked(tools=[tool({"type": "object"}, name="f" * 10**6)]),
    asked(tools=[tool({"type": "object"}, name=f"f{n}") for n in range(10_000)]),
    asked(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": "(a+)+$"}}}),
    asked(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"minItems": 10**18}}}),
    asked(reasoning_effort="x" * 10**6, service_tier="\x1b", stream_options={"include_usage": "\n"}),
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


def test_what_is_taken_can_be_read_in_every_view(proxy: Target) -> None:
    """Numbers and depths on both sides of what a record holds."""
    mine = {"x-api-key": proxy.register("deep")}
    taken = []
    for depth in (100, 101, 130):
        inner = nested(depth)
        function = {"name": "f", "parameters": inner}
        bodies: dict[str, dict[str, Any]] = {
            CHAT: {"messages": [{"role": "user", "content": "x"}], "tools": [tool(inner)]},
            "/v1/responses": {"input": "x", "metadata": inner, "tools": [{"type": "function", **function}]},
            "/v1/messages": {
                "messages": [{"role": "user", "content": "x"}], "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": inner}],
            },
            "/v1beta/models/m:generateContent": {
                "contents": [{"parts": [{"text": "x"}]}], "tools": [{"functionDeclarations": [function]}]
            },
        }  # fmt: skip
        found = [
            HTTP.post(f"{proxy.url}/deep{path}", json=body, headers=mine, timeout=60) for path, body in bodies.items()
        ]
        assert {answer.status_code for answer in found} == {200 if depth == 100 else 400}, [x.text[:200] for x in found]
        assert depth == 100 or all("nested deeper than 200" in answer.text for answer in found)
        taken += [answer for answer in found if answer.status_code == 200]
    for number, status in ((2**64 - 1, 200), (2**64, 400), (-(2**63), 200), (-(2**63) - 1, 400)):
        body = {"input": "x", "metadata": {"n": number}}
        answer = HTTP.post(f"{proxy.url}/deep/v1/responses", json=body, headers=mine, timeout=60)
        assert answer.status_code == status and (status == 200 or "metadata" in answer.text), answer.text
        taken += [answer] if status == 200 else []
    for kind in ("application/json", "application/msgpack"):
        read = {"authorization": f"Bearer {ADMIN}", "accept": kind}
        turns = HTTP.get(f"{proxy.url}/sessions/deep/turns", headers=read).raise_for_status()
        assert HTTP.get(f"{proxy.url}/sessions/deep/samples", headers=read).raise_for_status()
        if kind == "application/json":
            assert len(turns.json()["items"]) == len(taken) == 6


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

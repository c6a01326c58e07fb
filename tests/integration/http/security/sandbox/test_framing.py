"""Requests that two parsers would read in two ways, and what is no request at all."""

from __future__ import annotations

import pytest

from tests.integration.http.security.sandbox.conftest import ADMIN, CHAT, Target, statuses

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
    found = statuses(proxy.raw(b"".join(both), answers=50))
    assert found == [200, 403] * 25


def test_who_asks_whether_to_go_on_is_told_or_refused(proxy: Target) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    asked = b"expect: 100-continue\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    assert statuses(proxy.raw(proxy.head("/mine" + CHAT) + asked % len(body) + body, answers=2)) == [100, 200]
    assert statuses(proxy.raw(proxy.head("/mine" + CHAT) + asked % 2**40)) == [413]
    assert statuses(proxy.raw(proxy.head("/victim" + CHAT) + asked % 2**40)) == [403]
    assert statuses(proxy.raw(proxy.head("/mine" + CHAT) + asked % len(body), answers=2))[-1] == 408


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


BODY = b'{"messages": [{"role": "user", "content": "x"}]}'


def test_a_head_that_names_another_method_address_or_caller_changes_nothing(proxy: Target) -> None:
    rest = b"content-length: 0\r\nconnection: close\r\n\r\n"
    for name in ("x-http-method-override", "x-http-method", "x-method-override"):
        answer = proxy.raw(proxy.head("/sessions/victim") + f"{name}: DELETE\r\n".encode() + rest)
        assert statuses(answer) == [403], answer
    for line in (
        "x-original-url: /sessions",
        "x-rewrite-url: /sessions",
        "x-forwarded-prefix: /sessions",
        "x-forwarded-for: 127.0.0.1\r\nx-forwarded-host: evil\r\nforwarded: for=127.0.0.1",
        "x-forwarded-user: admin\r\nx-remote-user: admin",
    ):
        for path, wanted in (("/sessions", 403), ("/victim/v1/models", 403), ("/mine/v1/models", 200)):
            answer = proxy.raw(proxy.head(path, "GET") + line.encode() + b"\r\n" + rest)
            assert statuses(answer) == [wanted] and b"next_cursor" not in answer and b"evil" not in answer


def test_a_client_of_http_1_0_is_answered_once_and_its_connection_closed(proxy: Target) -> None:
    old = proxy.head("/mine" + CHAT).replace(b"HTTP/1.1", b"HTTP/1.0")
    length = b"content-length: %d\r\n\r\n" % len(BODY)
    assert statuses(proxy.raw(old + length + BODY)) == [200]
    assert statuses(proxy.raw(old + b"connection: keep-alive\r\n" + length + BODY + SMUGGLED)) == [200]
    assert statuses(proxy.raw(old.replace(b"/mine", b"/victim") + length + BODY)) == [403]


def test_extensions_and_trailers_of_chunks_say_nothing(proxy: Target) -> None:
    head = proxy.head("/victim" + CHAT) + b"transfer-encoding: chunked\r\n\r\n"
    chunk = b"%x;authorization=x\r\n%s\r\n" % (len(BODY), BODY)
    for trailer in (f"authorization: Bearer {proxy.victims_key}", f"x-api-key: {ADMIN}", "host: y"):
        assert statuses(proxy.raw(head + chunk + b"0\r\n" + trailer.encode() + b"\r\n\r\n"))[0] == 403
    own = proxy.head("/mine" + CHAT) + b"transfer-encoding: chunked\r\n\r\n"
    one_by_one = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    assert statuses(proxy.raw(own + one_by_one + b"0\r\n\r\n")) == [200]
    endless = own + chunk + b"0\r\nx: " + b"y" * 3_000_000
    assert statuses(proxy.raw(endless)) in ([400], [])


def test_an_offer_of_another_protocol_carries_nothing_past_the_key(proxy: Target) -> None:
    socket_ = (
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: " + b"A" * 22
    )
    for method in ("GET", "POST", "PUT"):
        for path in ("/mine" + CHAT, "/workers/connect", "/sessions"):
            for rest in (b"", b"content-length: %d\r\n" % len(SMUGGLED), b"x: y\r\n" * 300):
                answer = proxy.raw(proxy.head(path, method) + socket_ + b"==\r\n" + rest + b"\r\n" + SMUGGLED)
                assert b"next_cursor" not in answer, answer
                assert len(statuses(answer)) <= 1, answer
    offer = (
        b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\ncontent-length: 0\r\n\r\n"
    )
    assert statuses(proxy.raw(proxy.head("/sessions", "GET") + offer)) == [403]
    assert statuses(proxy.raw(proxy.head("/mine/v1/models", "GET") + offer)) == [200]

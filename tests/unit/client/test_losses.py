"""The REST client where something between it and the proxy fails, or the archive: nothing is left out, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from steno.client import client as client_module
from steno.client.client import AsyncClient, Client
from steno.client.transport import EventLines
from steno.contracts.errors import ArchiveUnreadable, BadRequest, ProtocolError, StenoError, Unreachable
from steno.contracts.runs.leases import RunView
from tests.support.records.recordings import session

pytestmark = pytest.mark.usefixtures("pauses")

NO_PAGE = {"items": [], "next_cursor": None}


def page(*trials: str, unreadable: tuple[str, ...] = ()) -> httpx.Response:
    items = [session(trial).model_dump(mode="json") for trial in trials]
    return httpx.Response(200, json={"items": items, "next_cursor": None, "unreadable": list(unreadable)})


async def listed(kind: type[Client] | type[AsyncClient], answers: list[httpx.Response]) -> list[str]:
    transport = httpx.MockTransport(lambda request: answers.pop(0))
    if kind is Client:
        return [found.trial_id for found in Client("http://proxy", transport=transport).sessions()]
    async with AsyncClient("http://proxy", transport=transport) as client:
        return [found.trial_id async for found in client.sessions()]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_sessions_that_the_archive_can_not_give_are_not_left_out(
    kind: type[Client] | type[AsyncClient], pauses: list[float]
) -> None:
    with pytest.raises(ArchiveUnreadable, match=r"can't be read now: old\.1, old\.2; each says why") as caught:
        await listed(kind, [page("new", unreadable=("old.1", "old.2")) for _ in range(3)])
    assert len(pauses) == 2 and caught.value.retryable
    assert await listed(kind, [page("new", unreadable=("old",)), page("new", "old")]) == ["new", "old"]


async def test_of_many_that_can_not_be_read_the_first_are_named() -> None:
    with pytest.raises(ArchiveUnreadable, match=r": t0, .*, t19 and 80 more; "):
        await listed(Client, [page(unreadable=tuple(f"t{n}" for n in range(100))) for _ in range(3)])


@pytest.mark.parametrize("status", [408, 502, 503, 504, 520, 521, 522, 523, 524])
def test_what_a_load_balancer_answers_for_the_proxy_is_tried_again(status: int, pauses: list[float]) -> None:
    answers = [httpx.Response(status, text="<html>"), httpx.Response(200, json=NO_PAGE)]
    client = Client("http://proxy", transport=httpx.MockTransport(lambda request: answers.pop(0)))
    assert client.session_page().items == [] and pauses == [1.0]


LATIN_1 = '{"error": {"message": "indisponible: réseau"}}'.encode("latin-1")


def test_a_gateways_json_that_is_no_utf_8_is_tried_again(pauses: list[float]) -> None:
    answers = [httpx.Response(502, content=LATIN_1), httpx.Response(200, json=NO_PAGE)]
    client = Client("http://proxy", transport=httpx.MockTransport(lambda request: answers.pop(0)))
    assert client.session_page().items == [] and pauses == [1.0]


@pytest.mark.parametrize("kind", ["application/json", "application/msgpack"])
def test_an_answer_that_is_no_utf_8_is_none_of_stenos(kind: str) -> None:
    content = b"\xa1\xe9" if kind == "application/msgpack" else LATIN_1
    answer = httpx.Response(200, content=content, headers={"content-type": kind})
    with pytest.raises(ProtocolError, match="not an answer of a Steno proxy"):
        Client("http://proxy", transport=httpx.MockTransport(lambda request: answer)).session("t")


@pytest.mark.parametrize(
    "said",
    [
        "502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout",
        r"404 Not Found \(not in Steno's words: is this the URL of a proxy\?\)",
    ],
)  # fmt: skip
def test_a_gateways_own_page_is_no_answer_of_the_proxy(said: str, pauses: list[float]) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(int(said[:3]), text="<html>"))
    with pytest.raises(Unreachable, match=f"no answer from the proxy: HTTP {said}"):
        Client("http://proxy", transport=transport).session("t")
    assert len(pauses) > 1


def test_another_status_that_says_nothing_is_not_tried_again(pauses: list[float]) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(501, text="<html>"))
    with pytest.raises(StenoError):
        Client("http://proxy", transport=transport).session("t")
    assert pauses == []


WHOLE = 'id: 1\ndata: {"type": "turn"}\n\n'
NEXT = 'id: 2\ndata: {"type": "completed"}\n\n'


@pytest.mark.parametrize("length", range(len(NEXT)))
def test_an_event_that_was_cut_comes_whole_after_the_connection_is_made_again(length: int) -> None:
    """Wherever the stream ends: the last event is asked for again, and what came of it is forgotten."""
    cursors: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        cursors.append(request.headers.get("last-event-id"))
        text = WHOLE + NEXT[:length] if len(cursors) == 1 else NEXT
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    client = Client("http://proxy", transport=httpx.MockTransport(handler))
    assert list(client.events("t")) == [("1", {"type": "turn"}), ("2", {"type": "completed"})]
    assert cursors == [None, "1"]


def test_the_cursor_moves_once_an_event_is_whole() -> None:
    lines = EventLines(None)
    events: list[Any] = [lines.feed(line) for line in ("id: 7", 'data: {"type":')]
    assert events == [None, None] and "last-event-id" not in lines.headers()
    events = [lines.feed(line) for line in ("id: 7", 'data: {"type":', 'data: "turn"}', "")]
    assert events[-1] == ("7", {"type": "turn"}) and lines.headers()["last-event-id"] == "7"


ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj"
"""What Python takes for ends of lines. JSON may hold most of them as they are."""


class InPieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, data: bytes, size: int) -> None:
        self._pieces = [data[at : at + size] for at in range(0, len(data), size)]

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
async def test_an_events_text_may_have_other_ends_of_lines_in_it(size: int, end: str) -> None:
    event = {"type": "aborted", "end_reason": ODD}
    sent = f"id: 1\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".replace("\n", end).encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=InPieces(sent, size)))
    assert list(Client("http://proxy", transport=transport, retries=0).events("t")) == [("1", event)]
    async with AsyncClient("http://proxy", transport=transport, retries=0) as client:
        assert [found async for found in client.events("t")] == [("1", event)]


@pytest.mark.parametrize("text", ["{", "[1]", "completed"])
async def test_an_event_that_is_none_is_an_error_of_the_protocol(text: str) -> None:
    sent = f"id: 1\ndata: {text}\n\n".encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=sent))
    with pytest.raises(ProtocolError, match="not an event of a Steno proxy"):
        list(Client("http://proxy", transport=transport, retries=0).events("t"))
    async with AsyncClient("http://proxy", transport=transport, retries=0) as client:
        with pytest.raises(ProtocolError, match="not an event of a Steno proxy"):
            _ = [found async for found in client.events("t")]


def test_an_event_that_is_none_is_asked_for_again_and_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module.time, "sleep", lambda _: None)
    asked: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("last-event-id"))
        first = b'id: 6\ndata: {"type":"turn"}\n\n' if len(asked) == 1 else b""
        return httpx.Response(200, content=first + b"id: 7\ndata: {\n\n")

    with pytest.raises(ProtocolError, match="not an event of a Steno proxy"):
        list(Client("http://proxy", transport=httpx.MockTransport(answer), retries=1).events("t"))
    assert asked == [None, "6"]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_an_older_proxy_is_asked_without_the_parameter_that_it_does_not_know(
    kind: type[Client] | type[AsyncClient],
) -> None:
    """Proxies are replaced one by one, and launchers may come first. Any other refusal stays one."""
    asked: list[str] = []
    refused = "ledger"

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.query.decode())
        if not request.url.query:
            return httpx.Response(200, json={"run_id": "r"})
        said = {"message": "unknown query parameter", "code": "bad_request", "field": refused}
        return httpx.Response(400, json={"error": said})

    async def run() -> RunView:
        client = kind("http://proxy", transport=httpx.MockTransport(answer), retries=0)
        found = client.run("r", ledger=False)
        return found if isinstance(found, RunView) else await found

    assert (await run()).run_id == "r" and asked == ["ledger=false", ""]
    refused = "other"
    with pytest.raises(BadRequest):
        await run()
    assert len(asked) == 3

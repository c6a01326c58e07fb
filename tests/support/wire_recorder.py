"""Stands between agents and the proxy, passes everything on, and remembers what was asked (`tests/wire`).

`Stack` puts one before its proxy where `STENO_TEST_RECORD_WIRE` names a folder. When the stack ends, what each trial sent is
written there, by the trial's name, without prose, keys and what changes with each run. Where an answer broke off, what its client
had of it is written too, so that a replay can break off there.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from steno.contracts.records import RESERVED_TRIAL_IDS
from steno_proxy.api.agents.generation import DIALECTS
from steno_proxy.dialects.base import Dialect
from steno_proxy.dialects.gemini.dialect import GeminiDialect
from tests.wire.filler import texts_in, without_prose
from tests.wire.fixture import Answer, Exchange, Recording, named, write

VARIABLE = "STENO_TEST_RECORD_WIRE"
MEANT = frozenset(
    "accept content-type anthropic-version anthropic-beta openai-beta x-app x-stainless-retry-count".split()
)
"""Headers that are kept with their values."""
CLOSING = frozenset({"content_block_stop", "response.output_item.done"})
"""Events after which a client has a block of an answer whole."""
_HOP = frozenset({"host", "connection", "keep-alive", "transfer-encoding", "content-length"})
_BEYOND = frozenset({"authorization", "x-api-key", "x-goog-api-key"}) | _HOP
_FOLDER = re.compile(r"/tmp/pytest-of-[^/\"\\]+/pytest-\d+/[^/\"\\]+")


@dataclass
class _Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    answer: bytes = b""


class WireRecorder:
    """A context: from its start it listens on `port` of 127.0.0.1 and passes on to `target_port`."""

    def __init__(self, target_port: int) -> None:
        self._seen: list[_Seen] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(target_port, self._seen.append))
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> WireRecorder:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def write(self, folder: Path, turns_of: Callable[[str], list[dict[str, Any]]]) -> None:
        """turns_of: a trial's turns, as the REST API gives them."""
        trials: dict[str, list[_Seen]] = {}
        for seen in self._seen:
            trial = seen.path.split("/")[1]
            if trial not in RESERVED_TRIAL_IDS and trial != "probe":
                trials.setdefault(trial, []).append(seen)
        for trial, requests in trials.items():
            turns = turns_of(trial)
            if turns:
                folder.mkdir(parents=True, exist_ok=True)
                write(Recording("", "", exchanges(trial, requests, turns)), folder / f"{trial}.jsonl")


def exchanges(trial: str, requests: list[_Seen], turns: list[dict[str, Any]]) -> list[Exchange]:
    """The requests of one trial as a fixture holds them."""
    turns = json.loads(_FOLDER.sub("/tmp/agent", json.dumps(turns, ensure_ascii=False)))
    by_id = {turn["turn_id"]: turn for turn in turns}
    answered: dict[str, int] = {}
    for n, seen in enumerate(requests):
        turn_id = next(
            (i for i in re.findall(r"[0-9a-f]{12}", seen.answer.decode("utf-8", "replace")) if i in by_id), None
        )
        if turn_id is not None:
            answered.setdefault(turn_id, n)
    # A failure in one piece names no turn: such requests and the turns that broke are in the same order.
    failed = (n for n, seen in enumerate(requests) if seen.status >= 500)
    for turn in turns:
        if turn["partial"] and turn["turn_id"] not in answered and (n := next(failed, None)) is not None:
            answered[turn["turn_id"]] = n
    of_request = {n: by_id[turn_id] for turn_id, n in answered.items()}
    ours = {text for turn in turns for text in _said(turn["reply"])}
    found = []
    for n, seen in enumerate(requests):
        body = None
        if seen.body:
            text = _FOLDER.sub("/tmp/agent", json.dumps(json.loads(seen.body), ensure_ascii=False))
            body = without_prose(json.loads(named(text, answered)), ours)
        headers = {k: v if k in MEANT else "" for k, v in sorted(seen.headers.items()) if k not in _BEYOND}
        path = re.sub(r"([?&])key=[^&]*&?", r"\1", seen.path.replace(f"/{trial}/", "/{trial}/", 1))
        events = _events(seen.answer)
        answer = _answer(of_request[n], answered, events) if n in of_request else None
        dropped = _dialect(of_request[n]["dialect"]).parse(seen.body).dropped if n in of_request else []
        found.append(Exchange(trial, seen.method, path, headers, body, seen.status, events, sorted(dropped), answer))
    return found


def _said(reply: dict[str, Any]) -> set[str]:
    """The texts that the script said, those inside the arguments of calls too, and both in one, as gptme keeps them."""
    said = {text for key in ("content", "reasoning_content") if (text := reply.get(key))}
    if thought := reply.get("reasoning_content"):
        said.add(f"<think>\n{thought}\n</think>\n\n{reply['content']}".strip())
    for call in reply.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        said.add(arguments)
        with contextlib.suppress(ValueError):  # a script may say what is no JSON
            said |= texts_in(json.loads(arguments))
    return said


def _answer(turn: dict[str, Any], numbers: dict[str, int], events: list[str]) -> Answer:
    reply = turn["reply"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in reply.get("tool_calls", [])]
    parent = numbers[turn["parent_id"]] if turn["parent_id"] else None
    closed = turn["partial"] and not CLOSING.isdisjoint(events)
    return Answer(
        parent, turn["fork_reason"], turn["finish_reason"], reply["content"], reply.get("reasoning_content", ""), calls,
        closed, numbers[turn["retry_of"]] if turn["retry_of"] else None,
    )  # fmt: skip


def _dialect(name: str) -> Dialect:
    return next(dialect for dialect in (*DIALECTS, GeminiDialect()) if dialect.name == name)


def _events(answer: bytes) -> list[str]:
    """`event:` names, else the shapes of `data:` lines: their top-level keys."""
    kinds: dict[str, None] = {}
    for line in answer.decode("utf-8", "replace").split("\n"):
        if line.startswith("event: "):
            kinds[line[7:]] = None
        elif line.startswith("data: {") and '"type":' not in line[:40]:
            kinds[" ".join(json.loads(line[6:]))] = None
    return list(kinds)


def _handler(target_port: int, saw: Callable[[_Seen], None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are remembered, not printed."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen = _Seen(self.command, self.path, headers, body)
            saw(seen)
            onward = http.client.HTTPConnection("127.0.0.1", target_port, timeout=300)
            with contextlib.closing(onward):
                sent = {name: value for name, value in headers.items() if name not in _HOP}
                onward.request(self.command, self.path, body or None, sent)
                self._pass_back(onward.getresponse(), seen)

        do_GET = do_DELETE = do_POST

        def _pass_back(self, answer: http.client.HTTPResponse, seen: _Seen) -> None:
            seen.status = answer.status
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            try:
                while piece := answer.read1(65536):
                    seen.answer += piece
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
            except (http.client.HTTPException, ConnectionError):
                self.close_connection = True  # what broke on one side breaks on the other

    return Handler

"""Serves the page `/ui` over a file of turns, to this machine: the proxy's own page, and the routes that it reads.

A page of the web may have a browser ask this server too, so it answers only to a name of this machine, and to no other page.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from steno.config.settings import is_loopback
from steno.contracts.errors import CannotListen
from steno_cli.recorded.texts_file import TextsFile
from steno_cli.recorded.turn_file import TurnFile
from steno_proxy.viewer.assets import assets

_JSON = {"content-type": "application/json", "x-content-type-options": "nosniff", "cache-control": "no-store"}


class RecordedServer(ThreadingHTTPServer):
    """Args: title: what the page says that it shows. Raises: CannotListen."""

    daemon_threads = True

    def __init__(self, file: TurnFile, texts: TextsFile, title: str, port: int = 0) -> None:
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise CannotListen("--port", "127.0.0.1", port, error) from None
        self.file, self.texts, self.title = file, texts, title
        self.reading = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/ui/"


class _Handler(BaseHTTPRequestHandler):
    server: RecordedServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self._is_ours():
            self._json(
                403, {"error": {"code": "forbidden", "message": "this server answers to 127.0.0.1 and its own page"}}
            )
            return
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        match words:
            case [""]:
                self._to("/ui/")
            case ["ui"]:
                self._asset("index.html") if parts.path.endswith("/") else self._to("/ui/")
            case ["ui", "static", name]:
                self._asset(name)
            case ["ui", "state"]:
                self._json(200, {"keys": False, "reads": True, "version": self.server.title, "live": False})
            case ["sessions"]:
                self._json(200, self._list(query))
            case ["sessions", trial_id] if trial_id in self.server.file.sessions:
                self._json(200, self.server.file.sessions[trial_id].record)
            case ["sessions", trial_id, "turns"] if trial_id in self.server.file.sessions:
                self._json(200, self._turns(trial_id, query))
            case ["workers", "tokenizers"]:
                self._json(200, {"items": self.server.texts.tokenizers})
            case ["workers", "tokenizers", key] if (line := self.server.texts.line(key)) is not None:
                self._send(200, _JSON, line)
            case _:
                self._json(404, {"error": {"code": "not_found", "message": f"{parts.path[:100]} is not in this file"}})

    def _list(self, query: dict[str, str]) -> dict[str, Any]:
        wanted = {name: query[name] for name in ("status", "group_id", "run_id") if name in query}
        records = [one.record for one in self.server.file.sessions.values()]
        found = [record for record in records if all(record[name] == value for name, value in wanted.items())]
        found.sort(key=lambda record: record["created_at"], reverse=query.get("order") == "newest")
        start, limit = _number(query, "cursor", 0), _number(query, "limit", 100)
        after = start + limit
        return {
            "items": found[start:after],
            "next_cursor": str(after) if after < len(found) else None,
            "unreadable": [],
        }

    def _turns(self, trial_id: str, query: dict[str, str]) -> dict[str, Any]:
        start, limit = _number(query, "start", 0), _number(query, "limit", 100)
        with self.server.reading:
            items = self.server.file.turns(trial_id, start, limit)
        after = start + len(items)
        more = items and after < self.server.file.sessions[trial_id].record["counts"]["turns"]
        return {"items": items, "next_start": after if more else None}

    def _is_ours(self) -> bool:
        host = urlsplit(f"//{self.headers.get('host', '')}").hostname or ""
        return is_loopback(host) and self.headers.get("sec-fetch-site", "none") in ("none", "same-origin")

    def _asset(self, name: str) -> None:
        found = assets().get(name)
        if found is None:
            self._json(404, {"error": {"code": "not_found", "message": "no such file"}})
        else:
            self._send(200, found.headers, found.body)

    def _to(self, where: str) -> None:
        self._send(307, {"location": where}, b"")

    def _json(self, status: int, body: Any) -> None:
        self._send(status, _JSON, json.dumps(body).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not told: the terminal says where the page is."""


def _number(query: dict[str, str], name: str, default: int) -> int:
    value = query.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else default

"""An OpenAI-compatible upstream that says how many images it was shown, and keeps what it was sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Seeing:
    """requests: the bodies that came, in order."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.url = ""


@contextmanager
def seeing() -> Iterator[Seeing]:
    upstream = Seeing()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: what came is in `requests`."""

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            upstream.requests.append(body)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for chunk in chunks(body):
                self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    upstream.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield upstream
    finally:
        server.shutdown()
        server.server_close()


def chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parts = [
        part for message in body["messages"] if isinstance(message.get("content"), list) for part in message["content"]
    ]
    images = sum(part["type"] == "image_url" for part in parts)
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    delta = {"role": "assistant", "content": f"I see {images}"}
    yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    yield head | {
        "choices": [],
        "usage": {"prompt_tokens": 100 * images + 7, "completion_tokens": 3, "total_tokens": 10},
    }

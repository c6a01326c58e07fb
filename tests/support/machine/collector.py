"""An OTLP/HTTP receiver as collectors are: it decodes each request's protobuf, and answers what a test tells it."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.programs.ports import free_port


class Collector:
    """Listens from `__enter__` on, at the same port when it is entered again. spans: as they came; status: what it answers."""

    def __init__(self) -> None:
        self.port, self.status = free_port(), 200
        self.spans: list[Span] = []
        self.headers: list[dict[str, str]] = []
        self.services: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Collector:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = collector.status  # one for both: what is answered 200 was taken
                collector.take(self.path, dict(self.headers.items()), body, status)
                said = ExportTraceServiceResponse().SerializeToString()
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, path: str, headers: dict[str, str], body: bytes, status: int) -> None:
        lower = {name.lower(): value for name, value in headers.items()}
        self.headers.append(lower | {":path": path})
        if status != 200:
            return
        raw = gzip.decompress(body) if lower.get("content-encoding") == "gzip" else body
        for of_resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            self.services |= {
                pair.value.string_value for pair in of_resource.resource.attributes if pair.key == "service.name"
            }
            self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]

    def named(self, start: str) -> list[Span]:
        return [span for span in self.spans if span.name.startswith(start)]


def attributes(span: Any) -> dict[str, Any]:
    """Of a span, an event or a link."""
    return {pair.key: _value(pair.value) for pair in span.attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None

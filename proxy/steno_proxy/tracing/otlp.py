"""Spans over OTLP/HTTP, by OpenTelemetry's own exporter."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from steno_proxy.tracing.exporter import UNSENT

PATH = "/v1/traces"


def url_of(endpoint: str) -> str:
    """Where traces go under a base URL; one that names them already is taken as it is."""
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith(PATH) else endpoint + PATH


class CountingSession(requests.Session):
    """Counts what it was asked to send."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def request(self, *given: Any, **named: Any) -> requests.Response:
        self.asked += 1
        return super().request(*given, **named)


class OtlpExporter:
    """Args: endpoint: base URL, as of OTEL_EXPORTER_OTLP_ENDPOINT. timeout_s: of one `send`, repeated attempts included."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self._session = CountingSession()
        self._session.hooks["response"].append(self._answered)
        self._status, self._closed = 0, False
        # What it would say of each attempt, we say once (`traces.py`).
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(
            url_of(endpoint),
            headers=dict(headers),
            timeout=timeout_s,
            compression=Compression.Gzip,
            session=self._session,
        )

    def _answered(self, response: requests.Response, **_: object) -> None:
        self._status = response.status_code

    def send(self, spans: Sequence[ReadableSpan]) -> int | None:
        """As `exporter.Exporter`."""
        self._status, asked = 0, self._session.asked
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            return None
        # It has made no request: what it was given is more than 64 MiB, or can't be encoded.
        return UNSENT if self._session.asked == asked and not self._closed else self._status

    def close(self) -> None:
        self._closed = True
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

"""What was seen, on its way to a collector: a bounded queue, and a thread that makes spans of it and sends them.

Who hands something over pays for an append. Nothing waits for the collector: while it is away the newest stay in the queue, and
what finds no room is counted. Spans are made in the thread, a few at a time, so that streams have their turn in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from steno.config.extras import how_to_install, missing
from steno.contracts.errors import ConfigError, StenoError
from steno.contracts.records import Session, Turn
from steno_proxy import metrics
from steno_proxy.config.settings import ProxySettings
from steno_proxy.tracing.exporter import UNSENT, Exporter
from steno_proxy.tracing.seen import Seen, SeenEnd, SeenRefusal, SeenTurn, TurnMove

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

MOST_WAITING = 8192
"""Turns and sessions that wait for the collector. With content, as much memory as their messages take."""
AT_ONCE = 64
"""Spans in one request."""
EVERY_S = 1.0
"""Between two looks at the queue."""
AGAIN_S = 5.0
"""Before spans that were not taken are sent again."""
TRIES = 3
"""Attempts in a row for one request; then other spans go first."""
SEND_S = 10.0
"""Seconds that one request may take."""
FINAL = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
"""Statuses after which the same spans would be refused again."""


class WaitingSpan(NamedTuple):
    """What a span will be made of. failed_at: how many requests had been taken when the last one with this span failed."""

    seen: Seen
    failed_at: int | None = None


class Traces:
    """Hands over from the event loop; sends from a thread of its own, from `start` to `close`."""

    def __init__(self, exporter: Exporter, *, content: bool = False, most: int = MOST_WAITING) -> None:
        self._exporter, self._content, self._most = exporter, content, most
        self._waiting: deque[WaitingSpan] = deque()
        self._requests_taken = 0
        self._some, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="steno-traces", daemon=True)
        self._away = False

    def start(self) -> None:
        self._thread.start()

    def close(self, wait_s: float = 5.0) -> None:
        """Send what waits, for so long; count the rest as dropped."""
        self._stop.set()
        self._some.set()
        self._thread.join(wait_s)
        self._exporter.close()
        self._thread.join(1.0)
        metrics.TRACE_SPANS.labels("dropped").inc(len(self._waiting))

    # -- handed over, from the event loop

    def turn(self, session: Session, turn: Turn, *, traceparent: str = "", moves: Sequence[TurnMove] = ()) -> None:
        """A turn is on record."""
        self._add(SeenTurn(session, turn, traceparent, tuple(moves)))

    def ended(self, session: Session) -> None:
        """A session has ended. The same again is the same span again."""
        self._add(SeenEnd(session))

    def refused(self, session: Session, error: StenoError, at: float) -> None:
        """A request was refused with nothing on record. Args: at: Unix seconds, by the clock that stamps turns."""
        self._add(SeenRefusal(session, at, error.status, error.code, error.message))

    def _add(self, seen: Seen) -> None:
        self._waiting.append(WaitingSpan(seen))
        if len(self._waiting) > self._most:
            try:
                self._waiting.popleft()
            except IndexError:  # the thread was faster
                return
            metrics.TRACE_SPANS.labels("dropped").inc()
        elif not self._some.is_set():
            self._some.set()

    # -- the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            self._some.wait()
            self._stop.wait(EVERY_S)
            self._some.clear()
            self._send_all()

    def _send_all(self) -> None:
        while batch := list(self._taken()):
            made = list(self._spans(batch))
            if not made:
                continue
            status = self._try([span for _, span in made])
            if status is None:
                self._requests_taken += 1
                metrics.TRACE_SPANS.labels("sent").inc(len(made))
                if self._away:
                    self._away = False
                    log.info("the collector takes spans again")
            elif status == UNSENT or status in FINAL:
                why = "spans can't be sent" if status == UNSENT else f"the collector refused spans with status {status}"
                self._say(f"{why}; they are dropped")
                metrics.TRACE_SPANS.labels("refused").inc(len(made))
            elif self._stop.is_set():
                metrics.TRACE_SPANS.labels("dropped").inc(len(made))
                return
            else:
                self._put_back([waiting for waiting, _ in made])

    def _try(self, spans: Sequence[ReadableSpan]) -> int | None:
        """As `Exporter.send`, TRIES times where it may help."""
        for _ in range(TRIES):
            status = self._exporter.send(spans)
            if status is None or status == UNSENT or status in FINAL:
                break
            self._say(f"the collector does not take spans ({status or 'no answer'}); they are sent again")
            if self._stop.wait(AGAIN_S):
                break
        return status

    def _put_back(self, failed: Iterable[WaitingSpan]) -> None:
        """Queue failed spans again, behind the others. A span that failed before counts as refused, if the collector has taken
        another request since: the collector is up, and refuses this span."""
        for seen, failed_at in failed:
            if failed_at is not None and failed_at < self._requests_taken:
                metrics.TRACE_SPANS.labels("refused").inc()
            elif len(self._waiting) >= self._most:  # these are the oldest
                metrics.TRACE_SPANS.labels("dropped").inc()
            else:
                self._waiting.append(WaitingSpan(seen, self._requests_taken))

    def _taken(self) -> Iterator[WaitingSpan]:
        for _ in range(AT_ONCE):
            try:
                yield self._waiting.popleft()
            except IndexError:
                return

    def _spans(self, batch: Sequence[WaitingSpan]) -> Iterator[tuple[WaitingSpan, ReadableSpan]]:
        for waiting in batch:
            try:
                yield waiting, self._span(waiting.seen)
            except Exception:  # recorded: one that can't be shown must not hold back the others
                metrics.TRACE_SPANS.labels("dropped").inc()
                log.exception("can't make a span of a turn or a session")
            time.sleep(0)  # lets go of the interpreter's lock

    def _span(self, seen: Seen) -> ReadableSpan:
        from steno_proxy.tracing import spans  # imports the SDK, which only those have who trace

        if not hasattr(self, "_resource"):
            self._resource = spans.resource()
        return spans.span_of(seen, self._resource, content=self._content)

    def _say(self, what: str) -> None:
        if not self._away:
            self._away = True
            log.warning(
                "traces: %s (logged once until the collector takes spans again; see steno_proxy_trace_spans_total)",
                what,
            )


def open_traces(settings: ProxySettings) -> Traces | None:
    """None: nobody asked for traces. Raises: ConfigError: what they need is not installed."""
    if settings.otel_endpoint is None:
        return None
    if missing(("opentelemetry",)) or missing(("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")):
        raise ConfigError(
            f"otel_endpoint: opentelemetry's SDK and OTLP exporter are not installed: {how_to_install('otel')}",
            field="otel_endpoint",
        )
    from steno_proxy.tracing.otlp import OtlpExporter

    exporter: Any = OtlpExporter(settings.otel_endpoint, settings.trace_headers, SEND_S)
    return Traces(exporter, content=settings.otel_content)

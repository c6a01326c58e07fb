"""Metrics of a worker. Each is declared once, with help that says how to read it.

`relay_seconds / tokens` is what the relay costs per token beside the engine.
"""

from __future__ import annotations

import socket
from collections import Counter as Counts
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from steno_worker.interfaces import TokenTally

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
"""From a toy model's pause to a large one's load."""


class WorkerMetrics:
    """The worker's metrics. One set per registry: a process has one, a test as many as it starts workers.

    Attributes:
        tally: the engine's counts of sampled and unsent tokens, which `flush` adds to the counters.
        ready: the engine is up. Until then /metrics answers 503, since readiness probes call it.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self._exposition = make_wsgi_app(registry)
        self.streams = Gauge(
            "steno_worker_streams", "Generations now on this worker, of all proxies", registry=registry
        )
        self.connected = Gauge(
            "steno_worker_proxies",
            "Proxies with an open socket; if fewer than configured: look at the log",
            registry=registry,
        )
        self.generations = Counter(
            "steno_worker_generations_total", "Generations by how they ended: a finish reason, or an error's code",
            ["end"], registry=registry,
        )  # fmt: skip
        self.tokens = Counter(
            "steno_worker_tokens_total", "Sampled tokens sent; its rate is throughput", registry=registry
        )
        self.sampled = Counter(
            "steno_worker_sampled_tokens_total",
            "Tokens that the engine sampled. With no generation running: those sent and those unsent together",
            registry=registry,
        )
        self.unsent = Counter(
            "steno_worker_unsent_tokens_total",
            "Tokens sampled and not sent, by reason: `cancelled` before they were taken, `after_end`: the rest of a step after a "
            "stop string, `withheld`: the weights had not passed the probe when the generation ended, `failed`: unreadable",
            ["why"], registry=registry,
        )  # fmt: skip
        self.unacknowledged = Counter(
            "steno_worker_unacknowledged_tokens_total",
            "Tokens sent on channels that were lost before the proxy had acknowledged them: it lacks at most these",
            registry=registry,
        )
        self.deltas = Counter(
            "steno_worker_deltas_total", "Deltas sent; tokens per delta grow with an engine's step", registry=registry
        )
        self.packets = Counter(
            "steno_worker_packets_total",
            "Packets written; deltas per packet is how well they coalesce",
            registry=registry,
        )
        self.resent = Counter(
            "steno_worker_resent_packets_total", "Packets written again after a lost socket", registry=registry
        )
        self.reconnects = Counter(
            "steno_worker_reconnects_total",
            "Sockets opened after the first; a steady rate means a bad network",
            registry=registry,
        )
        self.channels_lost = Counter(
            "steno_worker_channels_lost_total", "Channels that were lost, by reason; their generations were cancelled",
            ["code"], registry=registry,
        )  # fmt: skip
        self.stalls = Counter(
            "steno_worker_credit_stalls_total", "Times a generation waited for a slow reader", registry=registry
        )
        self.relay_seconds = Counter(
            "steno_worker_relay_seconds_total", "CPU time in the relay; divided by tokens: the relay's cost per token",
            registry=registry,
        )  # fmt: skip
        self.engine_up = Gauge(
            "steno_worker_engine_up", "1 while the engine can generate, 0 once it is dead", registry=registry
        )
        self.updates = Counter(
            "steno_worker_updates_total",
            "Policy updates by how they ended here: served, or an error's code; gone_back: after a failed update the worker "
            "serves the weights of before again",
            ["end"], registry=registry,
        )  # fmt: skip
        self.update_pause = Histogram(
            "steno_worker_update_pause_seconds", "How long sampling paused while an update was loaded",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.update_load = Histogram(
            "steno_worker_update_load_seconds", "From being told to apply an update to serving it, its probe included",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.staged_bytes = Counter(
            "steno_worker_staged_bytes_total", "Bytes of weights read or received, and checked", ["transport"],
            registry=registry,
        )  # fmt: skip
        self.weights_proved = Gauge(
            "steno_worker_weights_proved",
            "1 while the loaded weights are those of the version that is announced; 0: a probe or a load failed",
            registry=registry,
        )
        self.weights_proved.set(1)
        self.ready = False
        self.tally = TokenTally()
        self._told = TokenTally()
        self._tokens = self._deltas = 0
        self._relay_s = 0.0

    def bind(self, host: str, port: int) -> WSGIServer:
        """What serves /metrics, once its `serve_forever` runs. Raises: OSError."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)

        class Server(ThreadingWSGIServer):
            address_family = found[0][0]

        return make_server(host, port, self._answer, Server, _SilentHandler)

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if not self.ready:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"the engine is not up yet\n"]
        answer: Iterable[bytes] = self._exposition(environ, start_response)
        return answer

    def sent(self, tokens: int) -> None:
        """Count one sent delta. Summed up here until `flush`: a counter's lock would cost more than all else in sending it."""
        self._tokens += tokens
        self._deltas += 1

    def spent(self, seconds: float) -> None:
        self._relay_s += seconds

    def flush(self, packets: int) -> None:
        """Add the sums to the counters. Called after each write to a socket. Args: packets: how many were written."""
        self.packets.inc(packets)
        self.tokens.inc(self._tokens)
        self.deltas.inc(self._deltas)
        self.relay_seconds.inc(self._relay_s)
        self.sampled.inc(self.tally.sampled - self._told.sampled)
        for why, count in (self.tally.unsent - self._told.unsent).items():
            self.unsent.labels(why).inc(count)
        self._told = TokenTally(self.tally.sampled, Counts(self.tally.unsent))
        self._tokens = self._deltas = 0
        self._relay_s = 0.0


class _SilentHandler(WSGIRequestHandler):
    """A scrape is no line of the log."""

    def log_message(self, format: str, *args: Any) -> None: ...

"""What the proxy counts. Each metric is declared once, with help that says how to read it; labels are bounded (never a trial).

Counters grow where things happen; gauges of what is (workers, streams, cached trees) are set when they are scraped.
"""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

REQUESTS = Counter(
    "steno_proxy_requests_total", "Requests on the generation routes, by how they were answered; 499: the client left",
    ["dialect", "status"],
)  # fmt: skip
TURNS = Counter(
    "steno_proxy_turns_total", "Turns committed, by how they ended; cancelled and error are partial turns",
    ["dialect", "finish"],
)  # fmt: skip
PROMPT_TOKENS = Counter("steno_proxy_prompt_tokens_total", "New prompt tokens recorded (after what a turn continues)")
COMPLETION_TOKENS = Counter("steno_proxy_completion_tokens_total", "Sampled tokens recorded; its rate is throughput")
CONSTRAINED_TOKENS = Counter(
    "steno_proxy_constrained_tokens_total", "Sampled tokens drawn under a bent law or a grammar: recorded, never trained"
)
UNRECORDED_TOKENS = Counter(
    "steno_proxy_unrecorded_tokens_total", "Sampled tokens that no record holds, by why; anything but 0 wants a look",
    ["reason"],
)  # fmt: skip
RECOGNISED = Counter(
    "steno_proxy_recognised_total", "Turns by whether they continue a recorded one: `continued`, `root`, or a fork reason",
    ["dialect", "how"],
)  # fmt: skip
RETRIES = Counter(
    "steno_proxy_retries_total",
    "Requests that their client marked as retries: `joined` one that runs, `replayed` a recorded answer, `superseded` a turn "
    "that broke (never trained), or `new`: nothing on record to repeat, as after a 429 or 503",
    ["dialect", "how"],
)  # fmt: skip
DROPPED = Counter(
    "steno_proxy_dropped_items_total",
    "Items left out of requests because their type is not known; the log names the types, which want support",
    ["dialect"],
)  # fmt: skip
TTFT = Histogram(
    "steno_proxy_first_token_seconds", "From the request's arrival to its first token at the proxy", ["dialect"],
    buckets=_SECONDS,
)  # fmt: skip
COMMIT = Histogram(
    "steno_proxy_commit_seconds", "Time a turn's commit took; the last event of an answer waits for it", buckets=_SECONDS
)
STORE_ERRORS = Counter(
    "steno_proxy_store_errors_total", "Calls of the store that failed, by what was being done; agents saw these", ["call"]
)
STREAMS = Gauge("steno_proxy_streams", "Turns in flight now")
WORKERS = Gauge("steno_proxy_workers", "Workers connected now")
MODELS = Gauge("steno_proxy_models", "Models that some worker can serve now; 0 answers every request with 503")
TREES = Gauge("steno_proxy_trees", "Sessions whose conversation tree is in memory")
TREE_BYTES = Gauge("steno_proxy_trees_bytes", "Memory of those trees, about")


def exposition(registry: CollectorRegistry = REGISTRY) -> bytes:
    """The text that Prometheus scrapes."""
    return generate_latest(registry)

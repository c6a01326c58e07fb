"""What the proxy counts. Each metric is declared once, with help that says how to read it; labels are bounded (never a trial).

Counters grow where things happen; gauges of what is (workers, streams, cached trees) are set when they are scraped.

What to draw of them, and when somebody should look, is in scripts/panels.py.
"""

from __future__ import annotations

import re

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

REQUESTS = Counter(
    "steno_proxy_requests_total", "Requests on the generation routes, by how they were answered; 499: the client left",
    ["dialect", "status"],
)  # fmt: skip
REFUSED_KEYS = Counter(
    "steno_proxy_refused_keys_total",
    "Requests refused because they had no key, or one without access to the route; plane: `agents` (their routes) or `control`",
    ["plane"],
)  # fmt: skip
TURNS = Counter(
    "steno_proxy_turns_total", "Turns committed, by how they ended; cancelled and error are partial turns",
    ["dialect", "finish"],
)  # fmt: skip
PROMPT_TOKENS = Counter("steno_proxy_prompt_tokens_total", "New prompt tokens recorded (after what a turn continues)")
COMPLETION_TOKENS = Counter("steno_proxy_completion_tokens_total", "Sampled tokens recorded; its rate is throughput")
CONSTRAINED_TOKENS = Counter(
    "steno_proxy_constrained_tokens_total",
    "Sampled tokens drawn under a sampling law that is not plain, or a grammar: recorded, never trained",
)
UNRECORDED_TOKENS = Counter(
    "steno_proxy_unrecorded_tokens_total", "Sampled tokens that are in no record, by reason; above 0: look at the log",
    ["reason"],
)  # fmt: skip
TRACE_SPANS = Counter(
    "steno_proxy_trace_spans_total",
    "OpenTelemetry spans (`otel_endpoint`): `sent`, `refused` (by the collector, or too large), or `dropped` because the "
    "collector was away for too long",
    ["outcome"],
)  # fmt: skip
RECEIVED_TOKENS = Counter(
    "steno_proxy_received_tokens_total",
    "Sampled tokens that came from workers. With no turn in flight, the sum of recorded (without text-only), unrecorded and late",
)
LATE_TOKENS = Counter(
    "steno_proxy_late_tokens_total",
    "Sampled tokens that arrived after their turn was cancelled (the agent had left). They are in no record",
)
CHANNELS = Counter(
    "steno_proxy_worker_channels_total",
    "What happened to channels of workers: `new`, `resumed` after a lost socket, `lost` (their turns go on elsewhere), `refused` "
    "(a wrong key, a taken name: the log says which); `protocol_error`: the worker broke the protocol, and was refused or lost",
    ["how"],
)
RECOGNISED = Counter(
    "steno_proxy_recognised_total", "Turns by whether they continue a recorded one: `continued`, `root`, or a fork reason",
    ["dialect", "how"],
)  # fmt: skip
ECHOES = Counter(
    "steno_proxy_echoes_total",
    "Replies that clients sent back changed and that were recognised, by the change: `beginning`: only the beginning of a turn "
    "that was cut off, `call_ids`: calls rewritten under our ids, `calls`: calls without the text beside them, `reasoning`: "
    "reasoning put into the text, between tags, `space`: other white space around the text, `split`: in several messages",
    ["dialect", "how"],
)  # fmt: skip
RETRIES = Counter(
    "steno_proxy_retries_total",
    "Requests that their client marked as retries: `joined` a running request, `replayed` a recorded answer, `superseded` a "
    "turn that broke (never trained), or `new`: nothing on record to repeat, as after a 429 or 503",
    ["dialect", "how"],
)  # fmt: skip
FAILOVERS = Counter(
    "steno_proxy_failovers_total",
    "Turns whose worker was lost or gave up: `moved` before anything was sampled, `taken_over` from the last token, `restarted` "
    "before the client got anything; or given up: `not_resumable` (a grammar, penalties over the output), `no_worker` to go on",
    ["how"],
)  # fmt: skip
DROPPED = Counter(
    "steno_proxy_dropped_items_total",
    "Items left out of requests because the proxy does not support their type. `other`: after 32 types, or odd names",
    ["dialect", "type"],
)  # fmt: skip
TTFT = Histogram(
    "steno_proxy_first_token_seconds", "From the request's arrival to its first token at the proxy", ["dialect"],
    buckets=_SECONDS,
)  # fmt: skip
COMMIT = Histogram(
    "steno_proxy_commit_seconds",
    "Time a turn's commit took; the last event of an answer waits for it",
    buckets=_SECONDS,
)
STORE_ERRORS = Counter(
    "steno_proxy_store_errors_total",
    "Failed calls to the store, by call; the agents got errors",
    ["call"],
)
POLICY_UPDATE = Histogram(
    "steno_proxy_policy_update_seconds", "From the posting of a policy update to its end, by how it ended",
    ["transport", "state"], buckets=_SECONDS,
)  # fmt: skip
POLICY_PAUSE = Histogram(
    "steno_proxy_policy_pause_seconds", "How long a worker's generations paused while it loaded new weights",
    ["transport"], buckets=_SECONDS,
)  # fmt: skip
POLICY_STAGED = Counter(
    "steno_proxy_policy_staged_bytes_total",
    "Bytes of new weights that workers said they hold, all workers together; each replica counts what it is told",
    ["transport"],
)
POLICY_UPLOADED = Counter(
    "steno_proxy_policy_uploaded_bytes_total",
    "Bytes of weights that trainers uploaded here; several times a model's size: sent again, after cuts or to late workers",
)
BEHIND = Gauge(
    "steno_proxy_workers_behind", "Workers that get no turns of a policy until they serve its version in force"
)
UNSOUND = Counter(
    "steno_proxy_unsound_turns_total",
    "Turns for which a worker sent invalid data: a log-probability that can't be one, an id outside the vocabulary, the digest "
    "of another prompt, more tokens than asked for. Invalid data is never recorded; the log names the worker",
)
SUSPECT = Gauge(
    "steno_proxy_workers_suspect",
    "Workers that sent invalid data for turns of several trials: new turns go to other workers while others can take them",
)
LEASES = Counter(
    "steno_proxy_leases_total",
    "Leases of groups: `granted` a first time, `returned`: granted again after a release or a lease that ran out, "
    "`acknowledged`, `released`, `refused`: acknowledged by a trainer that had lost it",
    ["how"],
)  # fmt: skip
READY_SECONDS = Histogram(
    "steno_proxy_group_ready_seconds",
    "From the time a group is ready to its first lease; a rise means that trainers can't keep up",
    buckets=(0.1, 1, 5, 15, 60, 300, 900, 3600, 14400),
)
LEASE_SECONDS = Histogram(
    "steno_proxy_lease_seconds",
    "From a lease to its acknowledgement: the group's time in the trainer. Keep `ttl_s` well above it",
    buckets=(1, 5, 15, 60, 300, 900, 3600, 14400),
)
GROUPS = Gauge(
    "steno_proxy_groups",
    "Training groups in hand, of all runs, by state: `running`, `ready` or `leased`. Replicas say the same: take the largest",
    ["state"],
)  # fmt: skip
ACCEPT_FAILURES = Counter(
    "steno_proxy_accept_failures_total",
    "Times that connections had to wait because no file descriptor was free; above 0: raise the limit of open files, or have "
    "fewer connections",
)
STORE_FULLNESS = Gauge(
    "steno_proxy_store_fullness_ratio",
    "Share of Redis' `maxmemory` in use (of its machine's memory, if `maxmemory` is 0). From 0.7 on, ended sessions that no "
    "group needs and that await no reward go to the archive at once; from 0.8 on, new trials are refused and running ones go on",
)
ARCHIVED_SESSIONS = Counter(
    "steno_proxy_archived_sessions_total", "Ended sessions that this replica moved from Redis to the archive"
)
ARCHIVED_BYTES = Counter(
    "steno_proxy_archived_bytes_total", "Bytes in the archive of the sessions that this replica moved there"
)
ARCHIVE_ERRORS = Counter(
    "steno_proxy_archive_errors_total",
    "Rounds of archiving that failed, and sessions that could not be archived: all of it is still in Redis. The log says why",
)
STREAMS = Gauge("steno_proxy_streams", "Turns in flight now")
WORKERS = Gauge("steno_proxy_workers", "Workers connected now")
MODELS = Gauge("steno_proxy_models", "Models that a worker can serve now; at 0 every request gets 503")
TREES = Gauge("steno_proxy_trees", "Sessions whose conversation tree is in memory")
TREE_BYTES = Gauge("steno_proxy_trees_bytes", "Bytes of the conversation trees in memory, roughly")


_TYPE = re.compile(r"[a-z][a-z0-9_.-]{0,39}")
MOST_TYPES = 32
"""Of dropped items, in a dialect. Clients make the names up, and a label must not grow with what they say."""
_types: dict[str, set[str]] = {}


def dropped(dialect: str, types: list[str]) -> None:
    """Count items of unknown types that were left out of a request."""
    known = _types.setdefault(dialect, set())
    for name in types:
        if name not in known and (len(known) >= MOST_TYPES or not _TYPE.fullmatch(name)):
            name = "other"
        known.add(name)
        DROPPED.labels(dialect, name).inc()


def exposition(registry: CollectorRegistry = REGISTRY) -> bytes:
    """The text that Prometheus scrapes."""
    return generate_latest(registry)

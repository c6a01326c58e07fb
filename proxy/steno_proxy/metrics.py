"""What the proxy counts. Each metric is declared once, with help that says how to read it; labels are bounded (never a trial).

Counters grow where things happen; gauges of what is (workers, streams, cached trees) are set when they are scraped.

`PANELS` says what to draw of them, and when somebody should look. It is part of docs/metrics.md.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

REQUESTS = Counter(
    "steno_proxy_requests_total", "Requests on the generation routes, by how they were answered; 499: the client left",
    ["dialect", "status"],
)  # fmt: skip
REFUSED_KEYS = Counter(
    "steno_proxy_refused_keys_total",
    "Requests without a key, or with one that does not open what they asked for: of the `agents`' routes, or of the `control` "
    "plane",
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
    "Sampled tokens drawn under a bent law or a grammar: recorded, never trained",
)
UNRECORDED_TOKENS = Counter(
    "steno_proxy_unrecorded_tokens_total", "Sampled tokens that no record holds, by why; anything but 0 wants a look",
    ["reason"],
)  # fmt: skip
RECEIVED_TOKENS = Counter(
    "steno_proxy_received_tokens_total",
    "Sampled tokens that came from workers. With no turn in flight: recorded (but text-only ones), unrecorded and late together",
)
LATE_TOKENS = Counter(
    "steno_proxy_late_tokens_total",
    "Sampled tokens that came after their turn had been cancelled: on their way when an agent left. No record holds them",
)
RECOGNISED = Counter(
    "steno_proxy_recognised_total", "Turns by whether they continue a recorded one: `continued`, `root`, or a fork reason",
    ["dialect", "how"],
)  # fmt: skip
ECHOES = Counter(
    "steno_proxy_echoes_total",
    "Replies that came back written otherwise and were recognised all the same, by what: `beginning` of a turn that was cut off, "
    "`call_ids`: its calls rewritten under our ids, `calls`: its calls without the text beside them, `reasoning`: its reasoning "
    "put into its text, between tags, `space`: other white space around its text, `split`: in several messages",
    ["dialect", "how"],
)  # fmt: skip
RETRIES = Counter(
    "steno_proxy_retries_total",
    "Requests that their client marked as retries: `joined` one that runs, `replayed` a recorded answer, `superseded` a turn "
    "that broke (never trained), or `new`: nothing on record to repeat, as after a 429 or 503",
    ["dialect", "how"],
)  # fmt: skip
FAILOVERS = Counter(
    "steno_proxy_failovers_total",
    "Turns whose worker was lost or gave up: `moved` before anything was sampled, `taken_over` from the last token, `restarted` "
    "with nothing told yet; or broken: `not_resumable` (a grammar, penalties over the output), `no_worker` that could go on",
    ["how"],
)  # fmt: skip
DROPPED = Counter(
    "steno_proxy_dropped_items_total",
    "Items left out of requests because their type is not known; the types want support. `other`: more than a few of them",
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
    "Calls of the store that failed, by what was being done; agents saw these",
    ["call"],
)
POLICY_UPDATE = Histogram(
    "steno_proxy_policy_update_seconds", "From the posting of a policy update to its end, by how it ended",
    ["transport", "state"], buckets=_SECONDS,
)  # fmt: skip
POLICY_PAUSE = Histogram(
    "steno_proxy_policy_pause_seconds", "How long a worker's generations stood still while it took on new weights",
    ["transport"], buckets=_SECONDS,
)  # fmt: skip
POLICY_STAGED = Counter(
    "steno_proxy_policy_staged_bytes_total",
    "Bytes of new weights that workers said they hold, all workers together; each replica counts what it is told",
    ["transport"],
)
POLICY_UPLOADED = Counter(
    "steno_proxy_policy_uploaded_bytes_total",
    "Bytes of weights that trainers uploaded to this proxy; several times a model's size is re-sent after cuts, or late workers",
)
BEHIND = Gauge(
    "steno_proxy_workers_behind", "Workers that get no turns of a policy until they serve its version in force"
)
UNSOUND = Counter(
    "steno_proxy_unsound_turns_total",
    "Turns of which a worker said what can't be: a log-probability that is none, an id beyond the vocabulary, the digest of "
    "another prompt, more tokens than asked for. Nothing of that goes on record; the log says which worker",
)
SUSPECT = Gauge(
    "steno_proxy_workers_suspect",
    "Workers whose new turns go to others, while others can take them, after several unsound turns of several trials",
)
LEASES = Counter(
    "steno_proxy_leases_total",
    "Leases of groups: `granted` a first time, `returned`: granted again after a release or a lease that ran out, "
    "`acknowledged`, `released`, `refused`: acknowledged by a trainer that had lost it",
    ["how"],
)  # fmt: skip
READY_SECONDS = Histogram(
    "steno_proxy_group_ready_seconds",
    "From a group's getting ready to its first lease; a rise means that trainers can't keep up",
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
    "Times that connections had to wait since no file descriptor was left for one more; anything but 0 wants a higher limit, or "
    "fewer connections",
)
STORE_FULLNESS = Gauge(
    "steno_proxy_store_fullness_ratio",
    "Memory of Redis in use, of its `maxmemory` (of its machine's memory, where that is 0). From 0.7 on ended sessions go to the "
    "archive at once; from 0.8 on there are no new trials, and running ones go on",
)
ARCHIVED_SESSIONS = Counter(
    "steno_proxy_archived_sessions_total", "Ended sessions that left Redis for the archive, by way of this replica"
)
ARCHIVED_BYTES = Counter("steno_proxy_archived_bytes_total", "Bytes of the archive that they take")
ARCHIVE_ERRORS = Counter(
    "steno_proxy_archive_errors_total",
    "Rounds of archiving that failed, and sessions that could not be archived: all of it is still in Redis. The log says why",
)
STREAMS = Gauge("steno_proxy_streams", "Turns in flight now")
WORKERS = Gauge("steno_proxy_workers", "Workers connected now")
MODELS = Gauge("steno_proxy_models", "Models that some worker can serve now; 0 answers every request with 503")
TREES = Gauge("steno_proxy_trees", "Sessions whose conversation tree is in memory")
TREE_BYTES = Gauge("steno_proxy_trees_bytes", "Memory of those trees, about")


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


class Panel(NamedTuple):
    """One graph, and its alert rule.

    alert: a PromQL condition that is true when somebody should look, on the query itself where it begins with an operator, and
    how long it must hold (` for 15m`); "": it is for reading only.
    promise: what is broken then, of the invariants of docs/architecture.md.  urgent: agents or records suffer now.
    name: the alert's, after `Steno`.
    """

    title: str
    query: str
    reading: str
    alert: str = ""
    promise: str = ""
    urgent: bool = False
    name: str = ""


def grew(counter: str, by: str = "", over: str = "1h") -> str:
    """PromQL: what a counter grew in that time, its first appearance included, which `increase` alone does not see."""
    outer = f"sum by ({by}) " if by else "sum "
    return f"({outer}(increase({counter}[{over}])) > 0) or ({outer}({counter} unless {counter} offset {over}) > 0)"


PANELS = (
    Panel(
        "Sampled tokens recorded",
        "sum(rate(steno_proxy_completion_tokens_total[1m]))",
        "Tokens a second: the fleet's throughput",
    ),
    Panel(
        "Turns in flight",
        "sum(steno_proxy_streams)",
        "By `max_streams` of the fleet: how full it is",
    ),
    Panel(
        "Proxies that answer",
        "count(steno_proxy_streams)",
        "Replicas that are scraped. None: nothing is recorded, or nobody looks",
        "absent(steno_proxy_streams) == 1 for 5m",
        urgent=True,
        name="NoProxy",
    ),
    Panel(
        "Models that can be served",
        "min(steno_proxy_models)",
        "0: every request is answered with 503. `steno doctor` says what workers there are",
        "< 1 for 2m",
        urgent=True,
        name="NoModel",
    ),
    Panel(
        "Workers, by replica",
        "steno_proxy_workers",
        "Each worker dials every replica: replicas that see fewer than others serve their trials with less",
        "max(steno_proxy_workers) - min(steno_proxy_workers) > 0 for 15m",
        name="ReplicasDisagree",
    ),
    Panel(
        "Requests, by how they were answered",
        "sum by (status) (rate(steno_proxy_requests_total[5m]))",
        "429: no place in time. 503: no worker, or no store. 499: the client left",
        'sum(rate(steno_proxy_requests_total{status=~"5.."}[5m])) / sum(rate(steno_proxy_requests_total[5m])) > 0.05 for 10m',
        urgent=True,
        name="RequestsFail",
    ),
    Panel(
        "Requests with a wrong key",
        "sum by (plane) (rate(steno_proxy_refused_keys_total[5m]))",
        "A sandbox that tries doors, or somebody with keys of another secret",
        "> 1 for 15m",
        "I8",
        name="WrongKeys",
    ),
    Panel(
        "Time to the first token, 95th percentile",
        "histogram_quantile(0.95, sum by (le, dialect) (rate(steno_proxy_first_token_seconds_bucket[5m])))",
        "Queueing, prompt processing and the way between. A rise with full workers: more trials than the fleet carries",
    ),
    Panel(
        "Time of a commit, 99th percentile",
        "histogram_quantile(0.99, sum by (le) (rate(steno_proxy_commit_seconds_bucket[5m])))",
        "The last event of each answer waits for it: Redis, its disk, or the way to it",
        "> 1 for 10m",
        "I3",
        name="CommitsSlow",
    ),
    Panel(
        "Calls of the store that failed",
        "sum by (call) (increase(steno_proxy_store_errors_total[1h]))",
        "Agents saw these as errors, and retried: no turn was told before it was stored",
        grew("steno_proxy_store_errors_total", "call", "15m"),
        "I3",
        urgent=True,
        name="StoreErrors",
    ),
    Panel(
        "Memory of Redis in use",
        "max(steno_proxy_store_fullness_ratio)",
        "At 0.8 there are no new trials (503 `store_full`), at 1 turns are refused. Set `archive`, raise `maxmemory`, or let "
        "trainers acknowledge what they hold",
        "> 0.7 for 2m",
        "I3",
        urgent=True,
        name="StoreFills",
    ),
    Panel(
        "Sessions archived",
        "sum(rate(steno_proxy_archived_sessions_total[1h]))",
        "Sessions a second that left Redis for the archive",
    ),
    Panel(
        "Archiving that failed",
        "sum(increase(steno_proxy_archive_errors_total[1h]))",
        "Ended sessions stay in Redis until it works again: a disk that is full, a folder that replicas do not share, "
        "credentials. The log says which",
        grew("steno_proxy_archive_errors_total"),
        name="ArchiveFails",
    ),
    Panel(
        "Tokens under a bent law, as a share",
        "sum(rate(steno_proxy_constrained_tokens_total[15m])) / sum(rate(steno_proxy_completion_tokens_total[15m]))",
        "Recorded and never trained: grammars, truncation, penalties that trials did not neutralise",
        "> 0.05 for 30m",
        "I1",
        name="TokensConstrained",
    ),
    Panel(
        "Turns whose worker was lost, by what became of them",
        "sum by (how) (increase(steno_proxy_failovers_total[1h]))",
        "`not_resumable` and `no_worker` broke before the agent's eyes; all others it did not notice",
        grew('steno_proxy_failovers_total{how=~"not_resumable|no_worker"}', "how"),
        "I9",
        name="TurnsLostWithWorkers",
    ),
    Panel(
        "Groups in hand, by state",
        "max by (state) (steno_proxy_groups)",
        "`ready` that grows: sampled faster than trained, and getting stale",
    ),
    Panel(
        "Age of groups at their lease, 95th percentile",
        "histogram_quantile(0.95, sum by (le) (rate(steno_proxy_group_ready_seconds_bucket[30m])))",
        "How long completed groups wait for a trainer, in seconds",
        "> 3600 for 30m",
        name="GroupsWaitLong",
    ),
    Panel(
        "Age of leases at their acknowledgement, 95th percentile",
        "histogram_quantile(0.95, sum by (le) (rate(steno_proxy_lease_seconds_bucket[30m])))",
        "A group's time in the trainer, in seconds; the trainer's `lease_ttl_s` must be well above it",
    ),
    Panel(
        "Leases, by what became of them",
        "sum by (how) (increase(steno_proxy_leases_total[1h]))",
        "`returned`: trainers that died or are too slow. `refused`: a step was trained twice, its `lease_ttl_s` is too short",
        grew('steno_proxy_leases_total{how="refused"}'),
        "I4",
        name="LeaseLostByTrainer",
    ),
    Panel(
        "Memory of conversation trees",
        "sum(steno_proxy_trees_bytes)",
        "Bounded by `tree_cache_bytes` in each replica; at the bound, trees are rebuilt from the store",
    ),
    Panel(
        "Turns recognised, by how",
        "sum by (how) (rate(steno_proxy_recognised_total[5m]))",
        "`continued` is an agent's normal turn; `root` and `new_conversation` begin trials, titles, sub-agents and compactions",
    ),
    Panel(
        "Share of turns that lost their history, by dialect",
        'sum by (dialect) (rate(steno_proxy_recognised_total{how=~"assistant_rewritten|history_rewritten|system_changed|'
        'tools_changed|options_changed|render_differs|render_refused|tokenizer_changed"}[15m])) / sum by (dialect) '
        "(rate(steno_proxy_recognised_total[15m]))",
        "These are rendered anew and shorten what one sample can train. An agent's own rewriting is a level; a jump after an "
        "update of an agent, a template or this proxy is a regression",
        "> 0.2 for 15m",
        "I2",
        name="HistoriesLost",
    ),
    Panel(
        "Echoes that were not recognised",
        'sum by (dialect) (rate(steno_proxy_recognised_total{how="assistant_rewritten"}[15m]))',
        "A client that sends recorded replies back as something else: a dialect that loses something, or an agent that repairs",
        "> 0 for 30m",
        "I2",
        name="EchoesUnrecognised",
    ),
    Panel(
        "Templates that can't be extended",
        'sum by (how) (rate(steno_proxy_recognised_total{how=~"render_.*"}[15m]))',
        "The worker refused to render the new messages alone: the model's template, or its roles",
        "> 0 for 15m",
        "I2",
        name="TemplatesRefuse",
    ),
    Panel(
        "Retries, by what became of them",
        "sum by (dialect, how) (rate(steno_proxy_retries_total[5m]))",
        "`superseded` are turns whose tokens are never trained; `replayed` are answers that were lost on their way",
        'sum(rate(steno_proxy_retries_total{how="superseded"}[15m])) / sum(rate(steno_proxy_turns_total[15m])) > 0.05 for 15m',
        name="TurnsSuperseded",
    ),
    Panel(
        "Turns that broke",
        'sum by (dialect, finish) (rate(steno_proxy_turns_total{finish=~"error|cancelled"}[5m]))',
        "`cancelled`: clients left, or sessions were completed while they ran; `error`: workers and engines",
    ),
    Panel(
        "Items dropped, by type",
        "sum by (dialect, type) (increase(steno_proxy_dropped_items_total[1h]))",
        "What agents send that no prompt has: each type wants a decision",
        grew("steno_proxy_dropped_items_total", "dialect, type"),
        name="ItemsDropped",
    ),
    Panel(
        "Workers behind",
        "steno_proxy_workers_behind",
        "Short after a policy update: workers that came late, or failed. What stays is a worker that can't load it; the update "
        "(`GET /policy`, then `GET /policy/updates/{update_id}`) says why",
        "> 0 for 15m",
        "I10",
        name="WorkersBehind",
    ),
    Panel(
        "Workers that are suspect",
        "steno_proxy_workers_suspect",
        "What they sampled could not be (`steno_proxy_unsound_turns_total`): broken weights, a broken kernel, or no worker of "
        "ours. `GET /workers` says why. Start them again, or bring them new weights with a probe",
        "> 0 for 5m",
        "I1",
        name="WorkersSuspect",
    ),
    Panel(
        "Policy updates, by how they ended",
        "sum by (transport, state) (increase(steno_proxy_policy_update_seconds_count[1h]))",
        "`failed`: no worker took it. Beside it, `steno_proxy_policy_pause_seconds`: what generation loses by each",
        grew('steno_proxy_policy_update_seconds_count{state="failed"}'),
        "I10",
        name="PolicyUpdateFailed",
    ),
    Panel(
        "Tokens that no record holds",
        "sum by (reason) (increase(steno_proxy_unrecorded_tokens_total[1h]))",
        "The ledger does not balance without them (I4)",
        grew("steno_proxy_unrecorded_tokens_total", "reason"),
        "I4",
        urgent=True,
        name="TokensUnrecorded",
    ),
)


def exposition(registry: CollectorRegistry = REGISTRY) -> bytes:
    """The text that Prometheus scrapes."""
    return generate_latest(registry)

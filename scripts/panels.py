"""What to draw of the metrics of proxy, worker and trainer, and when somebody should look. It is part of docs/metrics.md.

`watching.py` makes Prometheus' rules and Grafana's dashboard of it.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from steno_trainer.reporting.metrics import FAMILIES, MEASURES


class Panel(NamedTuple):
    """One graph, and its alert rule.

    alert: a PromQL condition that is true when a person should look, and how long it must hold (` for 15m`). If it begins with a
    comparison sign, the query is put before it. "": no alert.
    promise: the invariant of docs/architecture.md that is broken then.  urgent: agents or records suffer now.
    name: the alert's name, without `Steno` before it.
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


TAKEN = 'steno_proxy_leases_total{how=~"granted|returned"}'

PROXY_PANELS = (
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
        "Workers gone within the last hour",
        "max(max_over_time(steno_proxy_workers[1h])) - max(steno_proxy_workers)",
        "Died and not started again, or out of reach: their log and their supervisor's say why. After you took some away it is "
        "above 0 for an hour",
        "> 0 for 10m",
        "I9",
        name="WorkersGone",
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
        "A sandbox tries keys that are not its own, or a client has keys of another trial secret",
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
        "Tokens sampled with constraints, as a share",
        "sum(rate(steno_proxy_constrained_tokens_total[15m])) / sum(rate(steno_proxy_completion_tokens_total[15m]))",
        "Recorded and never trained: grammars, truncation, penalties that trials did not neutralise",
        "> 0.05 for 30m",
        "I1",
        name="TokensConstrained",
    ),
    Panel(
        "Turns whose worker was lost, by what became of them",
        "sum by (how) (increase(steno_proxy_failovers_total[1h]))",
        "`not_resumable`, `no_worker`: the agent got an error. All others: it saw a pause at most",
        grew('steno_proxy_failovers_total{how=~"not_resumable|no_worker"}', "how"),
        "I9",
        name="TurnsLostWithWorkers",
    ),
    Panel(
        "Groups in hand, by state",
        "max by (state) (steno_proxy_groups)",
        "`ready` that grows: sampled faster than trained, and getting stale. Alert: something was sampled in the last six hours, "
        "groups are ready, and no trainer takes one",
        f'max(steno_proxy_groups{{state="ready"}}) > 0 unless ({grew(TAKEN, over="15m")}) '
        "and sum(increase(steno_proxy_completion_tokens_total[6h])) > 0 for 1h",
        name="GroupsNotTaken",
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
        'sum by (dialect) (rate(steno_proxy_recognised_total{how=~"assistant_rewritten|history_rewritten|history_dropped|'
        'system_changed|tools_changed|options_changed|render_differs|render_refused|tokenizer_changed"}[15m])) / '
        "sum by (dialect) (rate(steno_proxy_recognised_total[15m]))",
        "Their history is rendered anew, so one sample trains fewer tokens. A constant share is the agent's own rewriting; a "
        "rise after an update of an agent, a template or this proxy is a regression",
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
        "What agents send that is left out of prompts: decide for each type whether it should be in",
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
        "They sent tokens or log-probabilities that can't be (`steno_proxy_unsound_turns_total`): broken weights, a broken "
        "kernel, or a program that is no worker of Steno. `GET /workers` says why. Start them again, or bring them new weights "
        "with a probe",
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

WORKER_PANELS = (
    Panel(
        "Engines that can generate",
        "min by (instance) (steno_worker_engine_up)",
        "A worker whose engine is dead ends within seconds, and is started again by its supervisor: `StenoWorkersGone` says that "
        "it was not",
    ),
    Panel(
        "Proxies that a worker serves",
        "min by (instance) (steno_worker_proxies)",
        "0: it samples for nobody; its log says who refused it. Fewer than configured: a replica is away",
        "< 1 for 5m",
        name="WorkerAlone",
    ),
    Panel(
        "Weights proved",
        "min by (instance) (steno_worker_weights_proved)",
        "0: a probe of log-probabilities or a load failed; what was sampled since then waits or is discarded",
        "< 1 for 15m",
        "I10",
        urgent=True,
        name="WeightsUnproved",
    ),
    Panel(
        "Sampled tokens sent",
        "sum by (instance) (rate(steno_worker_tokens_total[1m]))",
        "Tokens a second of each worker",
    ),
    Panel(
        "Generations on workers",
        "sum by (instance) (steno_worker_streams)",
        "Uneven for long: trials are sticky, and move only when a worker is full",
    ),
    Panel(
        "Sockets opened again",
        "sum by (instance) (increase(steno_worker_reconnects_total[15m]))",
        "A rate means a bad network between workers and proxies",
        "> 5 for 15m",
        "I9",
        name="WorkerReconnects",
    ),
    Panel(
        "Updates on workers that failed, by error",
        'sum by (end) (increase(steno_worker_updates_total{end!="served"}[1h]))',
        "The worker gets no turns until it has caught up",
        grew('steno_worker_updates_total{end!="served"}', "end"),
        "I10",
        name="WorkerUpdateFailed",
    ),
    Panel(
        "Pause of an update, 95th percentile",
        "histogram_quantile(0.95, sum by (le) (rate(steno_worker_update_pause_seconds_bucket[1h])))",
        "Seconds for which a worker sampled nothing",
    ),
)

_TRAINER = (
    Panel(
        "Steps",
        "max by (instance) (steno_train_step)",
        "Step of the current weights",
    ),
    Panel(
        "Ledger of the run, by what became of its tokens",
        "max by (instance, outcome) (steno_train_ledger_tokens)",
        "`sampled` is the sum of all others; what is missing has no reason",
        'abs(sum by (instance) (steno_train_ledger_tokens{outcome="sampled"}) - sum by (instance) '
        '(steno_train_ledger_tokens{outcome!="sampled"})) > 0 for 15m',
        "I4",
        urgent=True,
        name="LedgerUnbalanced",
    ),
)
_ALERTS = {
    "mismatch": ("max(steno_train_mismatch_kl) > 0.1 for 30m", "I1", "SamplerAndTrainerDiffer"),
    "reward": ("max(steno_train_reward_zero_variance_fraction) > 0.9 for 1h", "", "RewardsAllEqual"),
}
_READING = {
    "mismatch": " A rise without staleness: sampler and trainer compute different things, or hold different weights"
}


def _trainer_panels() -> tuple[Panel, ...]:
    """One graph for each group of the trainer's measures."""
    found = []
    for group, measures in groupby(MEASURES, key=lambda measure: measure.name.partition("/")[0]):
        members = list(measures)
        names = "|".join(measure.prometheus for measure in members)
        reading = "; ".join(f"`{m.name}`: {m.help}" for m in members) + "." + _READING.get(group, "")
        alert, promise, name = _ALERTS.get(group, ("", "", ""))
        found.append(
            Panel(f"Training: {group}", f'{{__name__=~"{names}"}}', reading.rstrip("."), alert, promise, name=name)
        )
    names = "|".join(family.prometheus for family in FAMILIES)
    reading = "; ".join(f"`{family.prefix}/{family.label.upper()}`: {family.help}" for family in FAMILIES)
    return (*_TRAINER, *found, Panel("Training: names of your own", f'{{__name__=~"{names}"}}', reading))


ROWS = (("Proxy", PROXY_PANELS), ("Workers", WORKER_PANELS), ("Trainer", _trainer_panels()))

"""Checks of a proxy: it answers, it has keys, its workers serve one version with one tokenizer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from steno.client.client import new_http
from steno.config.settings import is_loopback
from steno.contracts.errors import ConfigError
from steno_cli.doctor.findings import Finding, bad, clock, ok, warning

TIMEOUT_S = 10.0
COUNTED = {
    "steno_proxy_unrecorded_tokens": ("tokens that are in no record (I4)", "/metrics and the log have the reasons"),
    "steno_proxy_store_errors": ("failed calls to the store (I3)", "check Redis and the network to it"),
}
Worker = Mapping[str, Any]


def check_proxy(url: str, key: str | None, transport: httpx.BaseTransport | None = None) -> list[Finding]:
    """Args: key: the admin key; without it a guarded proxy shows its health only.  transport: a test's, instead of sockets."""
    try:
        opened = new_http(httpx.Client, {"base_url": url.rstrip("/"), "timeout": TIMEOUT_S, "transport": transport})
    except ConfigError as error:
        return [bad("proxy.reachable", error.message, "correct this variable: no command works with it")]
    with opened as client:
        try:
            before = time.time()
            health = client.get("/healthz")
            after = time.time()
            health.raise_for_status()
            readiness = client.get("/readyz")
            ready = readiness.json()
            open_to_all = client.get("/workers").status_code == 200  # also while the store is away
            client.headers.update({"authorization": f"Bearer {key}"} if key else {})
            workers = client.get("/workers")
            metrics = client.get("/metrics")
        except (httpx.HTTPError, ValueError) as error:
            return [bad("proxy.reachable", f"{url}: {error}", "start the proxy, or correct --proxy (STENO_PROXY)")]
    found = [ok("proxy.reachable", f"{url} answers in {1000 * (after - before):.0f} ms")]
    if readiness.status_code == 403:
        return [
            *found,
            bad("proxy.hosts", ready["error"]["message"], "use localhost, or add the host to allowed_hosts"),
        ]
    found += _ready(ready)
    if isinstance(theirs := health.json().get("time"), float):
        found.append(clock("proxy.clock", theirs - (before + after) / 2, (after - before) / 2))
    found += guarded(url, open_to_all, key is not None, workers.status_code)
    if workers.status_code == 200:
        found += judge_workers(workers.json()["items"])
    if metrics.status_code == 200:
        found += judge_metrics(metrics.text)
    return found


def waited_replicas(url: str) -> int | None:
    """How many replicas of Redis each write of this proxy waits for. None: it does not say."""
    try:
        with new_http(httpx.Client, {"base_url": url.rstrip("/"), "timeout": TIMEOUT_S, "transport": None}) as client:
            found = client.get("/readyz").json().get("waited_replicas")
    except (httpx.HTTPError, ValueError, ConfigError):
        return None
    return found if isinstance(found, int) else None


def _ready(ready: Mapping[str, Any]) -> Iterator[Finding]:
    if ready.get("store", "ok") == "ok":
        yield ok("proxy.store", "the store answers")
    else:
        yield bad("proxy.store", f"the store does not answer: {ready['store']}", "check Redis with --redis-url")
    if models := ready.get("models"):
        yield ok("proxy.models", ", ".join(models))
    else:
        yield bad("proxy.models", "no model can be served: agents get 503", "start a worker that dials this proxy")


def guarded(url: str, open_to_all: bool, has_key: bool, status: int) -> Iterator[Finding]:
    """open_to_all: the control plane answered without a key.  status: of a call with ours."""
    if open_to_all:
        host = urlsplit(url).hostname or ""
        if is_loopback(host):
            yield warning("proxy.keys", "no admin key: any process on this machine can read and reward sessions (I8)",
                          "set STENO_ADMIN_KEY before sandboxes run here")  # fmt: skip
        else:
            yield bad("proxy.keys", f"no admin key, and the proxy is at {host}: everybody can read and reward sessions (I8)",
                      "set STENO_ADMIN_KEY, or stop forwarding to the proxy")  # fmt: skip
    elif status == 404:
        yield bad("proxy.control", "this is the agents' port; the control plane has another one",
                  "give the control port to --proxy (the proxy's --control-port)")  # fmt: skip
        return
    elif not has_key:
        yield warning("proxy.keys", "the proxy has an admin key: workers and metrics can't be checked without it",
                      "give it by --key-file or STENO_ADMIN_KEY")  # fmt: skip
    elif status in (401, 403):
        yield bad("proxy.keys", "the control plane refuses this key",
                  "give the admin key, not a worker's, an agent's or a harness's")  # fmt: skip
    else:
        yield ok("proxy.keys", "only the admin key opens the control plane")
    if not open_to_all and urlsplit(url).scheme == "http" and not is_loopback(urlsplit(url).hostname or ""):
        yield warning(
            "proxy.tls", "keys are sent without TLS", "fine inside a cluster; otherwise put TLS in front of the proxy"
        )


def judge_workers(workers: list[Worker]) -> Iterator[Finding]:
    """What `GET /workers` says: who is away, who is behind, who disagrees with whom."""
    up = [worker for worker in workers if worker["connected"]]
    if not up:
        yield bad(
            "workers.connected",
            f"none of {len(workers)}",
            "start one: steno worker --proxy http://…; its log says why it can't connect",
        )
        return
    away = [worker["id"] for worker in workers if not worker["connected"]]
    if away:
        yield warning("workers.connected", f"{len(up)} of {len(workers)}; away: {', '.join(away)}",
                      "look at their logs and at the network")  # fmt: skip
    else:
        yield ok("workers.connected", f"{len(up)}")
    if ill := [worker["id"] for worker in up if not worker["healthy"]]:
        yield bad("workers.healthy", f"engine can't generate: {', '.join(ill)}", "restart them; their logs say why")
    if draining := [worker["id"] for worker in up if worker["draining"]]:
        yield warning("workers.draining", ", ".join(draining), "nothing to do if you replace them")
    if behind := [f"{worker['id']} ({', '.join(worker['behind'])})" for worker in up if worker.get("behind")]:
        yield bad("workers.behind", f"old weights, get no turns until they serve the version in force: {', '.join(behind)} (I10)",
                  "GET /policy, then GET /policy/updates/{update_id} says what failed")  # fmt: skip
    yield from _agreement(up)


def _agreement(up: list[Worker]) -> Iterator[Finding]:
    digests: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    versions: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    mute: dict[str, list[str]] = defaultdict(list)
    for worker in up:
        for card in worker["models"]:
            if "tools" not in card.get("capabilities", ()) and not card.get("text_only"):
                mute[card["name"]].append(worker["id"])
            if card.get("tokenizer_digest"):
                digests[card["name"]][card["tokenizer_digest"]].append(worker["id"])
            versions[card.get("policy", "default")][card.get("policy_version", "base/0")].append(worker["id"])
    for name, by_digest in digests.items():
        if len(by_digest) > 1:
            which = _parts(by_digest, 12)
            yield bad("workers.tokenizers", f"{name}: tokenizers differ ({which}): a conversation that moves forks (I2)",
                      "give all workers of a model the same model directory")  # fmt: skip
        else:
            yield ok("workers.tokenizers", f"{name}: one tokenizer")
    for name, ids in mute.items():
        yield warning("workers.tools", f"{name}: agents get tool calls as text from {', '.join(ids)}",
                      "start them with the model's --tool-call-parser; fine where agents call no tools")  # fmt: skip
    for policy, by_version in versions.items():
        if len(by_version) > 1:
            yield warning("workers.versions", f"{policy}: {_parts(by_version, 40)}",
                          "normal during an update; a worker that stays so is behind")  # fmt: skip
        else:
            yield ok("workers.versions", f"{policy}: {next(iter(by_version))}")


def _parts(by: Mapping[str, list[str]], width: int) -> str:
    return "; ".join(f"{value[:width]} on {', '.join(ids)}" for value, ids in by.items())


def judge_metrics(text: str) -> Iterator[Finding]:
    """What should be 0 since the proxy's start."""
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                totals[family.name] += sample.value
    for name, (what, advice) in COUNTED.items():
        check = f"proxy.{name.removeprefix('steno_proxy_')}"
        if totals[name]:
            yield warning(check, f"{totals[name]:.0f} {what} since its start", advice)
        else:
            yield ok(check, f"no {what}")

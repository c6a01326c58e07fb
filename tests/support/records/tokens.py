"""Where every sampled token went, by what worker and proxy count and what is on record (I4)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.programs.stack import Stack

WORKER, PROXY = "steno_worker_", "steno_proxy_"


def counters(url: str) -> Counter[str]:
    """A program's counters by their names, over all labels."""
    counted: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(url, timeout=30).text):
        if family.type == "counter":
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    counted[sample.name] += int(sample.value)
    return counted


def tokens_add_up(stack: Stack, workers: Iterable[int]) -> Counter[str]:
    """Wait until they do, once no turn is in flight. workers: their metrics' ports; every one that there was.

    Returns: what was counted. Raises: AssertionError: they don't add up within a minute.
    """
    ports, until = list(workers), time.monotonic() + 60
    while True:
        trials = [session["trial_id"] for session in stack.get("/sessions?limit=500")["items"]]
        on_record = sum(len(turn["completion_ids"]) for trial in trials for turn in stack.turns(trial))
        counted = counters(stack.url + "/metrics")
        for port in ports:
            counted += counters(f"http://127.0.0.1:{port}/metrics")
        wrong = _wrong(counted, on_record)
        if not wrong:
            return counted
        assert time.monotonic() < until, f"{wrong}\n{stack.logs()}"
        time.sleep(0.2)


def _wrong(counted: Counter[str], on_record: int) -> str:
    """Which sum does not come out."""

    def of(program: str, name: str) -> int:
        return counted[f"{program}{name}_total"]

    sampled, sent, unsent = (of(WORKER, name) for name in ("sampled_tokens", "tokens", "unsent_tokens"))
    if sampled != sent + unsent:
        return f"the engines sampled {sampled}; the workers sent {sent} and say of {unsent} why not"
    received, unacknowledged = of(PROXY, "received_tokens"), of(WORKER, "unacknowledged_tokens")
    if not 0 <= sent - received <= unacknowledged:
        return f"the workers sent {sent}, {unacknowledged} of them on channels that were lost; the proxy received {received}"
    recorded, unrecorded, late = (of(PROXY, f"{name}_tokens") for name in ("completion", "unrecorded", "late"))
    if received != recorded + unrecorded + late:
        return f"the proxy received {received}: recorded {recorded}, unrecorded {unrecorded}, late {late}"
    return "" if recorded == on_record else f"the proxy counts {recorded} recorded, on record are {on_record}"

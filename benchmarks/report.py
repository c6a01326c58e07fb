"""What a run says of itself, and the table that it prints."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import Result
from benchmarks.targets import LOAD_CORE, PEERS, PROXY_CORE, ROOT


def describe_machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    versions = {
        name: _output(*command) for name, command in (("nginx", ("nginx", "-v")), ("redis", ("redis-server", "-v")))
    }
    return {
        "cpu": model, "cores": os.cpu_count(), "proxy_core": PROXY_CORE, "load_core": LOAD_CORE,
        "kernel": platform.release(), "python": platform.python_version(), "peers": [*PEERS], **versions,
        "revision": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "uncommitted": bool(_output("git", "-C", str(ROOT), "status", "--porcelain", "--", "steno", "proxy", "inference_worker")),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }  # fmt: skip


def _output(*command: str) -> str | None:
    """What a command says, None where there is no such command."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return (done.stdout + done.stderr).strip()


def median(runs: Sequence[Result]) -> Result:
    """One result of several: the median of each number; a list by its positions; anything else as the first run has it."""
    good = [run for run in runs if "error" not in run]
    if len(good) < 2:
        return dict(good[0] if good else runs[0])
    merged: Result = {}
    for key, first in good[0].items():
        values = [run[key] for run in good if key in run]
        if isinstance(first, list):
            merged[key] = [statistics.median(column) for column in zip(*values, strict=False)]
        else:
            merged[key] = statistics.median(values) if isinstance(first, int | float) else first
    return merged


Show = Callable[[Result], str]
ROWS: list[tuple[str, str, Show]] = [
    ("tiny replies, 64 clients: requests/s", "tiny", lambda v: f"{v['requests_per_s']:,.0f}"),
    ("tiny replies: CPU per request", "tiny", lambda v: f"{v['cpu_us_per_request']:,.0f} us"),
    ("64 streams: CPU per token", "stream64", lambda v: f"{v['cpu_us_per_token']:,.0f} us"),
    ("64 streams: added p99 to first token", "stream64", lambda v: f"{1e3 * v['added_ttft_p99_s']:.1f} ms"),
    ("512 streams: tokens/s delivered", "stream512", lambda v: f"{v['tokens_per_s']:,.0f}"),
    ("512 streams: CPU per token", "stream512", lambda v: f"{v['cpu_us_per_token']:,.0f} us"),
    ("512 streams: p99 gap between events", "stream512", lambda v: f"{1e3 * v['gap_p99_s']:.0f} ms"),
    ("200 sessions of 20 turns: CPU per request", "sessions", lambda v: f"{v['cpu_ms_per_request']:.2f} ms"),
    ("200 sessions of 20 turns: memory grown", "sessions", lambda v: f"{v['grown_mb']:.0f} MB"),
    ("2,000 silent streams: memory", "silent2000", lambda v: f"{v['rss_mb']:.0f} MB ({v['open_at_end']:.0f} open)"),
]
OWN_ROWS: list[tuple[str, str, Show]] = [
    ("CPU per request at turn 2", "flat", lambda v: f"{v['cpu_ms_at_turn_2']:.2f} ms"),
    ("CPU per request at turn 20", "flat", lambda v: f"{v['cpu_ms_at_last_turn']:.2f} ms"),
    ("Redis: bytes per token", "sessions", lambda v: f"{v['bytes_per_token']:.1f}"),
    ("Redis: bytes per turn beside its text", "sessions", lambda v: f"{v['bytes_per_turn']:.0f}"),
    ("Redis: CPU per request of a session", "sessions", lambda v: f"{v['redis_cpu_ms_per_request']:.2f} ms"),
    ("worker: CPU per token", "worker", lambda v: f"{v['cpu_us_per_token']:.0f} us"),
    ("worker: of it beside the engine", "worker", lambda v: f"{v['beside_engine_us_per_token']:.0f} us"),
]


def compare(results: dict[str, dict[str, Result]]) -> None:
    """Add what only a comparison says: the time to the first token beyond the engine's own under the same load."""
    base = results.get("direct", {}).get("stream64", {}).get("ttft_p99_s")
    for cases in results.values():
        if base is not None and "ttft_p99_s" in cases.get("stream64", {}):
            cases["stream64"]["added_ttft_p99_s"] = cases["stream64"]["ttft_p99_s"] - base


def table(results: dict[str, dict[str, Result]]) -> str:
    """In markdown, a column for each target; rows that nobody has a number for are left out."""
    names = list(results)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for title, case, show in [*ROWS, *OWN_ROWS]:
        cells = [_cell(results[name].get(case), show) for name in names]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(result: Result | None, show: Show) -> str:
    if not result:
        return "-"
    if "error" in result:
        return "failed"
    try:
        return show(result)
    except KeyError:
        return "-"

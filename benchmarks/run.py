"""All the proxy benchmarks, Steno beside its peers, in one command; JSON and a table out.

    python -m benchmarks.run                      everything (about 15 minutes; installs the peers once)
    python -m benchmarks.run --targets steno,nginx --cases tiny,stream64

The proxy has one core to itself; engine and load generator share the other. CPU time is the proxy's own, from the kernel.
Added time to first token is against the same load straight at the engine (`direct`), in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.targets import LOAD_CORE, ROOT, Running, peers_environment, started

TARGETS = ("direct", "steno", "steno_redis", "nginx", "smg", "rllm", "litellm")
CASES = ("tiny", "stream64", "stream512", "sessions", "silent2000")
PEER_TARGETS = {"smg", "rllm", "litellm"}
# Cases in which these collapse (they hold a full core below 64 streams): measuring them there measures nothing but the queue.
NOT_RUN = {("litellm", "stream512"), ("rllm", "stream512"), ("litellm", "silent2000"), ("rllm", "silent2000"),
           ("litellm", "sessions"), ("direct", "silent2000")}


def load(running: Running, *args: str) -> dict[str, Any]:
    done = subprocess.run(["taskset", "-c", LOAD_CORE, sys.executable, "-m", "benchmarks.load", args[0], "--url", running.url,
                           *args[1:]], cwd=ROOT, capture_output=True, text=True, timeout=400)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def tiny(running: Running, seconds: float) -> dict[str, Any]:
    load(running, "tiny", "--seconds", "1")
    before = running.cpu_s()
    result = load(running, "tiny", "--clients", "64", "--seconds", str(seconds))
    result["cpu_us_per_request"] = 1e6 * (running.cpu_s() - before) / max(1, result["requests"])
    return result


def streams(running: Running, clients: int, seconds: float) -> dict[str, Any]:
    load(running, "tiny", "--clients", "4", "--seconds", "1")
    before = running.cpu_s()
    result = load(running, "streams", "--clients", str(clients), "--tokens", "128", "--seconds", str(seconds))
    result["cpu_us_per_token"] = 1e6 * (running.cpu_s() - before) / max(1, result["tokens"])
    return result


def sessions(running: Running) -> dict[str, Any]:
    load(running, "tiny", "--clients", "4", "--seconds", "1")
    rss, before = running.rss_bytes(), running.cpu_s()
    result = load(running, "session", "--sessions", "200", "--turns", "20", "--grow-bytes", "2048")
    time.sleep(1.0)
    result["cpu_ms_per_request"] = 1e3 * (running.cpu_s() - before) / max(1, result["requests"])
    result["grown_mb"] = (running.rss_bytes() - rss) / 1e6
    return result


def silent(running: Running, folder: Path) -> dict[str, Any]:
    load(running, "tiny", "--clients", "4", "--seconds", "1")
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    child = subprocess.Popen(["taskset", "-c", LOAD_CORE, sys.executable, "-m", "benchmarks.load", "silent", "--url", running.url,
                              "--clients", "2000", "--hold-s", "12", "--ready", str(ready)], cwd=ROOT, stdout=subprocess.PIPE)
    until = time.monotonic() + 120
    while not ready.exists() and time.monotonic() < until and child.poll() is None:
        time.sleep(0.1)
    rss = running.rss_bytes()
    out, _ = child.communicate(timeout=120)
    return {**json.loads(out), "rss_mb": rss / 1e6}


def run_case(case: str, running: Running, folder: Path, seconds: float) -> dict[str, Any]:
    if case == "tiny":
        return tiny(running, seconds)
    if case == "stream64":
        return streams(running, 64, seconds)
    if case == "stream512":
        return streams(running, 512, seconds)
    if case == "sessions":
        return sessions(running)
    return silent(running, folder)


def describe_machine() -> dict[str, Any]:
    model = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.processor())
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "revision": revision,
            "date": time.strftime("%Y-%m-%d")}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The markdown table, one column a target."""

    def cell(target: str, case: str, show: Any) -> str:
        value = results.get(target, {}).get(case)
        if not value:
            return "–"
        return "failed" if "error" in value else str(show(value))

    def added(target: str) -> str:
        base = results.get("direct", {}).get("stream64", {}).get("ttft_p99_s")
        return cell(target, "stream64", lambda v: "?" if base is None else f"{1e3 * (v['ttft_p99_s'] - base):.1f} ms")

    rows = [
        ("tiny replies, 64 clients: requests/s", lambda t: cell(t, "tiny", lambda v: f"{v['requests_per_s']:,.0f}")),
        ("64 streams: CPU per token", lambda t: cell(t, "stream64", lambda v: f"{v['cpu_us_per_token']:.0f} us")),
        ("64 streams: added p99 to first token", added),
        ("512 streams: tokens/s delivered", lambda t: cell(t, "stream512", lambda v: f"{v['tokens_per_s']:,.0f}")),
        ("512 streams: CPU per token", lambda t: cell(t, "stream512", lambda v: f"{v['cpu_us_per_token']:.0f} us")),
        ("512 streams: p99 gap", lambda t: cell(t, "stream512", lambda v: f"{1e3 * v['gap_p99_s']:.0f} ms")),
        ("sessions: CPU per request", lambda t: cell(t, "sessions", lambda v: f"{v['cpu_ms_per_request']:.2f} ms")),
        ("sessions: memory grown", lambda t: cell(t, "sessions", lambda v: f"{v['grown_mb']:.0f} MB")),
        ("2,000 silent streams: memory", lambda t: cell(t, "silent2000", lambda v: f"{v['rss_mb']:.0f} MB ({v['open_at_end']} open)")),
    ]
    names = [name for name in TARGETS if name in results]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [f"| {title} | " + " | ".join(show(name) for name in names) + " |" for title, show in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results.json")
    args = parser.parse_args()
    targets, cases = args.targets.split(","), args.cases.split(",")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "steno"
    peers = peers_environment(cache) if PEER_TARGETS & set(targets) else None
    results: dict[str, dict[str, Any]] = {}
    for name in targets:
        results[name] = {}
        for case in cases:
            if (name, case) in NOT_RUN:
                continue
            with tempfile.TemporaryDirectory(prefix=f"steno-bench-{name}-") as folder:
                try:
                    with started(name, Path(folder), peers) as running:
                        results[name][case] = run_case(case, running, Path(folder), args.seconds)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    results[name][case] = {"error": str(error)}
            print(name, case, json.dumps(results[name][case])[:400], file=sys.stderr, flush=True)
    report = {"machine": describe_machine(), "seconds": args.seconds, "results": results}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()

"""Where the proxy's time goes: py-spy on a case, summed up by parts of the proxy, in microseconds per request or token.

    python -m benchmarks.profiling --case tiny [--target steno_redis] [--seconds 8]

A sample belongs to the innermost frame that is of a part: what pydantic does for the record counts as the record's. System calls
count where they are made: writing to a client's socket is the HTTP server's. py-spy (PyPI) is expected beside this Python or on
the PATH, with the right to trace (root, or ptrace_scope 0).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.cases import CASES, Result, sized
from benchmarks.targets import started

PARTS: list[tuple[str, tuple[str, ...]]] = [
    ("relay: frames, sockets of workers, mailboxes", (
        "uvicorn/protocols/websockets", "websockets/", "proxy/steno_proxy/workers/", "steno/contracts/")),
    ("HTTP server: parse, respond, write", ("uvicorn/",)),
    ("metrics and logs", ("prometheus_client/", "logging/", "proxy/steno_proxy/metrics", "proxy/steno_proxy/logs")),
    ("store", ("proxy/steno_proxy/store/", "redis/", "hiredis/")),
    ("dialect: request in, answer or chunks out", ("proxy/steno_proxy/dialects/",)),
    ("recognition: session, tree, plan", (
        "proxy/steno_proxy/sessions/", "proxy/steno_proxy/session_cache/", "proxy/steno_proxy/turns/continuation")),
    ("endpoint: route, key, body, client", ("proxy/steno_proxy/api/", "proxy/steno_proxy/auth/", "starlette/", "fastapi/")),
    ("turn: transcript, record, tasks", ("proxy/steno_proxy/turns/", "proxy/")),
]  # fmt: skip
REST = "event loop: polling, timers, tasks, garbage"
RATE = 400


def part_of(stack: str) -> str:
    """Of one line of py-spy's raw format: frames `name (file:line)`, outermost first, joined by `;`."""
    for frame in reversed(stack.split(";")):
        file = frame.rpartition("(")[2]
        # The frames that started the process are under every sample.
        if "steno_proxy/server/app" in file or "uvicorn/server" in file or "uvicorn/_compat" in file:
            break
        for part, files in PARTS:
            if file.startswith(files):
                return part
    return REST


def profiled(target: str, case: str, seconds: float) -> tuple[Result, Counter[str]]:
    """Run a case under py-spy; what it measured, and samples by part."""
    spy = shutil.which("py-spy") or str(Path(sys.executable).parent / "py-spy")
    with tempfile.TemporaryDirectory(prefix="steno-profile-") as folder:
        raw = Path(folder) / "stacks.txt"
        with started(target, Path(folder), None) as running:
            # Past the warm-up, which every case begins with.
            command = f"sleep 3; exec {spy} record -r {RATE} -d {seconds:.0f} -f raw -o {raw} -p {running.pids[0]}"
            with subprocess.Popen(["bash", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
                result = CASES[case](running, sized(seconds + 2, False))
                _, errors = child.communicate(timeout=60)
        if child.returncode:
            raise RuntimeError(errors.decode(errors="replace")[-1000:])
        samples: Counter[str] = Counter()
        for line in raw.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            samples[part_of(stack)] += int(count)
    return result, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["tiny", "stream64", "stream512"], default="tiny")
    parser.add_argument("--target", choices=["steno", "steno_redis"], default="steno")
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    result, samples = profiled(args.target, args.case, args.seconds)
    spent = result.get("cpu_us_per_token") or result["cpu_us_per_request"]
    total = samples.total()
    parts = {part: round(spent * count / total, 1) for part, count in samples.most_common()}
    for part, us in parts.items():
        print(f"| {part} | {us:.1f} us | {samples[part] / total:.0%} |")
    print(json.dumps({"target": args.target, "case": args.case, "us": spent, "samples": total, "parts": parts}))


if __name__ == "__main__":
    main()

"""All the proxy benchmarks, Steno beside its peers, in one command; JSON and a table out. benchmarks/README.md has the cases.

    python -m benchmarks.run                      everything, once (about 20 minutes; installs the peers the first time)
    python -m benchmarks.run --repeat 3           the median of three
    python -m benchmarks.run --quiet 0.15         on a machine with other users: wait for quiet, and again where it was not
    python -m benchmarks.run --targets steno,nginx --cases tiny,stream64
    python -m benchmarks.run --quick              a minute: does every case work? No peers from PyPI, no number means anything

The proxy has one core to itself; engine and load generator share the other. CPU time is the proxy's own, from the kernel.
Added time to first token is against the same load straight at the engine (`direct`), in the same run.
Exit code 1: some case failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, Result, Sizes, sized, worked
from benchmarks.report import compare, describe_machine, median, table
from benchmarks.targets import ROOT, peers_environment, started

TARGETS = ("direct", "steno", "steno_redis", "steno_scripted", "nginx", "aiohttp", "smg", "rllm", "litellm")
PEERS_FROM_PYPI = {"aiohttp", "smg", "rllm", "litellm"}
SHARED = ("tiny", "stream64", "stream512", "sessions", "silent2000")
OWN = {"steno": (*SHARED, "flat"), "steno_redis": (*SHARED, "flat"), "steno_scripted": ("worker",),
       "direct": ("tiny", "stream64", "stream512", "sessions"),
       # These hold a full core below 64 streams: beyond, nothing but the queue would be measured.
       "rllm": ("tiny", "stream64", "sessions"), "litellm": ("tiny", "stream64")}  # fmt: skip

TRIES = 3
QUIET_WAIT_S = 300.0


def measure(target: str, cases: Sequence[str], sizes: Sizes, peers: Path | None) -> Iterator[tuple[str, Result]]:
    """These cases, one after the other, on a target that is started for them and ended after them."""
    with tempfile.TemporaryDirectory(prefix=f"steno-bench-{target}-") as folder:
        left = list(cases)
        try:
            with started(target, Path(folder), peers) as running:
                while left:
                    result = CASES[left[0]](running, sizes)
                    yield left.pop(0), result
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            for case in left:
                yield case, {"error": f"{type(error).__name__}: {error}"}


def measure_in_quiet(
    target: str, cases: Sequence[str], sizes: Sizes, peers: Path | None, quiet: float | None
) -> list[tuple[str, Result]]:
    """Repeat `measure` until other processes took at most the share `quiet` of the machine. After TRIES, the quietest counts."""
    best: list[tuple[str, Result]] = []
    best_share = math.inf
    for _ in range(1 if quiet is None else TRIES):
        if quiet is not None:
            wait_for_quiet(quiet)
        others = Others()
        done = list(measure(target, cases, sizes, peers))
        share = others.share()
        if share < best_share:
            best_share, best = share, [(case, {**result, "others_share": share}) for case, result in done]
        if quiet is None or share <= quiet:
            break
    return best


def wait_for_quiet(quiet: float) -> None:
    """Until others take no more than that share for two seconds, or QUIET_WAIT_S have passed."""
    until = time.monotonic() + QUIET_WAIT_S
    while time.monotonic() < until:
        others = Others()
        time.sleep(2.0)
        if others.share() <= quiet:
            return


class Others:
    """What other processes take of this machine while ours run: a number measured beside a busy neighbour should say so."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy_s, self._ours_s = self._times()

    def share(self) -> float:
        """Since the beginning, of all cores; to be asked once our children have ended."""
        busy_s, ours_s = self._times()
        others_s = busy_s - self._busy_s - (ours_s - self._ours_s)
        return max(0.0, others_s / ((time.monotonic() - self._began) * (os.cpu_count() or 1)))

    @staticmethod
    def _times() -> tuple[float, float]:
        user, nice, system, _, _, irq, softirq, *_ = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        )
        ticks = os.sysconf("SC_CLK_TCK")
        own = os.times()
        ours_s = own.user + own.system + own.children_user + own.children_system
        return (user + nice + system + irq + softirq) / ticks, ours_s


def medians(runs: dict[str, dict[str, list[Result]]]) -> dict[str, dict[str, Result]]:
    results = {target: {case: median(done) for case, done in cases.items()} for target, cases in runs.items()}
    compare(results)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", help=f"of {','.join(TARGETS)}; all unless given")
    parser.add_argument("--cases", help=f"of {','.join(CASES)}; each target's own unless given")
    parser.add_argument("--seconds", type=float, help="length of the timed cases")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--quiet", type=float, help="share of the machine that other processes may take, 0 to 1")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "build/benchmarks.json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every `finally`, which end what was started
    sizes = sized(args.seconds, args.quick)
    targets = (
        args.targets.split(",") if args.targets else [t for t in TARGETS if not (args.quick and t in PEERS_FROM_PYPI)]
    )
    if args.quick and not args.targets and shutil.which("nginx") is None:
        targets.remove("nginx")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "steno"
    peers = peers_environment(cache) if PEERS_FROM_PYPI & set(targets) else None
    wanted = args.cases.split(",") if args.cases else list(CASES)
    runs: dict[str, dict[str, list[Result]]] = {target: {} for target in targets}
    report: dict[str, Any] = {"machine": describe_machine(), "sizes": vars(sizes), "repeat": args.repeat}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for number in range(args.repeat):
        for target in targets:
            cases = [case for case in OWN.get(target, SHARED) if case in wanted]
            # A fresh start for each case, so that none is measured in the memory of another; not where nothing is measured.
            for group in [cases] if args.quick else [[case] for case in cases]:
                for case, result in measure_in_quiet(target, group, sizes, peers, args.quiet):
                    runs[target].setdefault(case, []).append(result)
                    print(number, target, case, json.dumps(result)[:400], file=sys.stderr, flush=True)
                report["results"], report["runs"] = medians(runs), runs
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(medians(runs)))
    failed = [
        f"{target} {case}"
        for target, cases in runs.items()
        for case, done in cases.items()
        if not all(map(worked, done))
    ]
    if failed:
        print("did not work: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What only a GPU can show, in under nine minutes, on one machine without a network.

    scripts/gpu-check                                        everything; JSON to build/gpu-check.json
    scripts/gpu-check --parts kernel,step --out FILE         some of it
    scripts/gpu-check --vllm PYTHON                          a Python that has vLLM, if it is not this one
    scripts/gpu-check --rehearse                             without a GPU, with small sizes: does every part work?

Each part ends as `ok`, `failed` or `not possible`, with the reason. Exit code: 0: nothing failed; 1: something did; 2: nothing
was looked at. docs/trainer-operations.md has the parts and the report's fields.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.calls import Calls, Failed
from benchmarks.gpu_check.machine import machine, revision
from benchmarks.gpu_check.parts import PARTS, REAL, SMALL, Check
from benchmarks.gpu_check.verdict import Verdict, failed

SCHEMA = 1
LIMIT_S, REHEARSAL_LIMIT_S = 530.0, 1700.0
"""Of the whole check: what has not begun by then is not possible any more, what runs is ended."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"by commas, of {', '.join(PARTS)}")
    parser.add_argument(
        "--vllm", default=sys.executable, metavar="PYTHON", help="a Python that has vLLM; default: this one"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check.json"))
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts: got {', '.join(unknown)}, must be of {', '.join(PARTS)}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="steno-gpu-check-") as folder:
        calls = Calls(
            Path(folder), until=started + (REHEARSAL_LIMIT_S if options.rehearse else LIMIT_S), small=options.rehearse
        )
        try:
            facts = calls("facts", {})
        except Failed as error:
            print(f"nothing was looked at: {error}", file=sys.stderr)
            return 2
        if not facts["gpus"] and not options.rehearse:
            print("torch finds no CUDA device here; --rehearse looks at everything on the CPU instead", file=sys.stderr)
            return 2
        check = Check(
            calls, "cpu" if options.rehearse else "cuda", SMALL if options.rehearse else REAL, facts, options.vllm
        )
        verdicts = {name: look(name, check) for name in names}
    report = {
        "schema": SCHEMA, "date": time.strftime("%Y-%m-%d"), "rehearsal": options.rehearse, "machine": machine(facts),
        "versions": facts["versions"], **revision(), "seconds": round(time.monotonic() - started, 1),
        "parts": {name: verdict.as_json() for name, verdict in verdicts.items()},
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['seconds']:.0f} s; the report is in {options.out}")
    return exit_code(verdicts.values())


def exit_code(verdicts: Iterable[Verdict]) -> int:
    looked_at = [verdict for verdict in verdicts if verdict.state != "not possible" or verdict.figures]
    return int(any(verdict.state == "failed" for verdict in looked_at)) if looked_at else 2


def look(name: str, check: Check) -> Verdict:
    """One part; prints its line."""
    started = time.monotonic()
    try:
        verdict = PARTS[name](check)
    except Failed as error:
        verdict = failed(str(error))
    verdict.seconds = round(time.monotonic() - started, 1)
    line: dict[str, Any] = {"part": name, "state": verdict.state, "seconds": verdict.seconds, "why": verdict.why}
    print(f"{line['part']:8} {line['state']:12} {line['seconds']:6.1f} s  {line['why']}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())

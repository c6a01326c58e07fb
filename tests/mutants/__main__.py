"""`python -m tests.mutants [--only NAME] [--list]`: each mutant in a copy of the checkout, and the tests that must notice it.

The checkout itself is not touched: its files as they are (tracked, and new ones that git does not ignore) are copied to a
folder of their own under the system's temporary one, where one mutant after the other is put in and taken out again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants import MUTANTS
from tests.mutants.base import ROOT, Mutant, Stale
from tests.mutants.forked import import_theirs, run_tests

LIMIT_S = 120.0
"""For the tests of one mutant. One that makes them hang has been noticed."""
WHOLE_LIMIT_S = 1800.0
"""For all of these tests without any mutant, at first: they must pass."""
FAILED = 1
"""pytest's exit code where a test failed. Any other but 0 says nothing of the mutant: nothing to run, say."""


def copy_checkout(to: Path) -> None:
    """The files of the checkout as they are, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():  # not so one that was deleted and not committed
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def judge(copy: Path, mutant: Mutant) -> tuple[bool, str]:
    """Whether the mutant is noticed, and how."""
    file = copy / mutant.path
    right = file.read_text()
    file.write_text(mutant.changed(copy))
    try:
        code, said = run_tests(copy, mutant.tests, LIMIT_S)
    finally:
        file.write_text(right)
    if code is None:
        return True, f"killed: the tests hang (over {LIMIT_S:g} s)"
    if code == FAILED:
        first = next((line for line in said.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))), "")
        return True, f"killed by {first.split(' - ')[0].removeprefix('FAILED ')}"
    return False, "ALIVE" if code == 0 else f"not judged, pytest ended with {code}:\n{said[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="this mutant (or those whose names begin so); may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="say which there are, and run nothing")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.only or m.name in args.only]
    if args.only and not chosen:
        chosen = [m for m in MUTANTS if any(m.name.startswith(only) for only in args.only)]
    if not chosen:
        parser.error(f"no mutant has the name {', '.join(args.only)}; --list says which there are")
    if args.list:
        for mutant in chosen:
            print(f"{mutant.name:30} {mutant.path}: {mutant.says}")
        return 0
    import_theirs()
    wrong = []
    with tempfile.TemporaryDirectory(prefix="steno-mutants-") as folder:
        copy = Path(folder)
        copy_checkout(copy)
        code, said = run_tests(copy, tuple(sorted({test for mutant in chosen for test in mutant.tests})), WHOLE_LIMIT_S)
        if code:
            print(f"the tests fail without any mutant:\n{said[-3000:]}")
            return 1
        for mutant in chosen:
            began = time.monotonic()
            try:
                killed, how = judge(copy, mutant)
            except Stale as stale:
                killed, how = False, f"no longer applies: {stale}"
            print(f"{mutant.name:30} {how} ({time.monotonic() - began:.0f} s)", flush=True)
            if not killed:
                wrong.append(mutant.name)
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} killed" + (f"; not: {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

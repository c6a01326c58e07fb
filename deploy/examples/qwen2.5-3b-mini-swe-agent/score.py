"""What a trial was worth: the share of its task's checks that pass.

The checks come from the task's own folder, which the agent never had, and run on a copy of what it left behind. A check has
passed if it said so at its end: a program that ends before, with exit code 0, has not. What is repaired is imported into the
check's process, so a program that is made to cheat still can.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_S = 60
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR")
"""Of the environment: what Python needs to start, and no keys of whoever trains."""


def score(task_folder: Path, workdir: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "work"
        shutil.copytree(workdir, copy, symlinks=True)
        checks = Path(folder) / "checks.py"
        shutil.copy(task_folder / "tests" / "checks.py", checks)
        passed, total = 0, len(names(checks))
        for name in names(checks):
            try:
                word = secrets.token_hex()
                code = (
                    f"import sys; sys.path[:0] = [{folder!r}, '.']; import checks; checks.{name}(); print('\\n{word}')"
                )
                done = subprocess.run(
                    [sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, errors="replace",
                    timeout=TIMEOUT_S, env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                continue
            passed += done.returncode == 0 and done.stdout.splitlines()[-1:] == [word]
    return {"reward": passed / total, "solved": float(passed == total)}


def names(checks: Path) -> list[str]:
    return [
        line.split()[1].partition("(")[0] for line in checks.read_text().splitlines() if line.startswith("def check_")
    ]


if __name__ == "__main__":  # python score.py TASK_FOLDER WORKDIR
    print(json.dumps(score(Path(sys.argv[1]), Path(sys.argv[2]))))

"""What a trial was worth: the share of its task's checks that pass.

The checks come from the task's own folder, which the agent never had, and run on a copy of what it left behind.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_S = 60


def score(task_folder: Path, workdir: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "work"
        shutil.copytree(workdir, copy, symlinks=True)
        checks = Path(folder) / "checks.py"
        shutil.copy(task_folder / "tests" / "checks.py", checks)
        passed, total = 0, len(names(checks))
        for name in names(checks):
            try:
                code = f"import sys; sys.path[:0] = ['.', {folder!r}]; import checks; checks.{name}()"
                done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue
            passed += done.returncode == 0
    return {"reward": passed / total, "solved": float(passed == total)}


def names(checks: Path) -> list[str]:
    return [
        line.split()[1].partition("(")[0] for line in checks.read_text().splitlines() if line.startswith("def check_")
    ]


if __name__ == "__main__":  # python score.py TASK_FOLDER WORKDIR
    print(json.dumps(score(Path(sys.argv[1]), Path(sys.argv[2]))))

"""The tutorial, walked as it is written: its files are saved, its commands are run in a shell, in their order.

Two things differ: the proxy's port, by the environment, and the number of steps, so that it ends sooner.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from steno.models import TINY
from tests.support.programs.ports import free_port
from tests.support.programs.stack import ROOT

pytestmark = [pytest.mark.loop, pytest.mark.timeout(1800)]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
_FILE = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEPS = 3
ENDS_S = 600


class Walk:
    """A folder, an environment, and the commands of the page that are still to come."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STENO_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
        self._environment = {
            **kept, "PATH": path, "PYTHONUNBUFFERED": "1", "HOME": str(folder),
            "MODEL": str(TINY), "OMP_NUM_THREADS": "1", "STENO_PORT": str(port), "STENO_PROXY": self.url,
            "PET_MASTER_PORT": str(free_port()),  # torchrun's own is the same for all
        }  # fmt: skip
        self.folder = folder / "greet"
        self.folder.mkdir()
        for name, text in _FILE.findall(PAGE):
            (self.folder / name).write_text(text)
        text = PAGE.replace("http://127.0.0.1:8000", self.url).replace("--total-steps 6", f"--total-steps {STEPS}")
        text = text.replace("--in-flight 16", "--in-flight 8")
        self._commands = iter(_SHELL.findall(text)[1:])  # the first makes the folder

    def next(self) -> subprocess.Popen[str]:
        log = (self.folder / "shell.log").open("a+")
        return subprocess.Popen(
            ["bash", "-euc", next(self._commands)], cwd=self.folder, env=self._environment, text=True,
            stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip

    def said(self) -> str:
        """The next commands, to their end; what they print."""
        with self.next() as shell:
            try:
                output, _ = shell.communicate(timeout=ENDS_S)
            finally:
                end(shell)
        assert shell.returncode == 0, self.log()
        return output

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        with self.next() as shell:
            try:
                yield shell
            finally:
                end(shell)

    def log(self) -> str:
        return (self.folder / "shell.log").read_text()[-6000:]


def end(shell: subprocess.Popen[str]) -> None:
    """As Ctrl-C would in its terminal; the patience is for a rollout's trials and a busy machine."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(shell.pid, number)
            shell.communicate(timeout=60)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    walk = Walk(tmp_path)
    with walk.running(), walk.running():
        until = time.monotonic() + 180
        while True:
            try:
                if httpx.get(f"{walk.url}/readyz", timeout=60).json().get("status") == "ok":
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < until, walk.log()
            time.sleep(0.2)
        assert "1 turn" in walk.said()
        assert "8 tasks, 64 trials with a reward, 0 without" in walk.said()
        with walk.running():
            walk.said()  # the trainer
        rewards = walk.said()
    batches = [json.loads(line) for line in (walk.folder / "metrics.jsonl").read_text().splitlines()]
    # A batch whose groups all have equal rewards is in the file too, and is no step.
    assert [batch["step"] for batch in batches if batch["stepped"]] == list(range(1, STEPS + 1))
    assert rewards.count("reward/mean") == len(batches) and "tokens" in rewards
    samples = [json.loads(line) for line in (walk.folder / "greet-samples.jsonl").read_text().splitlines()]
    assert samples and all(any(sample["loss_mask"]) for sample in samples)
    assert "second - first, paired by task:" in walk.said()

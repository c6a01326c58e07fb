"""TRL's asynchronous trainer on the demo's task, as processes: killed, and the proxy under it too.

`STENO_AGENTS_VENV` names the virtual environment of mini-swe-agent (made by `.ci/run`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from steno import Client
from steno.models import TINY
from tests.integration.loop.product import Product, product
from tests.integration.trl.shell_model import taught
from tests.support.programs.mini_agent import mini_server
from tests.support.programs.processes import until
from tests.support.programs.variables import without_settings
from tests.support.sources import ROOT, SOURCES

pytestmark = [pytest.mark.trl, pytest.mark.timeout(1800)]

RUN = "trl"
RISE = 0.25
WORKER = ("--engine", "transformers", "--worker-id", "w0", "--max-streams", "64")


@contextlib.contextmanager
def serving(folder: Path, model: Path) -> Iterator[Product]:
    worker = (*WORKER, "--model", str(model), "--staging-dir", str(folder / "staged"))
    with without_settings(), product(folder, worker=worker) as running:
        yield running


@dataclass
class TrlRun:
    """One start of the program. lines: what it said so far, a JSON object each."""

    process: subprocess.Popen[str]
    log: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    reader: threading.Thread = field(init=False)

    @classmethod
    @contextlib.contextmanager
    def started(cls, one: Product, **settings: Any) -> Iterator[TrlRun]:
        log = one.folder / f"trl-{len(list(one.folder.glob('trl-*.log')))}.log"
        given = {"proxy": one.url, "run": RUN, "out": str(one.folder / "out")} | settings
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.trl.program", json.dumps(given)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": SOURCES, "TRL_EXPERIMENTAL_SILENCE": "1"},
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        run = cls(process, log)
        run.reader = threading.Thread(target=run._read)
        run.reader.start()
        try:
            yield run
        finally:
            process.kill()
            process.wait()
            run.reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"'):
                self.lines.append(json.loads(line))

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "step" in line]

    @property
    def probed(self) -> list[float]:
        """After each push: how far the worker's log-probabilities were from the model's."""
        return [line["worst"] for line in self.lines if "pushed" in line]

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            ended = self.process.poll() is not None
            if ended:
                self.reader.join(60)  # it may have said more than was read
            found = any(line["step"] >= step for line in self.steps)
            assert found or not ended, self.log.read_text()[-4000:]
            return found

        until(reached, f"step {step}")

    def ended(self) -> int:
        return self.process.wait(1700)


def trained(steps: list[dict[str, Any]]) -> set[str]:
    return {name for line in steps for name in line["finished"]}


def test_rewards_rise_and_after_each_push_the_workers_logprobs_are_the_models(tmp_path: Path) -> None:
    """The worlds are the same in each run, and what is sampled is not: one run in many is no better after six steps. So each has
    as many as it needs, of 30. By chance two means of 64 rewards are a quarter higher once in ten thousand looks."""
    with serving(tmp_path, TINY) as one, TrlRun.started(one, steps=30, rows=64, max_staleness=1, rise=RISE) as run:
        assert run.ended() == 0, run.log.read_text()[-4000:]
    rewards = run.lines[-1]["rewards"]
    assert len(rewards) >= 3 and (sum(rewards[-2:]) - sum(rewards[:2])) / 2 > RISE, rewards
    assert len(run.probed) == len(run.steps) + 1 and max(run.probed) < 1e-4, run.probed


def test_no_group_is_lost_or_trained_twice_whoever_is_killed(tmp_path: Path) -> None:
    """mini-swe-agent with its shell, at temperature 0.7. The proxy is killed in the middle; the trainer at the end of step 3, of
    which the checkpoint of step 2 knows nothing; the next start is ended by Ctrl-C, while trials run. Trials of all kinds are in
    it: with a fork, with a partial turn, failed."""
    model = taught(tmp_path / "taught")
    agents = Path(os.environ["STENO_AGENTS_VENV"]) / "bin/python"
    with serving(tmp_path, model) as one, mini_server(agents) as mini:
        settings = {"size": 4, "rows": 8, "steps": 9, "temperature": 0.7, "model": str(model), "mini": str(mini)}
        with TrlRun.started(one, end=(3, "SIGKILL"), **settings) as first:
            first.until_step(1)
            one.restart_proxy()
            assert first.ended() == -signal.SIGKILL, first.log.read_text()[-4000:]
        kept = trained(first.steps[:2])
        restored, halfway = first.steps[1]["finished"], first.steps[1]["passed"]
        lost = trained(first.steps[2:]) - kept
        assert [line["step"] for line in first.steps] == [1, 2, 3] and kept and lost

        with TrlRun.started(one, end=(5, "SIGINT"), **settings) as second:
            assert second.ended() == -signal.SIGINT, second.log.read_text()[-4000:]
        assert [line["step"] for line in second.steps] == [3, 4, 5], "it went on from its checkpoint"
        for line in second.steps:
            assert len(set(line["finished"])) == len(line["finished"]), "a group was trained twice"
        again = trained(second.steps[:2]) - set(restored)
        assert not trained(second.steps) - set(restored) & kept, "what the checkpoint had is not trained again"
        assert min(len(first.probed), len(second.probed)) >= 3 and max(first.probed + second.probed) < 1e-4
        with Client(one.url) as client:
            view = client.run(RUN)
            places = {place.group_id: place for place in client.groups(RUN)}
            acknowledged = {name for name, place in places.items() if place.state == "acknowledged"}
            assert acknowledged == kept | again, "what the checkpoints have, and nothing else"
            for name in (lost | set(halfway) | trained(second.steps)) - acknowledged:
                assert places[name].state == "ready", "what was trained and lost is served again"
            everything = list(client.sessions(run_id=RUN))
            sessions = [session for name in acknowledged for session in client.sessions(group_id=name)]
            turns = [turn for session in sessions for turn in client.turns(session.trial_id)]
    assert view.groups.leased == 0
    # Which trials ran at the Ctrl-C, if any did, is a matter of speed; none is left open.
    assert not [session for session in everything if session.status == "open" and session.counts.turns]
    assert {session.status for session in sessions} == {"completed", "aborted"}, "a failed trial is in each group"
    # Whether the trial that hangs up did so before its answer was whole is one as well.
    assert any(turn.fork_reason == "new_conversation" for turn in turns)
    assert {turn.law["temperature"] for turn in turns} == {0.7}
    assert sum(bool(turn.reply.get("tool_calls")) for turn in turns) > len(sessions), "most used their shell"

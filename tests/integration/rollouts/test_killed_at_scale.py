"""A launcher that is killed with 200 trials in flight, and started again: none is lost, none is doubled, the ledger balances."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rollouts_stack import NULL
from steno.client.client import Client
from steno_rollouts.trials.proc import stat_of
from tests.integration.rollouts.conftest import ADMIN, SCRIPT, Rollout, until_served
from tests.support.machine.redis_server import RedisServer
from tests.support.programs.stack import Stack, running
from tests.support.records.groups import unaccounted

TRIALS, SIZE = 200, 8
SPOKEN = 96
"""Trials that have a turn on record when their launcher is killed; the others have none."""
AGENT = f"""#!/bin/bash
echo "$STENO_TRIAL_ID" >>"$STENO_TASK_FOLDER/ran"
if [ "$STENO_TASK_SPEAKS" = false ]; then : <"$STENO_TASK_GATE"; fi
exec bash {NULL}
"""


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Stack]:
    """A proxy with a Redis of its own."""
    redis = RedisServer()
    keys = ("--admin-key", ADMIN, "--worker-key", "worker-key")
    try:
        with running(tmp_path, None, proxy=[*keys, "--redis-url", redis.url]) as found:
            found.start_worker("--engine", "scripted", "--script", f"{SCRIPT}:reply", "--key", "worker-key")
            until_served(found)
            yield found
    finally:
        redis.close()


def _asleep(folder: Path) -> int:
    leaders = [said.split()[0] for path in folder.glob("*/pid") if (said := path.read_text())]
    return sum(stat_of(int(leader))[:1] == ["S"] for leader in leaders)


def test_two_hundred_trials_in_flight_survive_their_launcher(durable: Stack, tmp_path: Path) -> None:
    """Those with a turn on record end as interrupted and are not run again; the others are run again, and end with a reward."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    rollout, gate, ran, spoke = Rollout(durable, folder), folder / "gate", folder / "ran", folder / "spoke"
    os.mkfifo(gate)
    (folder / "agent.sh").write_text(AGENT)
    ran.touch()
    spoke.touch()
    given = {"folder": str(folder), "started": str(spoke), "gate": str(gate)}
    groups = TRIALS // SIZE
    tasks = rollout.tasks(*({"id": f"t{n}", "speaks": n < SPOKEN // SIZE, **given} for n in range(groups)))
    options = ("--run", "killed", "--group-size", str(SIZE), "--in-flight", str(TRIALS), "--confine", "off")
    command = ["bash", str(folder / "agent.sh")]
    with rollout.start(tasks, *options, "--purpose", "train", command=command) as first:
        limit = time.monotonic() + 400
        while len(ran.read_text().split()) < TRIALS or spoke.read_bytes().count(b"\n") < SPOKEN:
            assert time.monotonic() < limit and first.poll() is None, durable.logs()
            time.sleep(0.1)
        while _asleep(folder / "work") < TRIALS:  # each is at its gate
            assert time.monotonic() < limit
            time.sleep(0.1)
        first.send_signal(signal.SIGKILL)
        first.communicate()
    before = ran.read_text().split()
    gate.unlink()
    gate.touch()
    said = rollout(tasks, *options, "--purpose", "train", command=command)
    with Client(durable.url, ADMIN) as client:
        found = [session for session in client.sessions() if session.run_id == "killed"]
        view = client.run("killed")
    ends = Counter((session.status, session.end_reason, session.counts.turns) for session in found)
    assert ends == {("aborted", "interrupted", 1): SPOKEN, ("completed", "completed", 2): TRIALS - SPOKEN}, said
    spoken = {session.trial_id for session in found if session.end_reason == "interrupted"}
    names = {session.trial_id for session in found}
    assert len(names) == len(found) == TRIALS and sorted(before) == sorted(names), "each was in flight, once"
    again = ran.read_text().split()[TRIALS:]
    assert sorted(again) == sorted(names - spoken), "only what had no turn runs again, once"
    assert sorted(row["trial_id"] for row in rollout.rows()) == sorted(names), "each is told of once"
    assert view.rollouts_over and (view.groups.running, view.groups.empty) == (0, groups), (
        "a script spoke: nothing to train"
    )
    assert sum(view.sampled.values()) > 0 and unaccounted(view) == {}

"""`steno runs show`, against a real proxy and worker."""

from __future__ import annotations

import json
import subprocess
import sys

import openai

from steno.client.client import Client
from steno.contracts.rest import Completion, GroupSpec
from steno.contracts.runs.leases import LeaseRequest
from tests.support.programs import forked
from tests.support.programs.stack import Stack


def steno(stack: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "steno", *words, "--proxy", stack.url]
    return forked.run(command)


def shown(stack: Stack, *words: str) -> str:
    done = steno(stack, "runs", "show", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_shown_with_its_groups_and_tokens(stack: Stack) -> None:
    with Client(stack.url) as client:
        client.create_group(GroupSpec(group_id="shown", run_id="run-1", size=2))
        for trial_id in ("shown.0", "shown.1"):
            with openai.OpenAI(base_url=stack.base_url(trial_id), api_key="none") as agent:
                agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
            client.complete(trial_id, Completion(reward=1.0))
        assert client.lease(LeaseRequest(run_id="run-1", consumer="t")) == [], "a script spoke: nothing to train"
    lines = shown(stack, "run-1").splitlines()
    assert lines[0] == "groups: 0 running, 0 ready, 0 leased, 0 used, 0 acknowledged, 1 empty"
    assert lines[2].split() == ["version", "sampled", "synthetic", "leases"]
    view = json.loads(shown(stack, "run-1", "--json"))
    assert view["not_trained"]["synthetic"] == view["sampled"]
    nobody = steno(stack, "runs", "show", "nobody")
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "no run nobody is on record; `steno runs list` shows all that are" in nobody.stderr


def test_runs_groups_and_sessions_are_listed_newest_first_and_by_run(stack: Stack) -> None:
    with Client(stack.url) as client:
        for run, group in (("listed-1", "first"), ("listed-2", "second"), ("listed-2", "third")):
            client.create_group(GroupSpec(group_id=group, run_id=run, size=2))
        client.complete("second.0", Completion(reward=1.0))
    runs = [json.loads(line) for line in steno(stack, "runs", "list", "--json").stdout.splitlines()]
    assert [run["run_id"] for run in runs][:2] == ["listed-2", "listed-1"] and runs[0]["groups"]["running"] == 2
    assert steno(stack, "runs", "list").stdout.splitlines()[1].split()[:5] == ["listed-2", "2", "0", "0", "0"]
    groups = steno(stack, "groups", "list", "listed-2").stdout.splitlines()
    assert [line.split()[:4] for line in groups[1:]] == [
        ["third", "train", "running", "0/2"],
        ["second", "train", "running", "1/2"],
    ]
    words = ("sessions", "list", "--run", "listed-2", "--limit", "3", "--json")
    first = steno(stack, *words)
    found = [json.loads(line)["trial_id"] for line in first.stdout.splitlines()]
    assert found == ["third.1", "third.0", "second.1"]
    rest = steno(stack, *words, "--cursor", first.stderr.split("--cursor ")[1].strip())
    assert [json.loads(line)["trial_id"] for line in rest.stdout.splitlines()] == ["second.0"] and rest.stderr == ""

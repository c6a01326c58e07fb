"""`steno runs show`, against a real proxy and worker."""

from __future__ import annotations

import json
import subprocess
import sys

import openai

from proxy.client import Steno
from proxy.contracts.leases import LeaseRequest
from proxy.contracts.rest import Completion, GroupSpec
from tests.support.stack import ROOT, Stack


def shown(stack: Stack, *words: str) -> str:
    command = [sys.executable, "-m", "steno", "runs", "show", *words, "--url", stack.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_shown_with_its_groups_and_tokens(stack: Stack) -> None:
    with Steno(stack.url) as client:
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
    assert shown(stack, "nobody") == "nothing is on record of a run nobody\n"

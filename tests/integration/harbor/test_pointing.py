"""The table of pointings, against Harbor's own code."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from steno_rollouts.trials.harbor.outcome import KINDS
from steno_rollouts.trials.harbor.pointing import OWN, POINTINGS, Addresses
from tests.integration.harbor.conftest import PROGRAMS, PYTHON

pytestmark = pytest.mark.harbor

URLS = {"openai": "http://proxy:8000/t.0/v1", "anthropic": "http://proxy:8000/t.0", "gemini": "http://proxy:8000/t.0"}
ADDRESSES = Addresses(URLS, "sk-trial")
NOT_DECLARED = frozenset("computer-1 terminus-2 copilot-cli".split())
"""Pointed by what their own code reads, of which Harbor's interface tells nothing."""


@pytest.fixture(scope="module")
def constructed() -> dict[str, Any]:
    rows = {
        name: row.agent(ADDRESSES, "policy")
        for name, row in POINTINGS.items()
        if row.refused is None and row is not OWN
    }
    done = subprocess.run(
        [PYTHON, "-I", PROGRAMS / "construct.py"], input=json.dumps(rows), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_table_has_each_agent_of_harbor(constructed: dict[str, Any]) -> None:
    assert sorted(POINTINGS) == constructed["names"]


def test_harbor_takes_each_row_and_asks_where_it_says(constructed: dict[str, Any]) -> None:
    rows = {name: found for name, found in constructed.items() if name != "names"}
    assert {name: found["lacks"] for name, found in rows.items() if "lacks" in found} == {}
    for name, found in rows.items():
        said = json.dumps([found["env"], found["options"], found["url"]])
        assert any(url in said for url in URLS.values()) and "{" not in found["model"], (name, found)
        if found["declared"] and name not in ("deerflow",):
            assert found["url"] in URLS.values() and found["key"] == "sk-trial", (name, found)


def test_the_table_of_ends_has_each_exception_that_harbor_names() -> None:
    program = """
import inspect, harbor.trial.errors as trial, harbor.agents.installed.base as agent, harbor.verifier.verifier as verifier
import harbor.environments.base as environment
print(*sorted({name for module in (trial, agent, verifier, environment) for name, found in vars(module).items()
    if inspect.isclass(found) and issubclass(found, Exception) and found.__module__ == module.__name__}))
"""
    said = subprocess.run([PYTHON, "-I", "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {"AgentTimeoutError", "RewardFileNotFoundError", "ApiError"} <= set(said)
    assert set(said) - set(KINDS) - ELSEWHERE == set()


ELSEWHERE = frozenset("ServiceOperationsUnsupportedError".split())
"""Raised in any part of a trial: that part says what it means."""

"""The launcher's side of the process that keeps pods."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from steno_rollouts.trials.harbor.kubernetes.fleet import Fleet, PodsError
from steno_rollouts.trials.harbor.kubernetes.options import KubernetesOptions

KEEPER = """#!{python}
import json, sys

from pathlib import Path

with Path({started!r}).open("a") as file:
    file.write("started ")
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    answer = {{"error": "the API server refused"}} if number == 0 else {{"found": []}}
    print(json.dumps({{"id": asked["id"], **answer}}), flush=True)
"""


async def test_a_cluster_that_refused_once_is_asked_again_for_the_next_trial(tmp_path: Path) -> None:
    started = tmp_path / "started"
    keeper = tmp_path / "python"
    keeper.write_text(KEEPER.format(python=sys.executable, started=str(started)))
    keeper.chmod(0o755)
    fleet = Fleet(keeper, KubernetesOptions(), "run")
    try:
        with pytest.raises(PodsError, match="the API server refused"):
            await fleet.begun()
        await fleet.begun()
        await fleet.begun()
        assert started.read_text() == "started ", "one process for all"
    finally:
        fleet.close()

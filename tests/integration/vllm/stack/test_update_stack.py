"""Policy updates through the whole product with the real engine: answers on their way while weights change twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from steno.models import TINY
from tests.support.programs.processes import until
from tests.support.programs.stack import Stack, running
from tests.support.weights.trained import perturbed, update_of
from tests.support.workers.updating import Answer, check_turn, committed, control, publish

pytestmark = pytest.mark.vllm

VLLM = ["--engine", "vllm", "--model", str(TINY), "--worker-id", "w0", "--"]
ARGUMENTS = ["--enforce-eager", "--dtype=float32", "--max-num-seqs=8", "--max-model-len=8192"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("stack"), None) as one:
        one.start_worker(*VLLM, *ARGUMENTS)
        one.wait_for_model(600)
        yield one


def test_answers_on_their_way_are_of_three_versions_and_recorded_so(stack: Stack, tmp_path: Path) -> None:
    """The first update comes by the file system, the second through the proxy."""
    models = {"base/0": perturbed(TINY, 0, scale=0.0)} | {f"run/{step}": perturbed(TINY, step) for step in (1, 2)}
    specs = {}
    for step, transport in ((1, "filesystem"), (2, "stream")):
        folder = tmp_path / f"w{step}"
        location = str(folder) if transport == "filesystem" else ""
        specs[folder] = update_of(models[f"run/{step}"], folder, step, transport=transport, location=location)
    answers = [Answer(stack, f"trial-{index}", 7000, seed=index) for index in range(2)]
    with control(stack) as client:
        for folder, spec in specs.items():
            had = [answer.chunks for answer in answers]
            until(lambda had=had: all(answer.chunks > before + 20 for answer, before in zip(answers, had, strict=True)))
            update = publish(client, spec, folder)
            assert update.state == "done" and update.workers[0].state == "served", update
        had = [answer.chunks for answer in answers]
        until(lambda: all(answer.chunks > before + 20 for answer, before in zip(answers, had, strict=True)))
        for index, answer in enumerate(answers):
            answer.enough = True
            answer.wait()
            check_turn(committed(stack, f"trial-{index}"), models, ["base/0", "run/1", "run/2"])
        Answer(stack, "later", 20).wait()
        check_turn(stack.turns("later")[0], models, ["run/2"])
        assert client.policies()[0].workers == {"run/2": ["w0"]}

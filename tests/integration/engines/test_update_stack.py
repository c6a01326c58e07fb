"""Policy updates through the whole product, with the embedded engine: proxy and workers are processes, and some are killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from steno.client.client import Client
from steno.models import TINY
from tests.support.programs.processes import until
from tests.support.programs.stack import Stack, running
from tests.support.weights.trained import perturbed, update_of
from tests.support.workers.updating import Answer, check_turn, committed, control, publish, upload, version_in_force

WORKER = ["--engine", "transformers", "--model", str(TINY)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running(tmp_path / "stack", [*WORKER, "--worker-id", "w0", "--staging-dir", str(tmp_path / "w0")]) as one:
        yield one


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with control(stack) as one:
        yield one


def connected(stack: Stack) -> list[str]:
    return sorted(worker["id"] for worker in stack.get("/workers")["items"] if worker["connected"])


@pytest.mark.parametrize("transport", ["filesystem", "stream"])
def test_answers_on_their_way_are_of_three_versions_and_recorded_so(
    stack: Stack, client: Client, tmp_path: Path, transport: str
) -> None:
    models = {f"run/{step}": perturbed(TINY, step) for step in (1, 2)} | {"base/0": perturbed(TINY, 0, scale=0.0)}
    location = {} if transport == "filesystem" else {"location": ""}
    specs = {
        step: update_of(models[f"run/{step}"], tmp_path / f"w{step}", step, transport=transport, **location)
        for step in (1, 2)
    }
    answers = [Answer(stack, f"trial-{index}", 14000, seed=index) for index in range(2)]
    for step in (1, 2):
        had = [answer.chunks for answer in answers]
        until(lambda had=had: all(answer.chunks > before + 20 for answer, before in zip(answers, had, strict=True)))
        update = publish(client, specs[step], tmp_path / f"w{step}")
        assert update.state == "done", update
        (worker,) = update.workers
        assert worker.state == "served" and worker.pause_s is not None and worker.load_s is not None
    had = [answer.chunks for answer in answers]
    until(lambda: all(answer.chunks > before + 20 for answer, before in zip(answers, had, strict=True)))
    for index, answer in enumerate(answers):
        answer.enough = True
        answer.wait()
        check_turn(committed(stack, f"trial-{index}"), models, ["base/0", "run/1", "run/2"])
    Answer(stack, "later", 20).wait()
    check_turn(stack.turns("later")[0], models, ["run/2"])
    assert version_in_force(client) == "run/2"
    # The last one is kept, to go back to; the one before is removed by a thread of the worker.
    until(lambda: len(list((tmp_path / "w0").glob("*"))) == (transport == "stream"))


def test_a_worker_killed_while_it_receives_goes_on_where_it_was_and_then_serves(
    stack: Stack, client: Client, tmp_path: Path
) -> None:
    model, folder = perturbed(TINY, 1), tmp_path / "w1"
    spec = update_of(model, folder, 1, transport="stream", location="")
    update = client.post_update(spec)
    until(lambda: client.update(update.update_id).wants)
    upload(client, client.update(update.update_id), folder, 600_000)
    until(lambda: [path.stat().st_size for path in (tmp_path / "w0").rglob("*") if path.is_file()] == [600_000])
    stack.workers[0].kill()
    stack.workers[0].wait()
    stack.workers.clear()
    stack.start_worker(*WORKER, "--worker-id", "w0", "--staging-dir", str(tmp_path / "w0"), name="again")
    until(lambda: connected(stack) == ["w0"])
    until(lambda: [want.offset for want in client.update(update.update_id).wants] == [600_000])
    assert publish(client, spec, folder).workers[0].state == "served"
    Answer(stack, "later", 20).wait()
    check_turn(stack.turns("later")[0], {"run/1": model}, ["run/1"])


def test_a_worker_killed_while_it_loads_catches_up_before_it_gets_a_turn(
    stack: Stack, client: Client, tmp_path: Path
) -> None:
    stack.start_worker(*WORKER, "--worker-id", "w1", name="second")
    until(lambda: connected(stack) == ["w0", "w1"])
    model, folder = perturbed(TINY, 1), tmp_path / "w1"
    update = client.post_update(update_of(model, folder, 1))
    until(lambda: any(worker.state in ("loading", "served") for worker in client.update(update.update_id).workers))
    stack.workers[0].kill()
    stack.workers[0].wait()
    del stack.workers[0]
    stack.start_worker(*WORKER, "--worker-id", "w0", name="again")
    until(lambda: client.update(update.update_id).state == "done")
    trials = [f"trial-{index}" for index in range(12)]
    for answer in [Answer(stack, trial, 5) for trial in trials]:
        answer.wait()
    until(lambda: client.policies()[0].workers == {"run/1": ["w0", "w1"]})
    for trial in [*trials, *(f"later-{index}" for index in range(12))]:
        if trial.startswith("later"):
            Answer(stack, trial, 5).wait()
        check_turn(stack.turns(trial)[0], {"run/1": model}, ["run/1"])


def test_bad_weights_are_named_and_the_old_ones_go_on(stack: Stack, client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "w1"
    spec = update_of(perturbed(TINY, 1), folder, 1)
    path = folder / spec.manifest.shards[1].name
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    answer = Answer(stack, "trial", 14000)
    until(lambda: answer.chunks > 5)
    update = publish(client, spec, folder)
    assert update.state == "failed"
    assert path.name in (update.workers[0].error or "") and "digest" in (update.workers[0].error or "")
    had = answer.chunks
    until(lambda: answer.chunks > had + 20)
    answer.enough = True
    answer.wait()
    check_turn(committed(stack, "trial"), {"base/0": perturbed(TINY, 0, scale=0.0)}, ["base/0"])


def test_weights_that_fail_their_probe_get_no_turns_until_the_worker_has_caught_up(
    stack: Stack, client: Client, tmp_path: Path
) -> None:
    good, bad = perturbed(TINY, 1), perturbed(TINY, 2)
    assert publish(client, update_of(good, tmp_path / "w1", 1), tmp_path / "w1").state == "done"
    spec = update_of(bad, tmp_path / "w2", 2)
    assert spec.probe is not None
    spec.probe.logprobs[0] -= 0.5
    update = publish(client, spec, tmp_path / "w2")
    assert update.state == "failed" and "probe" in (update.workers[0].error or "")
    # It goes back to the version in force, and serves again.
    until(lambda: client.policies()[0].workers == {"run/1": ["w0"]})
    time.sleep(0.1)
    Answer(stack, "later", 20).wait()
    check_turn(stack.turns("later")[0], {"run/1": good}, ["run/1"])

"""The README's `steno train` at its defaults: bfloat16, two ranks, the shipped model, a worker that computes in float32. Then
what is on record of it once more, offline: with other rewards, which a metric of the trials tells the trainer."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from steno.models import TINY
from tests.integration.loop.product import GROUPS_PER_STEP, RUN, SLOW_S, Product, rolling, thread
from tests.support.programs.stack import ROOT

pytestmark = pytest.mark.loop


async def test_the_readmes_command_trains_and_every_version_is_served(one: Product) -> None:
    async with rolling(one, "task"):
        words = ["--model", str(TINY), "--run", RUN, "--groups-per-step", str(GROUPS_PER_STEP), "--total-steps", "2"]
        trainer = one.train_plainly(*words)
        await thread(trainer.wait)
    assert [line["step"] for line in trainer.steps] == [1, 2]
    assert "does not serve" not in trainer.log.read_text() and "was not taken" not in trainer.log.read_text()
    newest = trainer.steps[-1]["version"]
    assert one.in_force() == newest and newest.endswith("/2")
    (worker,) = one.stack.get("/workers")["items"]
    assert worker["healthy"] and worker["models"][0]["policy_version"] == newest
    await thread(trained_again_with_rewards_the_other_way, one)


OTHER_WAY = """
def other_way(transcript):
    reward = transcript.session.reward
    return None if reward is None else {"reward": 0.5, "before": reward}
"""


def trained_again_with_rewards_the_other_way(one: Product) -> None:
    """`steno rescore` and `steno train --offline`, as processes: every odd trial was worth 1. All rewards are equal now, and what
    it was worth is a metric that counts against it."""
    (one.folder / "score.py").write_text(OTHER_WAY)
    words = ["--run", RUN, "--as", "again", "--reward", f"{one.folder / 'score.py'}:other_way", "--proxy", one.url]
    done = subprocess.run(
        [sys.executable, "-m", "steno", "rescore", *words], cwd=ROOT, capture_output=True, text=True, timeout=SLOW_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with one.client() as client:
        view, in_force = client.run("again"), one.in_force()
        assert view.borrowed and not view.sampled
        trainer = one.train(
            name="again", run="again", offline=True, spy=True, ranks=1, probe_tokens=64, probe_tolerance=None,
            estimator="gdpo", gdpo_metrics=["before=-2"],
        )  # fmt: skip
        trainer.wait()
        after = client.run("again")
        scored = [session.trial_id for session in client.sessions(run_id="again") if session.reward is not None]
    assert (after.groups.acknowledged, after.groups.ready) == (view.groups.ready, 0)
    advantages: dict[str, float] = {}
    for file in trainer.folder.glob("batch-*.pickle"):
        advantages |= pickle.loads(file.read_bytes()).advantages
    pairs = [trial.removesuffix(".0") for trial in scored if trial.endswith(".0") and f"{trial[:-1]}1" in scored]
    assert trainer.steps and len(pairs) >= 2 * GROUPS_PER_STEP
    assert all(advantages[f"{group}.0"] > 0 > advantages[f"{group}.1"] for group in pairs), advantages
    saved = trainer.saved()["ledger"]
    saved.check()
    for version, tokens in view.borrowed.items():
        elsewhere = sum(by_version.get(version, 0) for by_version in after.not_trained.values())
        assert tokens == saved.accounts()[version].sampled + elsewhere, version
    assert one.in_force() == in_force, "nobody is given weights"

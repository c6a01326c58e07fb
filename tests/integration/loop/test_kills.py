"""Something is killed (SIGKILL) while the loop runs: what was promised holds, and the loop goes on."""

from __future__ import annotations

import signal

import pytest

from steno.contracts.runs.leases import RunView
from steno_cli.terminal.output import EXIT_OTHER_TRAINER
from steno_trainer.data.ledger import Reason
from tests.integration.loop.product import RUN, SLOW_S, Product, Trainer, rolling, thread
from tests.support.programs.processes import until

pytestmark = pytest.mark.loop


@pytest.mark.timeout(1800)
async def test_a_trainer_killed_in_a_step_after_a_push_and_before_an_acknowledgement(one: Product) -> None:
    """Checkpoints every two steps, and leases that last. The first trainer has saved step 2 and pushed step 3 when it is killed
    in step 4. The second goes on from step 2 in a lineage of its own, with the groups that the first one had, and is killed when
    step 4 is saved and nothing is acknowledged. The third takes no group for a second time, and loses none (I4, I10)."""
    # Some groups are started beside what admission lets in: so the trainers' bound is wider than its.
    settings = {"checkpoint_every": 2, "lease_ttl_s": 240, "max_staleness_steps": 4}
    async with rolling(one, "task"):
        first = one.train(die="steno_trainer.model.zero_engine:PolicyEngine.update:4", **settings)
        await thread(first.died)
        assert [step["step"] for step in first.steps] == [1, 2, 3]
        acknowledged = set(first.saved()["trained_groups"])
        [_, (a, at)] = first.saved()["path"]
        assert at == 2
        await thread(until, lambda: one.in_force() == f"{a}/3", "the weights of step 3 were pushed")
        async with rolling(one, "lost", groups=1, bounded=False) as lost:
            await lost

        with one.client() as client:
            had = await thread(client.run, RUN)
        assert had.groups.leased + had.groups.used >= 4, "nobody gives back what it had"
        second = one.train(die="steno_trainer.data.lease_feed:LeaseFeed.acknowledge:1", **settings)
        await thread(second.died)
        saved = second.saved()
        [_, _, (b, at)] = saved["path"]
        assert b != a and at == 4
        # What it names beside those of the first checkpoint, which were acknowledged after that was written.
        left = set(saved["trained_groups"]) - acknowledged
        assert len(left) >= 4
        by_second = one.in_force()
        assert by_second in (f"{b}/2", f"{b}/3")
        async with rolling(one, "left", groups=1, bounded=False) as more:
            await more

        third = one.train(total_steps=8, **settings)
        await thread(third.wait)
    saved = third.saved()
    [_, _, _, (c, at)] = saved["path"]
    assert c not in (a, b) and at == 8
    assert third.log.read_text().count("was trained before: acknowledged") == len(left)
    assert one.in_force() == f"{c}/8"
    lost = saved["ledger"].accounts()[f"{a}/3"]
    assert lost.trained > 0, "what weights sampled that no checkpoint has is trained"
    untrained = saved["ledger"].total().untrained
    assert not {Reason.ORPHANED, Reason.STALE} & untrained.keys(), untrained
    view: RunView = await thread(one.balance, third)
    assert {f"{a}/3", by_second} <= view.sampled.keys()
    assert {f"{c}/{step}" for step in (5, 6, 7)} & view.sampled.keys()


@pytest.mark.timeout(1800)
async def test_a_trainer_that_another_one_takes_over_from_ends_and_is_not_started_again(one: Product) -> None:
    """All ranks of the first one end; its code says why. The second goes on from its checkpoint with its groups."""
    # Longer than all this takes, so that leases are taken over, and shorter than `balance` waits: what is being leased in the
    # moment in which a trainer is told to stop stays leased until its time is over.
    settings = {"lease_ttl_s": 150, "max_staleness_steps": 4}
    async with rolling(one, "task"):
        first = one.train(**settings)
        await thread(first.until, lambda: first.steps, "a first step")
        second = one.train(take_over=True, **settings)
        assert await thread(first.process.wait, SLOW_S) == EXIT_OTHER_TRAINER, first.said()
        said = first.log.read_text(errors="replace")  # in the proxy's words, or in those of the folder that both share
        assert "taken over" in said and "(epoch 2)" in said, said[-4000:]
        before = first.steps
        await thread(second.until, lambda: len(second.steps) > len(before), "a step of the second one")
        second.process.send_signal(signal.SIGTERM)
        await thread(second.process.wait)
    saved = second.saved()
    assert len(saved["path"]) == 3, saved["path"]
    assert Reason.ORPHANED not in saved["ledger"].total().untrained
    await thread(one.balance, second)


@pytest.mark.timeout(1800)
async def test_a_worker_then_the_proxy_killed_in_an_update(one: Product) -> None:
    """Weights travel through the proxy, so that either death cuts the way."""
    async with rolling(one, "task"):
        trainer = one.train(transport="stream")
        await thread(trainer.until, lambda: len(trainer.steps) >= 1, "a first step")
        version = await thread(one.stopped_in_an_update, trainer)
        await thread(one.restart_worker)
        await thread(served, one, trainer, version)
        version = await thread(one.stopped_in_an_update, trainer)
        await thread(one.restart_proxy)
        one.stack.workers[0].send_signal(signal.SIGCONT)
        await thread(served, one, trainer, version)
        steps = len(trainer.steps)
        await thread(trainer.until, lambda: len(trainer.steps) >= steps + 2, "two more steps")
        trainer.process.send_signal(signal.SIGTERM)
        await thread(trainer.process.wait)
    assert trainer.saved()["path"][-1][1] == trainer.steps[-1]["step"]
    await thread(one.balance, trainer)


def served(one: Product, trainer: Trainer, version: str) -> None:
    lineage, step = version.split("/")

    def it_is() -> bool:
        now = (one.in_force() or "none/0").split("/")
        return now[0] == lineage and int(now[1]) >= int(step)

    trainer.until(it_is, f"{version} or a later one is served")

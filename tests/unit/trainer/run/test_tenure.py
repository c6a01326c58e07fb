"""Taking a run over, keeping it, losing it: the proxy is played at its client's seam."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from steno.contracts.errors import BadRequest, Forbidden, StenoError, Superseded, TrainerAlive, Unreachable
from steno.contracts.runs.leases import Tenure
from steno_trainer.run import tenure as tenure_module
from steno_trainer.run.tenure import TenureHolder

WAIT_S = 30.0


class Proxy:
    """Answers each call with what is next, and with success after that."""

    def __init__(self, *taking: StenoError, beating: tuple[StenoError, ...] = ()) -> None:
        self.taking, self.beating = list(taking), list(beating)
        self.forced: list[bool] = []
        self.beats: list[bool] = []
        self.beaten = threading.Event()
        self.first = 4  # the epoch that heartbeats are to say

    def take_over(self, run_id: str, trainer: str, *, force: bool = False) -> Tenure:
        self.forced.append(force)
        if self.taking:
            raise self.taking.pop(0)
        return Tenure(run_id=run_id, trainer=trainer, epoch=4)

    def heartbeat(self, run_id: str, trainer: str, epoch: int, *, leaving: bool = False) -> Tenure:
        assert (run_id, trainer, epoch) == ("r", "t", self.first)
        self.beats.append(leaving)
        if self.beating:
            raise self.beating.pop(0)
        self.beaten.set()
        return Tenure(run_id=run_id, trainer=trainer, epoch=epoch)


def take(proxy: Proxy, slept: list[float], **options: Any) -> TenureHolder:
    return TenureHolder.take(proxy, "r", "t", sleep=slept.append, now=lambda: sum(slept), **options)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenure_module, "HEARTBEAT_S", 0.01)


def alive() -> TrainerAlive:
    return TrainerAlive("it was heard of 3 s ago", retry_after_s=12.0)


def test_a_trainer_that_died_a_moment_ago_is_waited_for_once() -> None:
    slept: list[float] = []
    with take(Proxy(alive()), slept) as hold:
        assert hold.epoch == 4
    assert slept == [12.5]


def test_a_proxy_that_has_lost_its_memory_is_told_of_the_epochs_there_were() -> None:
    """Else the run could never be saved again: its folder knows of a trainer with a newer epoch."""
    proxy = Proxy()
    proxy.first = 8
    with take(proxy, [], known=7) as hold:
        assert hold.epoch == 8
    with take(Proxy(), [], known=3) as hold:
        assert hold.epoch == 4


def test_a_trainer_that_lives_is_left_alone() -> None:
    slept: list[float] = []
    with pytest.raises(TrainerAlive, match="3 s ago"):
        take(Proxy(alive(), alive()), slept)
    assert slept == [12.5]
    proxy = Proxy()
    take(proxy, slept, force=True).close()
    assert proxy.forced == [True]


def test_a_proxy_that_is_away_is_waited_for_and_one_that_refuses_is_not() -> None:
    slept: list[float] = []
    take(Proxy(Unreachable("away"), Unreachable("away")), slept).close()
    assert slept == [2.0, 2.0]
    with pytest.raises(Unreachable):
        take(Proxy(*[Unreachable("away")] * 20), [], patience_s=10.0)
    with pytest.raises(Forbidden):
        take(Proxy(Forbidden("no")), [])
    with pytest.raises(BadRequest):
        take(Proxy(BadRequest("trainer: too long", field="trainer")), [])


def test_a_proxy_of_an_older_release_has_no_trainers() -> None:
    proxy = Proxy(BadRequest("POST /runs/r/trainer is not served here: use GET (request 1)"))
    with take(proxy, []) as hold:
        assert hold.epoch is None
    assert proxy.beats == []


def test_it_is_heard_of_until_it_leaves() -> None:
    proxy = Proxy(beating=(Unreachable("away"),))
    with take(proxy, []):
        assert proxy.beaten.wait(WAIT_S), "what fails once is tried again"
    assert proxy.beats[-1] is True and proxy.beats.count(True) == 1


@pytest.mark.parametrize("late", [False, True], ids=["told", "told what was before"])
def test_who_is_superseded_is_told_and_does_not_say_that_it_leaves(late: bool) -> None:
    told: list[Superseded] = []
    heard = threading.Event()

    def tell(error: Superseded) -> None:
        told.append(error)
        heard.set()

    proxy = Proxy(beating=(Superseded("epoch 5"),))
    with take(proxy, []) as hold:
        if late:
            until(lambda: hold.lost is not None)
        hold.on_lost(tell)
        assert heard.wait(WAIT_S)
    assert [str(error) for error in told] == ["epoch 5"]
    assert proxy.beats == [False]


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise TimeoutError

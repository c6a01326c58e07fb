"""Which failures stop the rollouts, and which are one trial's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from steno_rollouts.groups.first_turns import FirstTurns
from steno_rollouts.outcome import CommandOutcome, EndReason
from steno_rollouts.trials.executor import Exit
from steno_rollouts.trials.runner import FailedTrial
from steno_rollouts.trials.workdir import last_line


def failed(number: int) -> FailedTrial:
    return FailedTrial(cast(Any, number), CommandOutcome(EndReason.EXIT_CODE), 0.0, 1, Exit(1), Path("x"))


async def test_trials_begin_one_at_a_time_until_one_has_had_its_first_turn() -> None:
    first = FirstTurns(5)
    begun = await first.begin()
    assert begun == (0, True)
    second = asyncio.create_task(first.begin())
    await asyncio.sleep(0)
    assert not second.done()
    assert not first.failed(0, failed(0))
    first.over(begun)
    assert await second == (1, True), "the first one has failed: the next one is alone, too"
    others = [asyncio.create_task(first.begin()) for _ in range(3)]
    first.over(begun)
    await asyncio.sleep(0)
    assert not any(other.done() for other in others), "the first one was over before"
    assert first.reached(1) == [failed(0)]
    first.over(await second)
    assert [(await other).alone for other in others] == [False] * 3
    assert (await FirstTurns(0).begin()).alone is False


def test_so_many_in_a_row_stop_it_and_one_that_began_later_and_came_further_ends_the_row() -> None:
    first = FirstTurns(3)
    for number in (2, 5):
        assert not first.failed(number, failed(number))
    assert first.reached(4) == [failed(2)], "5 began later than what has come further"
    assert first.reached(1) == []
    assert not first.failed(6, failed(6))
    assert first.failed(9, failed(9)) and first.stopped is None
    first.stop()
    assert first.stopped == failed(9) and sorted(first.held) == [5, 6, 9]
    assert first.let_go() == [failed(5), failed(6), failed(9)] and first.held == {}


def test_what_is_given_up_unexplained_still_counts_until_a_later_trial_comes_further() -> None:
    first = FirstTurns(3)
    assert not first.failed(0, failed(0)) and not first.failed(1, failed(1))
    assert first.let_go() == [failed(0), failed(1)] and first.in_a_row == 2 and not first.proven
    assert first.failed(2, failed(2)), "the third in a row"
    assert first.reached(3) == [failed(2)] and first.in_a_row == 0 and first.proven
    assert not first.failed(4, failed(4))


def test_what_a_command_said_last_is_one_line_that_can_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    assert last_line(path) == ""
    path.write_bytes(b"one\n" * 5000 + b"agent.sh: \x1b[31mmini: not found\xff\r\n\n")
    assert last_line(path) == "agent.sh:  [31mmini: not found\ufffd"
    path.write_text("x" * 9000)
    assert last_line(path) == "x" * 200

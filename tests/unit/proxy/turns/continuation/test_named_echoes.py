"""Echoes that are told apart by their call ids alone, remembered: each stands for the turn that it names."""

from __future__ import annotations

import pytest

from steno_proxy.turns.continuation import Plan
from tests.unit.proxy.sessions.agent import assistant, tool
from tests.unit.proxy.trial import HI, Trial

FOREIGN = ("call_ffffffffffff_0", "ls", "{}")


def call(number: int) -> tuple[str, str, str]:
    return f"call_{number:012x}_0", "ls", "{}"


async def siblings(*texts: str) -> Trial:
    """Turns that were asked the same and made the same call, beside other texts."""
    trial = Trial()
    for number, text in enumerate(texts):
        await trial.said(text, calls=assistant("", call(number))["tool_calls"])
    return trial


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_a_bare_call_goes_on_from_the_turn_that_it_names_whichever_came_first(order: tuple[int, int]) -> None:
    trial = await siblings("I look.", "Let me see.")

    async def go_on(number: int) -> Plan:
        return await trial.asked(HI, assistant("", call(number)), tool(call(number)[0], "a file"))

    for number in (*order, *order):
        found = await go_on(number)
        assert (found.parent, found.echoed_as) == (number, "calls")
        assert found.job.messages[1]["content"] == ("I look.", "Let me see.")[number]
    assert len((await trial.recorder.enter("t")).echoes) == 2


async def test_the_same_of_calls_in_a_run_of_neighbours() -> None:
    trial = await siblings("I look.\n", "\nI look.")
    for number in (0, 1, 0):
        said = [assistant("I look."), assistant("", call(number))]
        found = await trial.asked(HI, *said, tool(call(number)[0], "a file"))
        assert found.parent == number


async def test_ids_of_other_trials_name_nothing() -> None:
    trial = await siblings("I look.\n")
    found = await trial.asked(HI, assistant("I look.", FOREIGN), tool(FOREIGN[0], "a file"))
    assert (found.parent, found.echoed_as) == (0, "space")
    assert [named for _, _, named in (await trial.recorder.enter("t")).echoes] == [""]

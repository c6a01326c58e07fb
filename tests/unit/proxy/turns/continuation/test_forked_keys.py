"""A forked trial finds what its origin was asked, whichever version recorded that."""

from __future__ import annotations

from steno.contracts.chat import CanonicalRequest, Job, Message
from steno.contracts.records import ForkOf, Timings, Turn
from steno_proxy.sessions.messages.normalise import options_digest
from steno_proxy.sessions.origin import ForkOrigin
from steno_proxy.turns.continuation import Plan
from steno_proxy.turns.forked import key_of
from tests.unit.proxy.sessions.agent import assistant, tool
from tests.unit.proxy.trial import HI, ON, TOOL

CALLS = [(f"call_000000000000_{i}", "f", "{}") for i in range(2)]
RESULTS = [tool(call[0], "x") for call in CALLS]
APART = [assistant("", CALLS[0]), RESULTS[0], assistant("", CALLS[1]), RESULTS[1]]
OPTIONS = options_digest({})


def origin(asked: list[Message], parent: str | None) -> ForkOrigin:
    """Two turns, then one that the trial is forked at; the second was asked this after its parent."""
    found = ForkOrigin(ForkOf(trial_id="o", turn_id=f"{2:012x}"))
    made = ((None, [HI], assistant("", *CALLS)), (parent, asked, assistant("D")), (f"{1:012x}", [ON], assistant("E")))
    for number, (before, messages, reply) in enumerate(made):
        turn = Turn(
            turn_id=f"{number:012x}", index=number, parent_id=before, messages=messages, reply=reply, tools=TOOL,
            timings=Timings(queued=float(number)),
        )  # fmt: skip
        found.add(turn)
    found.settle(turn)
    return found


def asked(messages: list[Message]) -> tuple[CanonicalRequest, Plan]:
    """The second request as it is read now: its calls are one reply, after the first turn."""
    whole = [HI, assistant("", *CALLS), *RESULTS]
    plan = Plan(Job(messages=whole, tools=TOOL), whole, [], b"", OPTIONS, parent=0, parent_id=f"{0:012x}")
    plan.prefix = plan.prefix._replace(messages=2)
    return CanonicalRequest("openai.chat", "m", Job(messages=messages, tools=TOOL)), plan


def test_calls_that_an_older_version_recorded_apart_are_found_as_the_whole_conversation() -> None:
    said, plan = asked([HI, *APART])
    older, newer = origin([HI, *APART], None), origin(RESULTS, f"{0:012x}")
    for one in (older, newer):
        answer = one.answer(key_of(one, said, plan), 1, {f"{0:012x}"})
        assert answer is not None and [turn.turn_id for turn in answer.turns] == [f"{1:012x}"]


def test_what_it_was_not_asked_is_not_found_in_either_way() -> None:
    said, plan = asked([HI, assistant("", CALLS[0]), RESULTS[0]])
    one = origin([HI, *APART], None)
    assert one.answer(key_of(one, said, plan), 1, {f"{0:012x}"}) is None

"""Of all ways to read a request's neighbours, that one is found which an exhaustive search finds, at a bounded cost."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steno.contracts.chat import Message, joined, merged, runs_of_one_role
from steno_proxy.sessions import reading
from steno_proxy.sessions.messages.normalise import message_digest, options_digest, tools_digest
from steno_proxy.sessions.reading import RequestMessages, best, follow, read, settled
from tests.unit.proxy.sessions.agent import TOOLS, Recorded, assistant, system, tool, user

OPTIONS = options_digest({})
KEYS = [tools_digest(TOOLS), tools_digest([])]


def said(messages: list[Message], merges: bool, tools: bytes = KEYS[0]) -> RequestMessages:
    found = RequestMessages(messages, merges, tools, OPTIONS)
    for _ in found.digest():
        pass
    return found


def every_form(messages: list[Message], roles: set[str]) -> list[list[tuple[int, int]]]:
    """All ways to join runs whole or to leave them: [start, end) of each message of the form."""
    forms: list[list[tuple[int, int]]] = []
    found = list(runs_of_one_role(messages, roles))
    for chosen in itertools.product([False, True], repeat=len(found)):
        together = dict(run for run, join in zip(found, chosen, strict=True) if join)
        form, place = [], 0
        while place < len(messages):
            form.append((place, together.get(place, place + 1)))
            place = form[-1][1]
        forms.append(form)
    return forms


def written(rng: Random, messages: list[Message], form: list[tuple[int, int]]) -> list[Message]:
    return [joined(messages[start:end]) if end - start > 1 else messages[start] for start, end in form]


def conversation(rng: Random) -> list[Message]:
    make = [lambda: user(rng.choice("ab")), lambda: assistant(rng.choice(["a", "b", ""]))]
    messages = [user("a")]
    for _ in range(rng.randrange(1, 9)):
        messages.append(rng.choice(make)())
    return [*messages, user("b")]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_the_best_of_all_readings_is_found(seed: int, merges: bool) -> None:
    rng = Random(seed)
    roles = {"user", "assistant"} if merges else {"assistant"}
    talks = [conversation(rng) for _ in range(3)]
    recorded = Recorded()
    for _ in range(12):
        messages = rng.choice(talks)
        cut = rng.choice([i for i, one in enumerate(messages) if one["role"] == "assistant"] or [len(messages)])
        part = written(rng, messages[:cut], rng.choice(every_form(messages[:cut], roles)))
        ends = next((end for start, end in runs_of_one_role(messages, {"assistant"}) if start == cut), cut + 1)
        reply = rng.choice([messages[cut : cut + 1], messages[cut:ends]]) or [assistant("a")]
        recorded.commit(recorded.ask(part, tools=rng.choice([TOOLS, TOOLS, []])), reading_text(joined(reply)))
    for messages in talks:
        asked = said(messages, merges)
        wanted = max(covers(recorded, messages, form, asked.tools) for form in every_form(messages, roles))
        old, reading.MOST_READINGS = reading.MOST_READINGS, 10**6
        try:
            found = best(follow(recorded.tree, asked, {}))
        finally:
            reading.MOST_READINGS = old
        assert (found.covered, found.place) == wanted
        form = read(asked, found)
        seen = recorded.tree.recognise(form.digests, asked.tools, OPTIONS, form.call_ids())
        assert form.messages_in(seen.prefix_messages) == found.covered
        rest = settled(asked, form, seen.prefix_messages)
        assert rest.digests[: seen.prefix_messages] == form.digests[: seen.prefix_messages]
        assert rest.digests == [message_digest(message) for message in rest.messages]
        new, at = messages[found.covered :], seen.prefix_messages
        if not any(start < found.covered < end for start, end in runs_of_one_role(messages, roles)):
            assert rest.messages[at:] == (merged(new, roles) if merges else new), "in the format's own manner"


def reading_text(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def covers(recorded: Recorded, messages: list[Message], form: list[tuple[int, int]], tools: bytes) -> tuple[int, int]:
    """How many of the client's messages are gone on from, and how many are on record."""
    digests = [message_digest(message) for message in written(Random(0), messages, form)]
    seen = recorded.tree.recognise(digests, tools, OPTIONS, [[]] * len(digests))
    shared = recorded.tree.along(digests, 0, len(digests), 0, tools, OPTIONS)[0]
    ends = [0, *(end for _, end in form)]
    return ends[seen.prefix_messages], ends[shared]


@pytest.mark.parametrize("merges", [True, False])
def test_readings_do_not_double_with_each_run(merges: bool) -> None:
    """A trial that has recorded every way to read nine runs: the search is bounded, and finds one of them whole."""
    messages = [user("?")]
    for i in range(9):
        messages += [assistant("a"), assistant(str(i)), user("?")]
    recorded = Recorded()
    for form in every_form(messages, {"assistant"}):
        recorded.commit(recorded.ask(written(Random(0), messages, form)), "done")
    asked = said([*messages, assistant("done"), user("?")], merges)
    steps = 0
    along = recorded.tree.along

    class Counted:
        child, goes_on = recorded.tree.child, recorded.tree.goes_on

        def along(self, *args):
            nonlocal steps
            steps += 1
            return along(*args)

    found = best(follow(Counted(), asked, {}))
    assert found.covered == len(messages) + 1
    assert steps <= reading.MOST_READINGS * 2 * (9 + 1), "a step to each run and one behind it, not 2 to the ninth"


def test_runs_are_told_by_their_roles_and_joined_in_order() -> None:
    calls = assistant("b", ("call_1", "f", "{}")), assistant("", ("call_2", "g", "{}"))
    messages = [system("s"), system("s"), user("a"), {**assistant("a"), "reasoning_content": "r"}, *calls, tool("call_1", "x"),
                tool("call_2", "y"), user("c"), user(""), user("d")]  # fmt: skip
    assert list(runs_of_one_role(messages, {"user", "assistant"})) == [(3, 6), (8, 11)]
    assert list(runs_of_one_role(messages, {"assistant"})) == [(3, 6)]
    found = merged(messages, {"user", "assistant"})
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    assert found[3] == {"role": "assistant", "content": parts, "reasoning_content": "r", "tool_calls": [
        call for one in calls for call in one["tool_calls"]]}  # fmt: skip
    assert [part["text"] for part in found[-1]["content"]] == ["c", "d"]
    assert joined([user("c"), user("")]) == user("c")
    assert merged([], {"user"}) == [] and merged([user("a")], {"user"}) == [user("a")]

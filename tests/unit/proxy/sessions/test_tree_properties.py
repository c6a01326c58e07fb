"""Random sessions against an exhaustive oracle: clients that edit, truncate, drop, re-serialise, fork and run at the same time.

Hypothesis draws seeds and the dice below do the rest: sessions long and likely enough to reach every case, at a cost that
drawing each choice would not allow. A seed that failed once becomes an `@example`.
"""

from __future__ import annotations

import json
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from steno_proxy.sessions.messages.call_ids import echoed_ids
from steno_proxy.sessions.messages.normalise import message_digest, options_digest, tools_digest
from steno_proxy.sessions.samples import samples
from steno_proxy.sessions.tree import Tree
from tests.unit.proxy.sessions.agent import TOOLS, Recorded, assistant, session, system, tool, user
from tests.unit.proxy.sessions.oracle import Oracle

# Few words, so that equal messages meet in different places.
WORDS = ["a", "b", ""]
ARGUMENTS = ['{"x": 1, "y": "ü"}', '{"x": 1.0}', "not json", ""]
CONTEXTS = [(TOOLS, None)] * 60 + [([], None), (TOOLS, {"enable_thinking": True})]
OPENINGS = [
    [system("main"), user("a")],
    [system("sub"), user("b")],
    [user("a")],
    [system("main"), system("main"), user("b")],
    [system("main")],
]
SEEDS = st.integers(0, 2**32)


def echoed(rng, message):
    """A message as some client writes it back; the same message all the same."""
    message = dict(message)
    how = rng.randrange(4)
    if how == 1:
        text = message.get("content")
        message["content"] = [{"type": "text", "text": text}] if text and isinstance(text, str) else text or None
        message["provider_specific_fields"] = {"x": 1}
    if how == 2 and message.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": respelled(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    if how == 3 and not message.get("content"):
        message.pop("content", None)
    return message


def respelled(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=1, sort_keys=True)
    except ValueError:
        return json.dumps({"__unparsedToolInput": arguments}) if arguments else "{}"


def tampered(rng, messages):
    """A history with something done to it."""
    messages = list(messages)
    at = rng.randrange(len(messages))
    what = rng.choice(["edit", "drop", "truncate", "insert", "strip", "swap"])
    if what == "edit":
        messages[at] = {**messages[at], "content": rng.choice(WORDS)}
    elif what == "drop":
        del messages[at : at + rng.randrange(1, 4)]
    elif what == "truncate":
        del messages[at:]
    elif what == "insert":
        messages.insert(at, rng.choice([user("a"), assistant("a"), system("sub")]))
    elif what == "strip" and messages[at].get("tool_calls"):
        messages[at] = {**messages[at], "tool_calls": [{**c, "id": "x"} for c in messages[at]["tool_calls"]]}
    elif what == "swap":
        messages[at] = rng.choice(messages)
    return messages


def answered(rng, messages):
    """The history plus what an agent sends next."""
    calls = messages[-1].get("tool_calls") if messages else None
    if calls and rng.random() < 0.7:
        return [*messages, *[tool(call["id"], rng.choice(WORDS)) for call in calls]]
    return [*messages, user(rng.choice(WORDS))]


def next_request(rng, histories, unrest=0.2):
    """What one of the clients asks next: mostly the newest one, and mostly a plain continuation."""
    if not histories or rng.random() < unrest / 2:
        return rng.choice(OPENINGS)
    back = min(int(rng.expovariate(1.0 / (4 * unrest))), len(histories) - 1)
    messages = [echoed(rng, m) for m in histories[-1 - back]]
    if rng.random() < unrest:
        messages = tampered(rng, messages)
    return answered(rng, messages) if rng.random() < 0.9 else messages


def asked_as(messages, tools=TOOLS, options=None):
    digests = [message_digest(m) for m in messages]
    return digests, tools_digest(tools), options_digest(options), [echoed_ids(m) for m in messages]


@settings(max_examples=150)
@given(SEEDS)
def test_the_tree_finds_what_an_exhaustive_search_finds(seed):
    rng, recorded, oracle, histories, flying = Random(seed), Recorded(), Oracle(), [], []
    unrest = rng.choice([0.02, 0.1, 0.3])
    for _ in range(rng.randrange(1, 40)):
        messages = next_request(rng, histories, unrest)
        context = rng.choice(CONTEXTS)
        asked = recorded.ask(messages, *context)
        assert tuple(asked.found) == oracle.recognise(*asked_as(messages, *context))
        if rng.random() < unrest / 4:
            asked.found = asked.found._replace(parent=-1, prefix_messages=0)  # the worker could not render it
        calls = [("bash", rng.choice(ARGUMENTS)) for _ in range(rng.choice([0, 1, 1, 2]))]
        # siblings that run at the same time often say the same
        flying += [(asked, rng.choice(WORDS), calls)] * rng.choice([1, 1, 1, 2, 3])
        while flying and rng.random() < 0.8:
            asked, text, calls = flying.pop(rng.randrange(len(flying)))
            tokens = 0 if rng.random() < unrest / 2 else rng.randrange(1, 8)
            reply = recorded.commit(asked, text, calls, partial=tokens == 0 or rng.random() < unrest / 2, tokens=tokens)
            oracle.add(recorded.rows[-1])
            histories.append([*asked.messages, reply])
    every_token_is_in_the_samples_and_trained_once(recorded.turns)


def every_token_is_in_the_samples_and_trained_once(turns):
    """I1, I4."""
    found = samples(session(), turns)
    assert not found.unreadable
    made = found.items
    assert sum(sum(sample.loss_mask) for sample in made) == sum(turn.completion_tokens for turn in turns)
    by_id = {turn.turn_id: turn for turn in turns}
    for sample in made:
        path = [by_id[turn_id] for turn_id in sample.turn_ids]
        assert sample.token_ids == b"".join(turn.new_prompt_ids + turn.completion_ids for turn in path)


@settings(max_examples=50)
@given(SEEDS)
def test_two_replicas_that_read_the_rows_at_different_times_have_the_same_tree(seed):
    rng, recorded, histories = Random(seed), Recorded(), []
    replicas = (Tree(), Tree())
    for _ in range(rng.randrange(1, 30)):
        messages = next_request(rng, histories)
        histories.append(recorded.say(messages, rng.choice(WORDS), [("bash", "{}")] * rng.randrange(2)))
        for tree in replicas:
            for row in recorded.rows[len(tree) : len(tree) + rng.randrange(4)]:
                tree.add(row)
    for tree in replicas:
        for row in recorded.rows[len(tree) :]:
            tree.add(row)
    for _ in range(10):
        asked = asked_as(next_request(rng, histories))
        assert replicas[0].recognise(*asked) == replicas[1].recognise(*asked) == recorded.tree.recognise(*asked)


@settings(max_examples=50)
@given(SEEDS)
def test_sampled_ids_survive_twenty_turns_of_any_client(seed):
    """Ids that no tokenizer would give for their text stand in the twentieth prompt as they were sampled (I1, I2)."""
    rng, recorded, messages = Random(seed), Recorded(), [system("main"), user("go")]
    for _ in range(20):
        calls = [("bash", rng.choice(ARGUMENTS)) for _ in range(rng.randrange(4))]
        asked = recorded.ask([echoed(rng, m) for m in messages])
        assert asked.found.fork_reason is None
        messages = answered(rng, [*messages, recorded.commit(asked, rng.choice(WORDS), calls)])
    [sample] = samples(session(), recorded.turns).items
    assert sample.turn_ids == [turn.turn_id for turn in recorded.turns]
    assert sample.token_ids == b"".join(turn.new_prompt_ids + turn.completion_ids for turn in recorded.turns)

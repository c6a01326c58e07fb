"""Samples are concatenations of what is on record; a turn that does not add up is in none, and named."""

from __future__ import annotations

import math
from hashlib import blake2b

import pytest

from steno.contracts.records import (  # fmt: skip
    Timings,
    TokenSpan,
    Turn,
    bytes_to_floats,
    bytes_to_ids,
    floats_to_bytes,
    ids_to_bytes,
)
from steno_proxy.sessions.samples import samples as sample_list
from tests.unit.proxy.sessions.agent import session


def samples(session, turns):
    return sample_list(session, turns).items


def turn(index, parent, prompt, completion, before=0, **fields):
    """`before`: tokens of the parent's path."""
    n = len(completion)
    known = {
        "turn_id": f"t{index}",
        "parent_id": None if parent is None else f"t{parent}",
        "index": index,
        "new_prompt_ids": ids_to_bytes(prompt),
        "prompt_tokens": before + len(prompt),
        "completion_ids": ids_to_bytes(completion),
        "sampling_logprobs": floats_to_bytes([-0.5 - i for i in range(n)]),
        "versions": [TokenSpan(version="run/1", start=0, end=n)] if n else [],
        "timings": Timings(queued=0.0),
    }
    return Turn(**{**known, **fields})


ROOT = turn(0, None, [1, 2, 3], [10, 11])
CHILD = turn(1, 0, [4], [12, 13, 14], before=5)
FORK = turn(2, 0, [5, 6], [15], before=5)


def mask(sample):
    return [*sample.loss_mask]


def test_one_path_is_one_sample_of_exact_concatenations():
    [sample] = samples(session(group_id="g", reward=0.0), [ROOT, CHILD])
    assert bytes_to_ids(sample.token_ids).tolist() == [1, 2, 3, 10, 11, 4, 12, 13, 14]
    assert mask(sample) == [0, 0, 0, 1, 1, 0, 1, 1, 1]
    logprobs = bytes_to_floats(sample.sampling_logprobs).tolist()
    assert [None if math.isnan(x) else x for x in logprobs] == [None] * 3 + [-0.5, -1.5, None, -0.5, -1.5, -2.5]
    assert (sample.leaf_id, sample.turn_ids, sample.reward, sample.group_id) == ("t1", ["t0", "t1"], 0.0, "g")
    assert [(span.version, span.start, span.end) for span in sample.spans] == [("run/1", 3, 5), ("run/1", 6, 9)]


def test_a_token_on_two_paths_is_trained_in_the_first():
    first, second = samples(session(), [FORK, CHILD, ROOT])
    assert (first.leaf_id, second.leaf_id) == ("t1", "t2")
    assert mask(first) == [0, 0, 0, 1, 1, 0, 1, 1, 1]
    assert mask(second) == [0, 0, 0, 0, 0, 0, 0, 1]
    assert bytes_to_floats(second.sampling_logprobs)[3] == -0.5, "sampled all the same"


def test_each_completion_says_where_it_stands_how_it_was_drawn_and_whether_it_counts_here():
    warm = CHILD.model_copy(update={"law": {"temperature": 0.7}, "policy": "critic"})
    first, second = samples(session(), [ROOT, warm, FORK])
    assert [(c.start, c.end, c.temperature, c.policy, c.shared) for c in first.completions] == [
        (3, 5, 1.0, "default", False),
        (6, 9, 0.7, "critic", False),
    ]
    assert [(c.start, c.end, c.shared) for c in second.completions] == [(3, 5, True), (7, 8, False)]


def test_each_completion_says_how_it_ended():
    root = ROOT.model_copy(update={"finish_reason": "tool_calls"})
    cut = CHILD.model_copy(update={"finish_reason": "length"})
    broken = FORK.model_copy(update={"finish_reason": "cancelled", "partial": True})
    first, second = samples(session(), [root, cut, broken])
    assert [(c.finish_reason, c.partial) for c in first.completions] == [("tool_calls", False), ("length", False)]
    assert [(c.finish_reason, c.partial) for c in second.completions] == [("tool_calls", False), ("cancelled", True)]


def test_versions_are_spans_of_positions_and_merged_where_they_touch():
    changed = turn(
        0, None, [1], [10, 11, 12],
        versions=[TokenSpan(version=v, start=i, end=i + 1) for i, v in enumerate(["a", "a", "b"])],
    )  # fmt: skip
    at_once = turn(1, 0, [], [13], before=4, versions=[TokenSpan(version="b", start=0, end=1)])
    [sample] = samples(session(), [changed, at_once])
    assert [(s.version, s.start, s.end) for s in sample.spans] == [("a", 1, 3), ("b", 3, 5)]


def test_constrained_tokens_are_not_trained():
    [sample] = samples(session(), [turn(0, None, [1], [10, 11, 12, 13], constrained=[(1, 3)])])
    assert mask(sample) == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("law", [{"top_p": 0.9}, {"temperature": 0.0}, {"logit_bias": {"5": 1.0}}])
def test_a_turn_under_a_bent_law_is_not_trained(law):
    [sample] = samples(session(), [turn(0, None, [1], [10], law=law)])
    assert mask(sample) == [0, 0]
    assert sum(samples(session(), [turn(0, None, [1], [10], law={"temperature": 0.7})])[0].loss_mask) == 1


def test_partial_turns_are_leaves_with_what_was_really_sampled():
    [sample] = samples(session(), [ROOT, turn(1, 0, [4], [12], before=5, partial=True, finish_reason="cancelled")])
    assert mask(sample) == [0, 0, 0, 1, 1, 0, 1]


def test_turns_without_a_token_end_no_path():
    nothing = turn(2, 1, [7], [], before=9, partial=True)
    [sample] = samples(session(), [ROOT, CHILD, nothing, turn(3, 2, [8], [], before=10)])
    assert sample.leaf_id == "t1"
    assert samples(session(), [turn(0, None, [1], [])]) == []
    assert samples(session(), []) == []


def test_synthetic_sessions_have_samples_and_nothing_to_train():
    scripted = turn(0, None, [1], [10, 11], sampling_logprobs=b"", versions=[])
    [sample] = samples(session(marks=["synthetic"]), [scripted])
    assert mask(sample) == [0, 0, 0]
    assert all(math.isnan(x) for x in bytes_to_floats(sample.sampling_logprobs))
    assert bytes_to_ids(sample.token_ids).tolist() == [1, 10, 11]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"sampling_logprobs": b""}, "0 log-probabilities for 2"),
        ({"sampling_logprobs": floats_to_bytes([-1.0])}, "1 log-probabilities for 2"),
        ({"sampling_logprobs": floats_to_bytes([-1.0, math.nan])}, "not a finite number"),
        ({"sampling_logprobs": floats_to_bytes([-1.0, -math.inf])}, "not a finite number"),
        ({"sampling_logprobs": floats_to_bytes([math.inf, -math.inf])}, "not a finite number"),
        ({"sampling_logprobs": floats_to_bytes([-1.0, 0.5])}, "a log-probability of 0.5"),
        ({"prompt_tokens": 4}, "4 prompt tokens, but 3"),
        ({"prompt_digest": bytes(16)}, "its prompt differs from the ids recorded"),
        ({"completion_ids": b"12345"}, "whole number of int32"),
        ({"versions": []}, "versions are known for 0 of 2"),
        ({"versions": [TokenSpan(version="a", start=1, end=2)]}, "gap or overlap at token 0"),
        ({"constrained": [(1, 3)]}, "constrained range 1..3"),
        ({"parent_id": "t9"}, "its parent t9 is not on record before it"),
        ({"law": {"top_p": "x"}}, "sampling law"),
        ({"law": {"temperature": None}}, "sampling law"),  # how JSON at rest says NaN
        ({"law": {"temperature": math.nan}}, "sampling law"),
    ],
)
def test_what_does_not_add_up_is_in_no_sample_and_named(wrong, what):
    found = sample_list(session(), [ROOT.model_copy(update=wrong)])
    assert not found.items
    [unreadable] = found.unreadable
    assert unreadable.turn_id == "t0" and what in unreadable.reason


def test_a_turn_that_does_not_add_up_takes_along_what_goes_on_from_it_and_nothing_else():
    bad = CHILD.model_copy(update={"sampling_logprobs": floats_to_bytes([-1.0, math.nan, -1.0])})
    after = turn(3, 1, [7], [16], before=9)
    found = sample_list(session(), [ROOT, bad, FORK, after])
    assert [sample.turn_ids for sample in found.items] == [["t0", "t2"]]
    assert [(one.turn_id, one.completion_tokens) for one in found.unreadable] == [("t1", 3), ("t3", 1)]
    assert found.unreadable[1].reason == "it goes on from turn t1, which can't be read"
    alone = sample_list(session(), [ROOT, bad, after])
    assert [mask(sample) for sample in alone.items] == [[0, 0, 0, 1, 1]], "what came before it is trained"


def test_a_parent_comes_before_its_child():
    found = sample_list(session(), [turn(0, 1, [1], [2]), turn(1, None, [1], [2])])
    assert [sample.turn_ids for sample in found.items] == [["t1"]]
    assert [one.reason for one in found.unreadable] == ["its parent t1 is not on record before it"]


def test_the_digest_of_the_whole_prompt_is_checked_along_the_path():
    whole = blake2b(ids_to_bytes([1, 2, 3, 10, 11, 4]), digest_size=16).digest()
    good = CHILD.model_copy(update={"prompt_digest": whole})
    assert len(samples(session(), [ROOT, good])) == 1
    found = sample_list(session(), [ROOT, good, FORK.model_copy(update={"prompt_digest": whole})])
    assert [one.turn_id for one in found.unreadable] == ["t2"] and [s.leaf_id for s in found.items] == ["t1"]


def test_a_superseded_turn_is_left_out_and_its_parent_stays_a_sample():
    gone = CHILD.model_copy(update={"superseded_by": "t2"})
    again = FORK.model_copy(update={"retry_of": "t1"})
    assert [sample.turn_ids for sample in samples(session(), [ROOT, gone, again])] == [["t0", "t2"]]
    assert [sample.turn_ids for sample in samples(session(), [ROOT, gone])] == [["t0"]]


def test_a_superseded_turn_that_was_gone_on_from_stands_there_untrained():
    gone = CHILD.model_copy(update={"superseded_by": "t2"})
    after = turn(3, 1, [7], [16], before=9)
    again = FORK.model_copy(update={"retry_of": "t1"})
    made = samples(session(), [ROOT, gone, again, after])
    assert [part.superseded for part in made[1].completions] == [False, True, False]
    found = {sample.leaf_id: mask(sample) for sample in made}
    assert found == {"t2": [0, 0, 0, 1, 1, 0, 0, 1], "t3": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]}

"""One branch of a trial that forked: the one with the most tokens, all of which it trains."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from steno.contracts.records import Group, Sample, SampledRange, Session, TokenSpan, floats_to_bytes, ids_to_bytes
from steno.contracts.rest import SampleList, UnreadableTurn
from steno.contracts.runs.leases import Lease
from steno_adapters.collected_group import Branches, read_group
from steno_adapters.main_branch import main_branch
from steno_adapters.verl.session_rows import training_rows


def trial(*paths: dict[str, int], superseded: str = "", constrained: str = "", bare: str = "") -> list[Sample]:
    """Samples as the proxy makes them: each path is its turns with their sampled tokens, a token of a prompt before each turn. A
    turn that two paths have is trained in the first of them. superseded, constrained, bare (without log-probabilities): turns."""
    taught: set[str] = set()
    return [_sample(path, taught, superseded, constrained, bare) for path in paths]


def _sample(path: dict[str, int], taught: set[str], superseded: str, constrained: str, bare: str) -> Sample:
    ids, mask, logprobs = list[int](), list[int](), list[float]()
    parts: list[SampledRange] = []
    for turn, tokens in path.items():
        ids, mask, logprobs = [*ids, 1], [*mask, 0], [*logprobs, math.nan]
        start, shared = len(ids), turn in taught
        parts.append(
            SampledRange(start=start, end=start + tokens, shared=shared, superseded=turn == superseded, model="main")
        )
        ids += [100 + ord(turn[0])] * tokens
        mask += [int(not shared and turn not in (superseded, constrained))] * tokens
        logprobs += [math.nan if turn == bare else -0.5] * tokens
        taught.add(turn)
    return Sample(
        trial_id="g.0", group_id="g", leaf_id=[*path][-1], turn_ids=list(path), token_ids=ids_to_bytes(ids),
        loss_mask=bytes(mask), sampling_logprobs=floats_to_bytes(logprobs), reward=1.0, completions=parts,
        spans=[TokenSpan(start=part.start, end=part.end, version="a/1") for part in parts],
    )  # fmt: skip


DROPPED = ({"a": 6, "b": 2}, {"a": 6, "c": 3, "d": 3})
"""The agent dropped its second answer and asked again: what earned the reward is the second path, of 12 tokens."""


def test_the_branch_that_went_on_is_taken_though_a_dropped_one_has_its_beginning() -> None:
    found = main_branch(trial(*DROPPED))
    assert found.row is not None and found.row.leaf_id == "d"
    assert found.row.prompt_ids.tolist() == [1] and found.row.trained_tokens == 12, "its shared turn is trained, too"
    assert (found.untrained, found.others) == ({"other_branch": 2}, 1)


def test_verl_is_given_that_branch() -> None:
    found = training_rows(trial(*DROPPED), lineage="a", prompt_length=8, response_length=32, main_only=True)
    assert [row.trained_tokens for row in found.rows] == [12] and found.untrained == {"other_branch": 2}
    short = training_rows(trial(*DROPPED), lineage="a", prompt_length=8, response_length=7, main_only=True)
    assert [row.trained_tokens for row in short.rows] == [6] and short.untrained == {"other_branch": 2, "too_long": 6}


def test_a_group_has_a_row_of_each_trial_where_one_branch_is_asked_for() -> None:
    """`PromptRollouts` of TRL asks so."""

    class Client:
        def sample_list(self, trial_id: str) -> SampleList:
            broken = UnreadableTurn(turn_id="e", reason="its versions leave a gap", completion_tokens=1)
            return SampleList(items=trial(*DROPPED), unreadable=[broken])

    session = Session(trial_id="g.0", group_id="g", reward=1.0, created_at=0.0, updated_at=0.0)
    lease = Lease(
        lease_id="l", group=Group(group_id="g", size=1, created_at=0.0), trials=[session], expires_at=1e12,
        tokens={"g.0": {"a/1": 15}},
    )  # fmt: skip
    client: Any = Client()
    found = {
        branches: read_group(client, lease, policy="default", models=[], branches=branches, earlier=False)
        for branches in get_args(Branches)
    }
    assert [row.trained_tokens for row in found["main"].rows] == [12] and found["main"].other_branches == 1
    assert found["main"].untrained == {"other_branch": 2, "unreadable": 1}, "one is in no sample"
    assert [row.trained_tokens for row in found["all"].rows] == [8, 6] and found["all"].untrained == {"unreadable": 1}


@pytest.mark.parametrize(
    ("facts", "untrained"),
    [
        ({"superseded": "a"}, {"superseded": 6, "other_branch": 2}),
        ({"constrained": "a"}, {"constrained": 6, "other_branch": 2}),
        ({"constrained": "d"}, {"constrained": 3, "other_branch": 2}),
    ],
)
def test_each_sampled_token_is_trained_or_counted_once(facts: dict[str, str], untrained: dict[str, int]) -> None:
    found = main_branch(trial(*DROPPED, **facts))  # type: ignore[arg-type]
    assert found.row is not None and found.row.leaf_id == "d" and found.untrained == untrained
    assert found.row.trained_tokens + found.untrained.total() == 6 + 2 + 3 + 3


def test_where_the_beginning_of_all_can_not_be_trained_the_largest_rest_is() -> None:
    """Counted with all of its turns no branch could be trained, and nothing was: what samples say is asked there."""
    found = main_branch(trial(*DROPPED, bare="a"))
    assert found.row is not None and (found.row.leaf_id, found.row.trained_tokens) == ("d", 6)
    assert (found.untrained, found.others) == ({"missing_logprob": 8}, 0)
    found = main_branch(trial(*DROPPED, {"a": 6, "e": 7}, {"a": 6, "f": 7}, bare="a"))
    assert found.row is not None and found.row.leaf_id == "f", "of equals the last one"
    assert (found.untrained, found.others) == ({"missing_logprob": 8, "other_branch": 13}, 2)


def test_of_branches_of_equal_length_the_last_one_is_taken() -> None:
    found = main_branch(trial({"a": 4, "b": 2}, {"a": 4, "c": 2}, {"e": 1}))
    assert found.row is not None and (found.row.leaf_id, found.row.trained_tokens) == ("c", 6)
    assert (found.untrained, found.others) == ({"other_branch": 3}, 2)


def test_a_trial_without_a_branch_that_can_be_trained_has_no_row() -> None:
    found = main_branch(trial(*DROPPED), policy="another")
    assert (found.row, found.untrained, found.others) == (None, {"other_policy": 14}, 0)
    assert main_branch([]) == (None, {}, 0)

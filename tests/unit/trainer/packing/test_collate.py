"""Rows packed end to end: what the head is asked for, and that samples do not see each other."""

from __future__ import annotations

import pytest
import torch

from steno_trainer.data.ledger import Ledger
from steno_trainer.data.rows import TrainingTerms, read_samples
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.errors import BadBatch
from steno_trainer.objective.aggregation import Aggregation
from steno_trainer.objective.ratios import RatioLevel
from steno_trainer.packing.collate import DUMMY_TOKENS, collate
from steno_trainer.packing.plan import CostModel
from steno_trainer.step.step_plan import Layout, StepBatch, StepOrders, draw_up
from tests.unit.trainer.recorded import VOCABULARY, Recording, session

TERMS = TrainingTerms(
    VersionHistory((PolicyVersion("a", 5),)), max_staleness_steps=9, max_tokens=1000, vocabulary=VOCABULARY
)


def rows():
    first, second = Recording(1), Recording(2)
    root = first.turn(None, 3, 2, version="a/2", law={"temperature": 0.5})
    first.turn(root, 1, 2, version="a/4")
    second.turn(None, 2, 3, version="a/3", constrained=[(1, 2)])
    made = [*first.samples(session("g.0")), *second.samples(session("g.1"))]
    return read_samples(made, TERMS, Ledger())


def test_a_micro_batch_lists_the_trained_tokens_and_the_positions_before_them():
    packed = collate(rows(), {"g.0": 0.5, "g.1": -1.0}, [0.25, 0.125])
    assert packed.input_ids_1S.shape == (1, 13)
    assert packed.position_ids_1S.tolist() == [[*range(8), *range(5)]]
    assert packed.starts_Q1.tolist() == [0, 8, 13]
    trained = [3, 4, 6, 7, 10, 12]
    assert packed.predictor_N.tolist() == [position - 1 for position in trained]
    assert packed.targets_N.tolist() == packed.input_ids_1S[0, trained].tolist()
    assert packed.temperatures_N.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert packed.advantages_N.tolist() == [0.5] * 4 + [-1.0] * 2
    assert packed.weights_N.tolist() == [0.25] * 4 + [0.125] * 2
    assert packed.sampling_logprobs_N.isfinite().all()
    assert packed.loss_mask_N.all() and len(packed.loss_mask_N) == 6


def test_rows_keep_their_own_tokens_whatever_stands_beside_them():
    one, two = rows()
    advantages = {"g.0": 0.5, "g.1": -1.0}
    alone = collate([two], advantages, [0.125])
    packed = collate([one, two], advantages, [0.25, 0.125])
    for name in ("targets_N", "sampling_logprobs_N", "temperatures_N", "advantages_N", "weights_N"):
        assert torch.equal(getattr(packed, name)[-2:], getattr(alone, name))
    assert torch.equal(packed.predictor_N[-2:] - 8, alone.predictor_N)
    assert torch.equal(packed.input_ids_1S[:, 8:], alone.input_ids_1S)


def test_an_empty_micro_batch_is_a_dummy_of_the_same_form():
    dummy = collate([], {}, [])
    full = collate(rows(), {"g.0": 0.5, "g.1": -1.0}, [0.25, 0.125])
    assert dummy.input_ids_1S.shape == dummy.position_ids_1S.shape == (1, DUMMY_TOKENS)
    assert dummy.starts_Q1.tolist() == [0, DUMMY_TOKENS]
    for name in (
        "predictor_N",
        "targets_N",
        "sampling_logprobs_N",
        "temperatures_N",
        "advantages_N",
        "weights_N",
        "sequence_N",
        "sequence_tokens_N",
    ):
        ours, theirs = getattr(dummy, name), getattr(full, name)
        assert (ours.shape, ours.dtype) == ((0,), theirs.dtype)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (RatioLevel.TOKEN, [0, 1, 2, 3, 4, 5]),
        (RatioLevel.COMPLETION, [0, 0, 1, 1, 2, 2]),
        (RatioLevel.SEQUENCE, [0, 0, 0, 0, 1, 1]),
    ],
)
def test_each_token_knows_its_sequence_and_how_many_are_of_it(level, expected):
    """The last row's completion has a gap in its middle, which is constrained."""
    packed = collate(rows(), {"g.0": 0.5, "g.1": -1.0}, [0.25, 0.125], level)
    assert packed.sequence_N.tolist() == expected
    assert packed.sequence_tokens_N.tolist() == [expected.count(number) for number in expected]
    assert packed.sequences == len(set(expected))
    assert collate([], {}, [], level).sequences == 0


def test_a_row_keeps_its_completions_on_its_way_to_other_ranks():
    made = rows()
    batch = StepBatch(made, {"g.0": 0.5, "g.1": -1.0})
    layout = Layout(2, 100, 100, Aggregation.TOKEN_MEAN, None, CostModel(1.0, 1.0, 1.0))
    sent = StepOrders.decode(draw_up(batch, layout, seed="s").encode()).rows()
    assert [row.completion_starts for row in sent] == [row.completion_starts for row in made] == [(3, 6), (2,)]


def test_tensors_move_together():
    packed = collate(rows(), {"g.0": 0.5, "g.1": -1.0}, [0.25, 0.125]).to("meta")
    assert {packed.input_ids_1S.device.type, packed.weights_N.device.type} == {"meta"}


def test_a_trial_without_an_advantage_and_weights_that_do_not_fit_are_refused():
    with pytest.raises(BadBatch, match=r"no advantage for trial g\.1"):
        collate(rows(), {"g.0": 0.5}, [1.0, 1.0])
    with pytest.raises(BadBatch, match="1 weights for 2 rows"):
        collate(rows(), {"g.0": 0.5, "g.1": 1.0}, [1.0])

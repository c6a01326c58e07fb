"""What of a recorded sample can be trained, and in which shape."""

from __future__ import annotations

import numpy as np
import pytest

from steno import Sample
from steno.contracts.errors import BadRequest, ConfigError
from steno.contracts.records import SampledRange, TokenSpan, floats_to_bytes, ids_to_bytes
from steno_adapters import TrainableRow, padded
from steno_adapters.collate import packed
from steno_adapters.rows import trainable_rows

NAN = float("nan")


def sample(**changes: object) -> Sample:
    """Two prompt tokens, two sampled, one of a tool, two sampled under newer weights at another temperature."""
    fields: dict[str, object] = {
        "trial_id": "g.0", "group_id": "g", "leaf_id": "b", "turn_ids": ["a", "b"], "reward": 1.0,
        "token_ids": ids_to_bytes([10, 11, 12, 13, 14, 15, 16]), "loss_mask": bytes([0, 0, 1, 1, 0, 1, 1]),
        "sampling_logprobs": floats_to_bytes([NAN, NAN, -1.0, -2.0, NAN, -3.0, -4.0]),
        "spans": [TokenSpan(version="a/1", start=2, end=4), TokenSpan(version="a/2", start=5, end=7)],
        "completions": [SampledRange(start=2, end=4, temperature=0.7), SampledRange(start=5, end=7, temperature=0.5)],
    }  # fmt: skip
    return Sample.model_validate(fields | changes)


def row(tokens: int = 7) -> TrainableRow:
    """`sample`, cut to so many tokens."""
    [found], _ = trainable_rows([sample()])
    response = tokens - len(found.prompt_ids)
    names = ("response_ids", "response_mask", "logprobs", "temperatures", "version_index")
    return TrainableRow(**{**vars(found), **{name: getattr(found, name)[:response] for name in names}})


def test_a_row_is_the_prompt_and_all_from_the_first_trained_token_on() -> None:
    [found], untrained = trainable_rows([sample()])
    assert found.prompt_ids.tolist() == [10, 11]
    assert found.response_ids.tolist() == [12, 13, 14, 15, 16]
    assert found.response_mask.tolist() == [True, True, False, True, True]
    np.testing.assert_array_equal(found.logprobs, np.float32([-1, -2, NAN, -3, -4]))
    np.testing.assert_array_equal(found.temperatures, np.float32([0.7, 0.7, 1, 0.5, 0.5]))
    assert [found.versions[i] if i >= 0 else None for i in found.version_index] == ["a/1", "a/1", None, "a/2", "a/2"]
    assert (found.reward, len(found), found.trained_tokens, untrained) == (1.0, 7, 4, {})


@pytest.mark.parametrize(
    ("changes", "reason", "tokens"),
    [
        ({"reward": None}, "unscored", 4),
        ({"group_id": None}, "ungrouped", 4),
        ({"sampling_logprobs": floats_to_bytes([NAN, NAN, -1.0, NAN, NAN, -3.0, -4.0])}, "missing_logprob", 4),
        ({"loss_mask": bytes(7)}, "constrained", 4),
        ({"completions": [SampledRange(start=2, end=4, temperature=0), SampledRange(start=5, end=7)]}, "malformed", 4),
        ({"completions": [SampledRange(start=a, end=a + 2, policy="x") for a in (2, 5)]}, "other_policy", 4),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_counted(changes: dict[str, object], reason: str, tokens: int) -> None:
    assert trainable_rows([sample(**changes)]) == ([], {reason: tokens})


def test_of_a_row_only_the_tokens_of_the_policy_in_training_are_trained() -> None:
    parts = [SampledRange(start=2, end=4, superseded=True), SampledRange(start=5, end=7)]
    [found], untrained = trainable_rows([sample(completions=parts)])
    assert found.prompt_ids.tolist() == [10, 11, 12, 13, 14]
    assert (found.trained_tokens, untrained) == (2, {"superseded": 2})


def test_of_a_row_only_the_calls_by_names_that_are_trained_are_trained() -> None:
    parts = [SampledRange(start=2, end=4, model="main"), SampledRange(start=5, end=7, model="explorer-2")]
    [found], untrained = trainable_rows([sample(completions=parts)], models=["judge", "explorer-*"])
    assert found.prompt_ids.tolist() == [10, 11, 12, 13, 14]
    assert (found.trained_tokens, untrained) == (2, {"other_model": 2})
    assert trainable_rows([sample(completions=parts)], models=["policy"]) == ([], {"other_model": 4})
    assert trainable_rows([sample()])[1] == {}, "of an older proxy, where no name is asked for"
    for models, said in (("main", "must be a list"), (["main"], "do not say which model was asked for")):
        with pytest.raises(ConfigError, match=said):
            trainable_rows([sample()], models=models)


def test_what_two_samples_share_is_trained_and_counted_once() -> None:
    other = sample(
        loss_mask=bytes([0, 0, 0, 0, 0, 1, 1]),
        completions=[SampledRange(start=2, end=4, shared=True), SampledRange(start=5, end=7)],
    )
    rows, untrained = trainable_rows([sample(), other])
    assert [(len(found.prompt_ids), found.trained_tokens) for found in rows] == [(2, 4), (5, 2)]
    assert untrained == {}


def test_padded_rows_are_the_rows_with_nothing_of_the_padding_in_them() -> None:
    batch = padded([row(), row(4)], [0.5, -2.0], pad_token_id=9)
    assert batch.token_ids.tolist() == [[10, 11, 12, 13, 14, 15, 16], [10, 11, 12, 13, 9, 9, 9]]
    assert batch.attention_mask.tolist() == [[True] * 7, [True] * 4 + [False] * 3]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0, 0]]
    assert batch.logprobs.tolist() == [[0, 0, -1, -2, 0, -3, -4], [0, 0, -1, -2, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0, 0.5, 0.5, 0, 0.5, 0.5], [0, 0, -2, -2, 0, 0, 0]]
    assert batch.temperatures[1].tolist() == pytest.approx([1, 1, 0.7, 0.7, 1, 1, 1])


def test_packed_rows_are_the_padded_ones_without_the_padding() -> None:
    rows, advantages = [row(), row(4)], [0.5, -2.0]
    batch, wide = packed(rows, advantages), padded(rows, advantages)
    for name in ("token_ids", "loss_mask", "logprobs", "advantages", "temperatures"):
        assert getattr(batch, name)[0].tolist() == getattr(wide, name)[wide.attention_mask].tolist(), name
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]]
    assert batch.cu_seqlens.tolist() == [0, 7, 11]


@pytest.mark.parametrize(("rows", "advantages"), [([], []), ([row()], []), ([row()], [1.0, 2.0])])
def test_each_row_has_one_advantage(rows: list[TrainableRow], advantages: list[float]) -> None:
    for collation in (padded, packed):
        with pytest.raises(BadRequest, match=f"got {len(advantages)} for {len(rows)} rows"):
            collation(rows, advantages)


def test_a_packed_row_has_the_log_probabilities_that_it_has_alone() -> None:
    """transformers keeps rows apart by their positions."""
    import torch
    from transformers import AutoModelForCausalLM

    from steno.models import TINY

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    batch = packed([row(), row(4)], [0.0, 0.0])
    with torch.no_grad():
        together = model(input_ids=batch.token_ids, position_ids=batch.position_ids, use_cache=False).logits[0]
        alone = [model(input_ids=batch.token_ids[:, a:b]).logits[0] for a, b in ((0, 7), (7, 11))]
    # Rounding of float32 is 1e-5 here, more or less by the processor; a row that saw the other one would be off by 0.1 and more.
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=0)

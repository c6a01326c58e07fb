"""Continuous batching on the real tiny model: I1 and I10, synchronously."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from steno.contracts.chat import Sampling
from steno.contracts.errors import BadRequest, UnsoundOutput
from steno.models import TINY
from steno_worker.engines.transformers.batch import RunningBatch, Sequence
from steno_worker.engines.transformers.sampler import SamplerRow
from steno_worker.interfaces import TokenStep


def load() -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="sdpa")
    return model.train(False)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return load()


def batch_of(model: torch.nn.Module, *, running: int = 4, prefill: int = 16) -> RunningBatch:
    return RunningBatch(model, version="base/0", max_running=running, prefill_tokens=prefill)  # type: ignore[arg-type]


def sequence(seed: int, length: int, tokens: int) -> Sequence:
    prompt = torch.randint(0, 1000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Sequence(str(seed), SamplerRow(Sampling(seed=seed), prompt, frozenset()), tokens)


def run(batch: RunningBatch, record: dict[str, tuple[list[float], list[str]]], steps: int = 10_000) -> None:
    for _ in range(steps):
        if not len(batch):
            return
        for one, step in batch.step():
            assert isinstance(step, TokenStep)
            logprobs, versions = record.setdefault(one.request_id, ([], []))
            logprobs += step.logprobs or []
            versions.append(step.version)


def recomputed(model: torch.nn.Module, one: Sequence) -> list[float]:
    """Log-probabilities of the completion by one plain forward pass."""
    prompt = len(one.row.prompt_ids)
    with torch.inference_mode():
        logprobs = model(torch.tensor([one.ids])).logits[0, prompt - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(one.ids[prompt:])[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def test_logprobs_are_those_of_a_plain_forward_pass_while_others_join_and_leave(model: torch.nn.Module) -> None:
    batch, record = batch_of(model), {}
    ones = [sequence(seed, length, tokens) for seed, (length, tokens) in enumerate(
        [(40, 30), (3, 5), (90, 12), (17, 60), (1, 1), (33, 20), (64, 9), (5, 40)]
    )]  # fmt: skip
    for one in ones[:3]:
        batch.add(one)
    for one in ones[3:]:
        run(batch, record, steps=4)
        batch.add(one)
    run(batch, record)
    for one in ones:
        assert len(record[one.request_id][0]) == one.max_tokens
        assert record[one.request_id][0] == pytest.approx(recomputed(model, one), abs=1e-3)


def test_what_a_sequence_says_does_not_depend_on_its_company(model: torch.nn.Module) -> None:
    alone, crowded = sequence(1, 20, 25), sequence(1, 20, 25)
    for target, others in ((alone, []), (crowded, [sequence(5, 70, 30), sequence(6, 4, 6)])):
        batch = batch_of(model)
        for one in [*others, target]:
            batch.add(one)
        run(batch, {})
    assert alone.ids == crowded.ids


def test_a_long_prompt_delays_the_others_by_a_chunk_at_a_time(model: torch.nn.Module) -> None:
    batch = batch_of(model, prefill=16)
    short = sequence(1, 8, 50)
    batch.add(short)
    batch.step()
    batch.add(sequence(2, 160, 1))
    for _ in range(9):
        assert [one.request_id for one, _ in batch.step()] == ["1"]
    assert {one.request_id for one, _ in batch.step()} == {"1", "2"}


def test_a_long_sequence_and_short_ones_say_what_they_would_alone(model: torch.nn.Module) -> None:
    batch, record = batch_of(model, prefill=512), {}
    ones = [sequence(1, 20, 12), sequence(2, 6000, 4), sequence(3, 30, 14), sequence(4, 5, 16)]
    for one in ones:
        batch.add(one)
    run(batch, record)
    for one in ones:
        assert record[one.request_id][0] == pytest.approx(recomputed(model, one), abs=1e-3)


def test_more_than_fit_wait_for_a_slot(model: torch.nn.Module) -> None:
    batch, record = batch_of(model, running=2), {}
    for seed in range(5):
        batch.add(sequence(seed, 6, 4))
    batch.step()
    assert (batch.running, batch.waiting) == (2, 3)
    run(batch, record)
    assert len(record) == 5


def test_a_dropped_sequence_is_gone_and_the_others_go_on(model: torch.nn.Module) -> None:
    batch, record = batch_of(model), {}
    ones = [sequence(seed, 10, 20) for seed in range(3)]
    for one in ones:
        batch.add(one)
    run(batch, record, steps=3)
    batch.drop(ones[0])
    batch.drop(ones[0])
    run(batch, record)
    assert len(ones[0].ids) < 30
    for one in ones[1:]:
        assert record[one.request_id][0] == pytest.approx(recomputed(model, one), abs=1e-3)


def test_new_weights_sample_under_the_new_version_with_nothing_of_the_old_in_their_cache() -> None:
    old, live, record = load(), load(), {}
    changed = {name: tensor + 0.02 * torch.randn(tensor.shape) for name, tensor in live.state_dict().items()}
    new = load()
    new.load_state_dict(changed)
    batch = batch_of(live, running=2)
    ones = [sequence(seed, 30, 24) for seed in range(3)]
    for one in ones:
        batch.add(one)
    run(batch, record, steps=8)
    batch.swap_weights("run/1", changed)
    run(batch, record)
    for one in ones:
        logprobs, versions = record[one.request_id]
        spans = [versions.count("base/0"), versions.count("run/1")]
        assert versions == ["base/0"] * spans[0] + ["run/1"] * spans[1]
        wanted = recomputed(old, one)[: spans[0]] + recomputed(new, one)[spans[0] :]
        assert logprobs == pytest.approx(wanted, abs=1e-3)
    assert {versions[-1] for _, versions in record.values()} == {"run/1"}


def test_what_older_weights_cached_is_marked_until_it_is_computed_again(model: torch.nn.Module) -> None:
    batch, same = batch_of(model, running=1), dict(model.state_dict())
    ones = [sequence(seed, 10, 9) for seed in range(2)]
    marks: dict[str, list[tuple[str, bool]]] = {}

    def some(steps: int) -> None:
        for _ in range(steps):
            for one, step in batch.step():
                assert isinstance(step, TokenStep)
                marks.setdefault(one.request_id, []).append((step.version, step.mixed_kv))

    for one in ones:
        batch.add(one)
    some(2)
    for version, keep in (("run/1", True), ("run/2", True), ("run/3", False)):
        batch.swap_weights(version, same, keep=keep)
        some(2)
    some(20)
    new = [("base/0", False), ("run/1", True), ("run/2", True), ("run/3", False)]
    assert marks["0"] == [new[0]] * 2 + [new[1]] * 2 + [new[2]] * 2 + [new[3]] * 3
    assert set(marks["1"]) == {("run/3", False)}  # it had computed nothing when weights changed


@pytest.mark.parametrize("tensors", [{"nothing.like.it": torch.zeros(1)}, {"lm_head.weight": torch.zeros(2, 2)}])
def test_weights_that_do_not_fit_change_nothing(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    batch = batch_of(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    name = next(iter(model.state_dict()))
    with pytest.raises(ValueError, match=next(iter(tensors))):
        batch.swap_weights("run/1", {name: torch.zeros_like(before[name]), **tensors})
    assert batch.version == "base/0"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_gives_no_numbers_is_not_its_clients_mistake() -> None:
    broken = load()
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    bent = Sequence("bent", SamplerRow(Sampling(top_p=0.5), [1, 2], frozenset()), 3)
    batch = batch_of(broken)
    for one in (sequence(1, 5, 3), bent):
        batch.add(one)
    told = {one.request_id: type(step) for one, step in batch.step()}
    assert told == {"1": UnsoundOutput, "bent": BadRequest}

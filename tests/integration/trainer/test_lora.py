"""An adapter trained on real ZeRO-3 ranks is peft's own, trained by a plain process; a checkpoint and what is sent are of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from steno.contracts.errors import ConfigError
from steno.models.checkpoint import checkpoint_digest
from steno_trainer.checkpoints.merging import merge_adapter
from steno_trainer.model.adapter import add_adapter
from steno_trainer.model.model import load_model
from steno_trainer.weights.files.copies import WeightsCopy
from tests.integration.trainer.launching import run_ranks
from tests.integration.trainer.materials import random_batch, random_model
from tests.integration.trainer.reference import Reference
from tests.integration.trainer.test_step import BATCHES, EPSILON, RATE, compare, settings

LORA = {"lora_rank": 4, "lora_alpha": 6, "lora_targets": ["q_proj", "v_proj", "down_proj"], "seed": 3}
IDS = torch.arange(40).reshape(2, 20)


class PeftReference(Reference):
    """The same steps by peft around the model, from the adapter that a run starts with. Its model without it is the reference."""

    def __init__(self, model: Path, **given: Any) -> None:
        super().__init__(model, **given)
        ours = load_model(str(model), precision="float32", zero=None).lm
        add_adapter(ours, rank=4, alpha=6, targets=LORA["lora_targets"], seed=LORA["seed"])
        start = {name: tensor.double() for name, tensor in ours.named_parameters() if "lora_" in name}
        assert len(start) == 12 and all(bool(tensor.any()) == ("lora_A" in name) for name, tensor in start.items())
        config = LoraConfig(r=4, lora_alpha=6, target_modules=LORA["lora_targets"], lora_dropout=0.0)
        self.model = get_peft_model(self.model, config, autocast_adapter_dtype=False)
        places = {name.removeprefix("base_model.model."): place for name, place in self.model.named_parameters()}
        for name, tensor in start.items():
            places[name].data.copy_(tensor)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        assert len(trained) == len(start)
        self.optimizer = torch.optim.AdamW(
            trained, lr=given["learning_rate"], betas=(0.9, 0.95), eps=given["epsilon"], weight_decay=0.0
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {name.removeprefix("base_model.model."): weight for name, weight in super().weights().items()}


CASES = {
    "one rank": (1, {}),
    "two ranks, a reference, clipped": (2, {"reference_kl": 0.3, "max_grad_norm": 0.05}),
    "two ranks, nothing computed again, optimizer in the host's memory": (
        2, {"activation_checkpointing": False, "offload_optimizer": True},
    ),
    "two ranks that share samples": (2, {"sequence_parallel": 2, "activation_offload": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_peft_in_a_plain_process(case: str, tmp_path: Path) -> None:
    count, more = CASES[case]
    model = random_model(tmp_path / "model")
    plain = PeftReference(model, learning_rate=RATE, epsilon=EPSILON, max_grad_norm=more.get("max_grad_norm", 0.0))
    job = {"settings": settings(model, **LORA, **more), "batches": BATCHES, "pushed": "float32"}
    found = run_ranks(count, job, tmp_path / "job")
    for report, drawn in zip(found["reports"], BATCHES, strict=True):
        batch = random_batch(**drawn)
        expected = plain.step(batch, [range(len(batch.rows))], reference_kl=more.get("reference_kl", 0.0))
        measured = {name: report["metrics"][name] for name in expected}
        assert measured == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert ("reference/kl" in report["metrics"]) == ("reference_kl" in more)
    compare(found["weights"], plain.weights())
    moved = [name for name, weight in found["weights"].items() if "lora_B" in name and weight.abs().max() > RATE / 2]
    assert len(moved) == 6
    merged = {name: tensor.float() for name, tensor in plain.model.merge_and_unload().state_dict().items()}
    compare(found["pushed"], merged)


def test_a_checkpoint_holds_the_adapter_alone_and_any_ranks_go_on_from_it(tmp_path: Path) -> None:
    """Bit for bit on as many ranks, and as the same steps otherwise; another adapter or another model is refused, by name."""
    model, other = random_model(tmp_path / "model"), random_model(tmp_path / "other", seed=1)
    given = settings(
        model, **LORA, precision="bfloat16", reference_kl=0.1, checkpoint_dir=str(tmp_path / "checkpoints")
    )
    job = {"settings": given, "batches": BATCHES, "states": True}
    never = run_ranks(2, job | {"save_after": [2], "resume": True}, tmp_path / "never")
    [folder] = (tmp_path / "checkpoints").glob("step-*")
    kinds = {path.name.split("-")[0] for path in folder.iterdir()}
    assert kinds == {"adapter", "random", "state.msgpack", "zero"}
    whole = sum(path.stat().st_size for path in model.rglob("*.safetensors"))
    written = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    elements = sum(weight.numel() for name, weight in never["weights"].items() if "lora_" in name)
    assert 14 * elements < written < 14 * elements + 16_000 and written < whole / 2

    again = run_ranks(2, job | {"resume": True}, tmp_path / "again")
    assert [report["step"] for report in again["reports"]] == [3]
    assert again["reports"][0]["ledger"] == never["reports"][2]["ledger"]
    assert all(torch.equal(weight, never["weights"][name]) for name, weight in again["weights"].items())
    alone = run_ranks(1, job | {"resume": True, "pushed": "bfloat16"}, tmp_path / "alone")
    for name, state in alone["states"][0].items():
        if "lora_" in name:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(state, again["states"][0][name], strict=True))

    refused = [[given["checkpoint_dir"], "r"]]
    for changed, said in (
        ({"model": str(other)}, "on weights"), ({"lora_alpha": 8}, "alpha 8"), ({"lora_rank": None}, "none now"),
    ):  # fmt: skip
        cut = {"lora_alpha": None, "lora_targets": []} if "lora_rank" in changed else {}
        this = {"settings": given | changed | cut, "batches": [], "refused": refused}
        [why] = run_ranks(1, this, tmp_path / f"refused {said}")["refusals"]
        assert "adapter rank 4, alpha 6, targets down_proj q_proj v_proj, on weights" in why and said in why


def test_what_a_checkpoint_holds_is_peft_s_and_merges_to_a_model_like_any_other(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", tied=True)
    given = settings(model, **LORA, checkpoint_dir=str(tmp_path / "checkpoints"))
    job = {"settings": given, "batches": BATCHES, "save_after": [3], "pushed": "float32"}
    found = run_ranks(1, job, tmp_path / "job")
    [adapter] = (tmp_path / "checkpoints").glob("step-*/adapter-*")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        before = base(IDS).logits
        expected = PeftModel.from_pretrained(base, adapter)(IDS).logits
    assert (expected - before).abs().max() > 0.01

    merge_adapter(adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    weights = dict(merged.named_parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in found["pushed"].items())
    with pytest.raises(ConfigError, match="is there already"):
        merge_adapter(adapter, tmp_path / "merged")
    with pytest.raises(ConfigError, match="not an adapter of the model"):
        merge_adapter(adapter, tmp_path / "wider", model=str(random_model(tmp_path / "wide", heads=8)))
    assert not (tmp_path / "wider").exists()


def test_a_push_of_the_adapter_alone_is_peft_s_and_names_what_it_goes_onto(tmp_path: Path) -> None:
    """Gathered from two ranks."""
    model = random_model(tmp_path / "model")
    job = {
        "settings": settings(model, **LORA),
        "batches": BATCHES,
        "pushed": "float32",
        "adapter_to": str(tmp_path / "weights"),
    }
    found = run_ranks(2, job, tmp_path / "job")
    [copy] = [WeightsCopy.read(path) for path in (tmp_path / "weights").iterdir()]
    assert copy.version == "run/1" and copy.manifest.adapter is not None
    assert copy.manifest.adapter.model_dump() == {"base": checkpoint_digest(model), "rank": 4, "alpha": 6}
    tensors = {name: t for shard in copy.manifest.shards for name, t in load_file(copy.folder / shard.name).items()}
    assert [entry.name for entry in copy.manifest.tensors] == list(tensors) and len(tensors) == 12

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, target_modules=LORA["lora_targets"]))
    loaded = set_peft_model_state_dict(adapted, tensors)
    assert not loaded.unexpected_keys
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        before = merged(IDS).logits
        merged.load_state_dict(found["pushed"], strict=False)
        expected = merged(IDS).logits
        torch.testing.assert_close(adapted(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - before).abs().max() > 0.01

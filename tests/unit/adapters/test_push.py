"""What `push` refuses before anything is sent, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.core_model_loading import WeightRenaming

from steno import Client
from steno.contracts.errors import BadRequest, Conflict, NotFound, Unreachable
from steno.contracts.policy import Update, UpdateSpec, Want, WorkerUpdate
from steno.models import TINY
from steno_adapters import weights
from steno_adapters.weights import PushRefused, as_in_checkpoint, push
from tests.support.waiting import own_pauses


class Proxy:
    """Answers from a list: an update's state, or an error."""

    def __init__(self, *answers: str | Exception, wants: list[Want] | None = None) -> None:
        self.answers, self.wants = list(answers), wants or []
        self.specs: list[UpdateSpec] = []
        self.sent: list[tuple[str, int, int]] = []

    def post_update(self, spec: UpdateSpec) -> Update:
        self.specs.append(spec)
        return self.update(spec.update_id)

    def update(self, update_id: str, *, wait_s: float = 0.0) -> Update:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        workers = [WorkerUpdate(worker_id="w", state="failed", error="broken")] if answer == "failed" else []
        wants, self.wants = self.wants, []
        return Update(
            update_id=update_id, version=self.specs[-1].version, transport=self.specs[-1].transport, created_at=0.0,
            state=cast(Any, answer), workers=workers, wants=wants,
        )  # fmt: skip

    def upload_shard(self, update_id: str, name: str, offset: int, data: bytes) -> int:
        self.sent.append((name, offset, len(data)))
        return offset + len(data)


def pushed(proxy: Proxy, tensors: Any = None, version: str = "a/1", **options: Any) -> Update:
    tensors = {"w": torch.ones(3)} if tensors is None else tensors
    return push(cast(Client, proxy), tensors, version, **options)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PAUSE_S", 0.0)
    monkeypatch.setattr(weights, "FAILED_PAUSE_S", 0.0)


@pytest.mark.parametrize("version", ["1", "a/b", "a/-1", "a/01", "a b/1", "/1", "a/1/2"])
def test_a_version_is_a_lineage_and_a_step(version: str) -> None:
    with pytest.raises(BadRequest, match="LINEAGE/STEP"):
        pushed(Proxy(), version=version)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_not_sent(value: float) -> None:
    with pytest.raises(BadRequest, match="w has NaN"):
        pushed(Proxy(), {"w": torch.tensor([1.0, value])})
    with pytest.raises(BadRequest, match="must be at least one"):
        pushed(Proxy(), {})


@pytest.mark.parametrize("loaded", [True, False])
def test_experts_are_sent_one_by_one_as_checkpoints_have_them(tmp_path: Path, loaded: bool) -> None:
    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    proxy = Proxy("done")
    pushed(proxy, as_in_checkpoint(model, model.state_dict()), folder=tmp_path)
    [file] = Path(proxy.specs[0].location).glob("*.safetensors")
    found, wanted = load_file(file), load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == wanted.keys() != model.state_dict().keys(), "a tied head is left out"
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_what_transformers_does_not_convert_is_sent_as_it_is() -> None:
    for model in (AutoModelForCausalLM.from_pretrained(TINY), torch.nn.Linear(1, 1)):
        tensors = model.state_dict()
        assert as_in_checkpoint(model, tensors) is tensors


def test_what_transformers_knows_and_did_not_do_is_not_turned_back() -> None:
    """Under ZeRO-3 it leaves all that it knows for a model: the prefix that a model that also sees would have, say."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    model._weight_conversions = [WeightRenaming(r"^language_model\.model\.", "model.")]
    tensors = model.state_dict()
    assert as_in_checkpoint(model, tensors) is tensors


def test_tied_weights_are_sent_once_and_views_whole(tmp_path: Path) -> None:
    tied, base = torch.arange(4.0), torch.arange(6.0).reshape(2, 3)
    tensors = {"embed": tied, "head": tied, "turned": base.T, "none": torch.zeros(0), "count": torch.tensor(3)}
    proxy = Proxy("done")
    pushed(proxy, tensors, folder=tmp_path)
    [spec] = proxy.specs
    assert [entry.name for entry in spec.manifest.tensors] == ["embed", "turned", "none", "count"]
    [file] = Path(spec.location).glob("*.safetensors")
    assert torch.equal(load_file(file)["turned"], base.T)


def test_a_name_that_comes_twice_is_refused_before_anything_is_sent() -> None:
    """The last one would win, without a word."""
    proxy = Proxy()
    with pytest.raises(BadRequest, match="tensors: w comes twice"):
        pushed(proxy, iter([("w", torch.ones(3)), ("v", torch.ones(1)), ("w", torch.zeros(3))]))
    assert proxy.specs == []


def test_weights_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 16)
    proxy = Proxy("done")
    pushed(proxy, {name: torch.ones(3) for name in "abc"}, folder=tmp_path)
    shards = proxy.specs[0].manifest.shards
    assert [shard.name for shard in shards] == [f"model-0000{number}.safetensors" for number in (1, 2, 3)]
    [folder] = tmp_path.iterdir()
    assert str(folder) == proxy.specs[0].location and folder.name.startswith("weights-a-1-")
    assert all(shard.size == (folder / shard.name).stat().st_size for shard in shards)


def test_files_of_a_version_that_is_known_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that come late read them. Other weights under this version are refused, and so is NaN in the last shard."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 16)
    first, again, other, broken = (
        {"a": torch.ones(3), "b": torch.full((3,), value)} for value in (1, 1, 2, float("nan"))
    )
    proxy = Proxy("done", "done", Conflict("version a/1 is on record with other weights"))
    pushed(proxy, first, folder=tmp_path)

    def files() -> dict[Path, tuple[bytes, int]]:
        return {path: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.rglob("*") if path.is_file()}

    kept = files()
    assert len(kept) == 2
    pushed(proxy, again, folder=tmp_path)
    with pytest.raises(Conflict):
        pushed(proxy, other, folder=tmp_path)
    with pytest.raises(BadRequest, match="b has NaN"):
        pushed(proxy, broken, folder=tmp_path)
    assert files() == kept and len(list(tmp_path.iterdir())) == 1
    assert len({spec.location for spec in proxy.specs}) == 2
    [damaged, whole] = kept
    damaged.write_bytes(b"")
    proxy.answers.append("done")
    pushed(proxy, again, folder=tmp_path)
    assert {path: raw for path, (raw, _) in files().items()} == {path: raw for path, (raw, _) in kept.items()}
    assert whole.stat().st_ino == kept[whole][1]


def test_a_proxy_that_is_away_or_forgot_is_asked_again() -> None:
    proxy = Proxy("running", Unreachable("away"), NotFound("forgot"), "running", "done")
    assert pushed(proxy).state == "done"
    assert len(proxy.specs) == 2 and proxy.specs[0] == proxy.specs[1]


def test_what_a_worker_lacks_is_sent_from_where_it_lacks_it() -> None:
    proxy = Proxy("running", "done", wants=[Want(shard="model-00001.safetensors", offset=7)])
    pushed(proxy)
    size = proxy.specs[0].manifest.size
    assert proxy.sent == [("model-00001.safetensors", 7, size - 7)]


def test_a_push_that_no_worker_took_is_offered_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "FAILED_PAUSE_S", 5.0)
    slept = own_pauses(monkeypatch)
    proxy = Proxy("running", "failed", "running", "failed", "failed", "done")
    assert pushed(proxy).state == "done"
    assert len(proxy.specs) == 4 and len({spec.update_id for spec in proxy.specs}) == 1, "the same update each time"
    assert slept == [5, 10, 20]


def test_a_deadline_that_the_proxy_would_refuse_is_cut() -> None:
    proxy = Proxy("done")
    pushed(proxy, timeout_s=1e6)
    assert proxy.specs[0].deadline_s == 86400


def test_a_push_that_no_worker_took_by_its_deadline_or_that_is_refused_raises() -> None:
    with pytest.raises(PushRefused, match="broken"):
        pushed(Proxy(*["failed"] * 10_000), timeout_s=0.05)
    with pytest.raises(PushRefused, match="superseded"):
        pushed(Proxy("superseded"))
    with pytest.raises(Conflict):
        pushed(Proxy(Conflict("other weights")))
    with pytest.raises(TimeoutError, match="away"):
        pushed(Proxy(*[Unreachable("away")] * 10_000), timeout_s=0.05)

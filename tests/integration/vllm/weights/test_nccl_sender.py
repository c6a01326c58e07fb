"""The trainer's end of an NCCL update against the installed vLLM: all but the network, for which a GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from steno.contracts.policy import NcclRendezvous
from steno_trainer.weights.nccl.vllm_group import VllmGroup
from steno_trainer.weights.source import TensorMeta

pytestmark = pytest.mark.vllm

MEETING = NcclRendezvous(
    master_address="127.0.0.1", master_port=29500, world_size=3, rank_offsets={"w": 1}, packed_buffer_size_bytes=64
)
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
METAS = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


class Endpoint:
    """Where vLLM opens its communicator."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.sent: dict[str, torch.Tensor] = {}
        self.packing: dict[str, Any] = {}
        self.destroyed = False

    def open(self, info: Any) -> Endpoint:
        self.asked.append(info)
        return self

    def produce(self, iterator: Any, group: Any, src: int, post_iter_func: Any, **packing: Any) -> None:
        assert group is self and src == 0
        self.sent, self.packing = dict(iterator), packing

    def destroy(self) -> None:
        self.destroyed = True


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    made = Endpoint()
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", made.open)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", made.produce)
    return made


def test_vllm_meets_and_packs_as_the_rendezvous_says_and_sends_what_it_is_given(endpoint: Endpoint) -> None:
    group = VllmGroup(MEETING)
    [info] = endpoint.asked
    assert (info.master_address, info.master_port, info.world_size, info.rank) == ("127.0.0.1", 29500, 3, 0)
    for _ in range(2):
        group.send(METAS, iter(TENSORS.items()))
        assert endpoint.sent == TENSORS
    assert endpoint.packing == {"buffer_size_bytes": 64, "num_buffers": 2}
    group.close()
    group.close()
    assert endpoint.destroyed


def test_vllm_refuses_what_was_not_announced(endpoint: Endpoint) -> None:
    group = VllmGroup(MEETING)
    with pytest.raises(ValueError, match="b"):
        group.send(METAS, iter({"a": TENSORS["a"], "b": torch.ones(4, dtype=torch.bfloat16)}.items()))


def test_the_receiving_end_takes_the_fields_of_the_same_rendezvous() -> None:
    fields = MEETING.model_dump(exclude={"rank_offsets"}) | {"rank_offset": MEETING.rank_offsets["w"]}
    init = NCCLWeightTransferEngine.init_info_cls(**fields)
    assert (init.rank_offset, init.world_size, init.packed_buffer_size_bytes) == (1, 3, 64)
    update = NCCLWeightTransferEngine.update_info_cls(
        names=[meta.name for meta in METAS],
        dtype_names=[meta.dtype_name for meta in METAS],
        shapes=[list(meta.shape) for meta in METAS],
    )
    assert [getattr(torch, name) for name in update.dtype_names] == [meta.dtype for meta in METAS]

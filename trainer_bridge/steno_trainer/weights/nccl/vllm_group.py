"""vLLM's own NCCL engine, trainer's end (vLLM 0.32: `vllm.distributed.weight_transfer.nccl_engine`).

vLLM expects the trainer to call its servers (init, start, update, finish) around the broadcast. Here the proxy has told every
worker to do that by itself, so the client that vLLM asks for calls nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from steno.contracts.policy import NcclRendezvous
from steno_trainer.weights.source import TensorMeta


class VllmGroup:
    """An `NcclGroup` (`transport.py`): joined once it is made."""

    def __init__(self, meeting: NcclRendezvous) -> None:
        fields = meeting.model_dump(exclude={"rank_offsets"})
        self._source = _Round()
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(
            NCCLTrainerInitInfo(**fields, rank=0), client=_DrivenByProxy(), source=self._source
        )

    def send(self, metas: list[TensorMeta], tensors: Iterator[tuple[str, Tensor]]) -> None:
        """vLLM compares each tensor with what was announced. Raises: ValueError: they differ; RuntimeError: NCCL."""
        self._source.begin(metas, tensors)
        self._engine.send_weights()

    def close(self) -> None:
        """Aborts: it must not wait for peers that may be dead."""
        self._engine.shutdown()


class _Round(WeightSource):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What vLLM asks for the tensors of one round: metadata, then one pass."""

    def __init__(self) -> None:
        self._metas: list[TensorMeta] = []
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())

    def begin(self, metas: list[TensorMeta], tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._metas, self._tensors = metas, tensors

    def metadata(self) -> list[Any]:
        return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in self._metas]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._tensors


class _DrivenByProxy:
    """`VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

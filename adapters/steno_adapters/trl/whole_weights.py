"""The weights of a policy in training, whole and under the names of its checkpoint: what `PromptRollouts` and `AsyncRollouts`
push."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from steno.contracts.errors import BadRequest
from steno_adapters.trl.private_names import checkpoint_parameters
from steno_adapters.weights import Weights, as_in_checkpoint


def check_adapter(trainer: Any) -> None:
    """Raises: BadRequest: the adapter of the trainer's model can't be merged for a push."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model):
        return
    if trainer.is_fsdp_enabled or _zero_stage(trainer) == 3:
        how = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed ZeRO-3"
        raise BadRequest(
            f"peft_config: got an adapter under {how}, must be under DDP or ZeRO-2: an adapter is merged into whole weights; or "
            "use AsyncRollouts, which merges it under FSDP2",
            field="peft_config",
        )
    if not hasattr(model, "merge_adapter"):
        kind = model.active_peft_config.peft_type
        raise BadRequest(
            f"peft_config: got {getattr(kind, 'value', kind)}, must be an adapter that can be merged, such as LORA: workers get "
            "merged weights",
            field="peft_config",
        )
    check_unquantised(trainer)


def check_unquantised(trainer: Any) -> None:
    """Raises: BadRequest: the trainer's model has an adapter on quantised weights, which workers can't take merged."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model):
        return
    # GPTQ and AWQ keep theirs in buffers; bitsandbytes may keep 4-bit weights in tensors of a floating-point type.
    names = ["by its quantization_config"] if getattr(model.get_base_model(), "is_quantized", False) else []
    names += [name for name, parameter in model.named_parameters() if _is_quantised(parameter)]
    if names:
        raise BadRequest(
            f"peft_config: got an adapter on quantised weights ({names[0]}), must be on floating-point ones: workers get merged "
            "weights",
            field="peft_config",
        )


def _is_quantised(parameter: Tensor) -> bool:
    return not parameter.is_floating_point() or parameter.itemsize < 2 or hasattr(parameter, "quant_state")


@contextmanager
def whole_weights(trainer: Any) -> Iterator[Weights]:
    """The whole weights, valid inside the context. Every rank enters it; only the first reads: on others they may be empty."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if is_peft_model(model):
        with _merged(model) if trainer.accelerator.is_main_process else _nothing() as found:
            yield found
        return
    # Of DeepSpeed the engine gathers, and `trainer.model` is what it wraps.
    whole = trainer.accelerator.get_state_dict(trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model)
    yield as_in_checkpoint(model, whole or {})


def streamed_weights(trainer: Any, parameters: Iterator[tuple[str, Tensor]]) -> Weights:
    """Args: parameters: TRL's stream of them, in which an adapter is merged. Other ranks run through it at the same time."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if is_peft_model(model) else model
    return as_in_checkpoint(base, itertools.chain(parameters, _beside_trls(model)))


@contextmanager
def _merged(model: Any) -> Iterator[Weights]:
    """In place, and what changes is copied to the CPU before: to subtract an adapter again would leave rounding errors."""
    adapted = [parameter for name, parameter in model.named_parameters() if ".base_layer." in name]
    before = [parameter.detach().to("cpu", copy=True) for parameter in adapted]
    try:
        model.merge_adapter()
        whole = ((name, parameter.detach()) for name, parameter in checkpoint_parameters(model))
        yield as_in_checkpoint(model.get_base_model(), itertools.chain(whole, _beside_trls(model)))
    finally:
        model.unmerge_adapter()
        for parameter, kept in zip(adapted, before, strict=True):
            parameter.data.copy_(kept)


def _beside_trls(model: Any) -> Iterator[tuple[str, Tensor]]:
    """What TRL's stream of parameters leaves out and a checkpoint has: parameters that are frozen, and persistent buffers.

    What FSDP2 has cut is left out here too: to gather it is a collective, and the first rank alone reads this.
    """
    if is_peft_model(model):
        yield from _buffers(model.get_base_model(), _adapter_layers(model))
        return
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not isinstance(parameter, DTensor):
            yield name.replace("_checkpoint_wrapped_module.", ""), parameter.detach()
    yield from _buffers(model, ())


def _buffers(base: Any, added: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yields the persistent buffers, under the model's own names. added: paths of the adapter's layers."""
    for name, buffer in base.state_dict(keep_vars=True).items():
        layer = next((path for path in added if name.startswith(path)), "")
        rest = name.removeprefix(layer)
        if not isinstance(buffer, Tensor) or isinstance(buffer, nn.Parameter):
            continue
        if layer and not rest.startswith(("base_layer.", "modules_to_save.default.")):
            continue  # the adapter's own, or of a module that another one stands for
        rest = rest.removeprefix("modules_to_save.default.").replace("base_layer.", "")
        yield f"{layer}{rest}".replace("_checkpoint_wrapped_module.", ""), buffer.detach()


def _adapter_layers(model: Any) -> tuple[str, ...]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    return tuple(f"{path}." for path, module in model.get_base_model().named_modules() if isinstance(module, kinds))


@contextmanager
def _nothing() -> Iterator[Weights]:
    yield {}


def _zero_stage(trainer: Any) -> int:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return 0 if plugin is None else int(plugin.zero_stage)

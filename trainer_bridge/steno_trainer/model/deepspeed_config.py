"""The DeepSpeed configuration: made from the settings, with the operator's own JSON laid over it.

What the step relies on can't be overridden and is refused by name: ZeRO stage 3, the boundaries of accumulation, precision,
clipping (DeepSpeed clips to 1.0 where nothing is said) and the optimizer's rate, which all have settings of their own.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno_trainer.config import TrainerSettings

OWNED = {
    "train_batch_size": "micro_batch_tokens",
    "train_micro_batch_size_per_gpu": "micro_batch_tokens",
    "gradient_accumulation_steps": "micro_batch_tokens",
    "managed_gradient_accumulation": "micro_batch_tokens",
    "gradient_clipping": "max_grad_norm",
    "communication_data_type": "reduce_precision",
    "bf16.enabled": "precision",
    "fp16": "precision",
    "scheduler": "schedule",
    "optimizer.params.lr": "learning_rate",
    "zero_optimization.stage": "",
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "zero_optimization.offload_optimizer.ratio": "",  # the part on the GPU has an optimizer whose rate nobody sets
    "zero_optimization.offload_param.device": "offload_parameters",
    "sequence_parallel_size": "sequence_parallel",
}
"""Keys that a file may not set (dots: nested) -> the setting that does; empty: nothing does."""


def deepspeed_config(settings: TrainerSettings, *, cuda: bool) -> dict[str, Any]:
    """The policy's configuration.

    Raises: ConfigError: the file can't be read, or sets or removes what a setting owns; the field is `deepspeed`.
    """
    config = _made(settings, cuda)
    if settings.deepspeed is not None:
        _lay_over(config, _read(settings.deepspeed), f"deepspeed: {settings.deepspeed}: ")
    return config


def reference_config(policy: Mapping[str, Any]) -> dict[str, Any]:
    """A frozen model beside the policy's: the same partitioning, no optimizer."""
    kept = {key: value for key, value in policy.items() if key not in ("optimizer", "data_types")}
    zero = {key: value for key, value in policy["zero_optimization"].items() if key != "offload_optimizer"}
    return {**kept, "zero_optimization": zero}


def start_deepspeed(*, cuda: bool, own_kernels: bool) -> None:
    """Import it and show it the process groups that there are. A collective."""
    import deepspeed

    if own_kernels:
        _own_build_folder()
    if not cuda:
        # On a CPU it would first compile an all-reduce over shared memory, which only inference calls.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)


def _own_build_folder() -> None:
    """Build DeepSpeed's own kernels in a folder of this start. A start that was killed while it built leaves a lock behind in the
    shared folder, on which all later ones wait without a word. Ranks of one launcher share it (they have one parent)."""
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        import psutil  # comes with deepspeed

        parent = psutil.Process(os.getppid())
        folder = Path(tempfile.gettempdir()) / f"steno-ops-{os.getuid()}-{parent.pid}-{parent.create_time():.0f}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ConfigError(
                f"{folder} belongs to another user; set TORCH_EXTENSIONS_DIR to a folder of your own", field="deepspeed"
            )
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


def _made(settings: TrainerSettings, cuda: bool) -> dict[str, Any]:
    # Whether a kernel of DeepSpeed's own is needed: Adam over state in the host's memory, which torch's would do on one core.
    own_adam = settings.offload_optimizer and cuda
    adam: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": list(settings.betas),
        "eps": settings.adam_epsilon,
        "weight_decay": settings.weight_decay,
    }
    if not own_adam:
        adam["torch_adam"] = True
        if cuda:
            adam["fused"] = True
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": cuda,
        "contiguous_gradients": True,
        "reduce_bucket_size": 100_000_000,
        "stage3_prefetch_bucket_size": 100_000_000,
        "stage3_max_live_parameters": 500_000_000,
        "stage3_max_reuse_distance": 500_000_000,
        "stage3_param_persistence_threshold": 100_000,
    }
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
    if settings.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
    config: dict[str, Any] = {
        # One micro-batch is one "sample" to DeepSpeed, and the step says by itself when gradients are complete.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm,
        "bf16": {"enabled": settings.precision == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        # Unset, ZeRO-3 adds the ranks' gradients up in the precision of the weights, and only accumulates in float32.
        "communication_data_type": "fp32" if settings.reduce_precision == "float32" else "bf16",
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": zero,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
    }
    if settings.offload_optimizer and not own_adam:
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"deepspeed: {path}: {error.strerror}", field="deepspeed") from None
    except ValueError as error:
        raise ConfigError(f"deepspeed: {path}: not valid JSON: {error}", field="deepspeed") from None
    if not isinstance(given, dict):
        raise ConfigError(f"deepspeed: {path}: must hold an object", field="deepspeed")
    for key, setting in OWNED.items():
        if _has(given, key):
            instead = f"; use the setting {setting}" if setting else ""
            raise ConfigError(f"deepspeed: {path}: {key} can't be set here{instead}", field="deepspeed")
    return given


def _has(values: Any, key: str) -> bool:
    for word in key.split("."):
        if not isinstance(values, dict) or word not in values:
            return False
        values = values[word]
    return True


def _lay_over(config: dict[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Args: where: how a message begins. Raises: ConfigError: a whole part would be gone, with what nobody may set in it."""
    for key, value in given.items():
        if not isinstance(config.get(key), dict):
            config[key] = value
        elif isinstance(value, dict):
            _lay_over(config[key], value, f"{where}{key}.")
        else:
            got = json.dumps(value)[:80]
            raise ConfigError(f"{where}{key}: got {got}, must be an object", field="deepspeed")

"""A causal language model as the step needs it: packed samples in, log-probabilities of their trained tokens out.

Owns how a model directory becomes a module that ZeRO-3 may partition: attention over packed samples, the head in its own
module, and the refusal of models whose log-probabilities these would not be.

Shapes: S packed tokens on this rank, N trained tokens among those that they predict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steno.contracts.errors import ConfigError
from steno_trainer.model import attention
from steno_trainer.model.attention import Segments
from steno_trainer.model.logprobs import LogprobHead
from steno_trainer.model.model_config import STATEFUL, check_config, layer_kinds, positions
from steno_trainer.model.sizes import sizes_of
from steno_trainer.packing.collate import PackedBatch
from steno_trainer.packing.plan import CostModel

_FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Names in models' configurations for a number that logits are multiplied by (1), or divided by (-1)."""
_TEXT_PART = {r"^language_model\.model\.": "model.", r"^language_model\.lm_head\.": "lm_head."}
"""Names of the text part in checkpoints of models that also see (Gemma 3, Mistral 3, Llama 4), and in the text part alone:
transformers knows the first ones only for the whole model."""


class PolicyModel(nn.Module):
    """A transformers model whose head is a `LogprobHead`, under the names that its parameters have in the model itself."""

    def __init__(self, lm: Any, *, offload_activations: bool = False) -> None:
        super().__init__()
        lm.lm_head = LogprobHead(lm.lm_head.weight)
        self.lm = lm
        self._offload = offload_activations
        self._factor = head_factor(lm.config)

    def forward(
        self, packed: PackedBatch, segments: Segments | None, chunks: int, logits: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, [N] each, float32. Every rank calls this equally often.

        Args:
            segments: None: by the model's own forward pass, whole logits and all; of one sample.
            logits: give these instead, [N, V] float32, and nothing; whatever the targets are.
        """
        if segments is None:
            logits_ND = self.lm(input_ids=packed.input_ids_1S, use_cache=False).logits[0, packed.predictor_N].float()
            laws_ND = (logits_ND / packed.temperatures_N[:, None]).log_softmax(-1)
            return laws_ND.gather(-1, packed.targets_N[:, None])[:, 0], -(laws_ND.exp() * laws_ND).sum(-1)
        with _offloaded(packed.input_ids_1S.shape[1]) if self._offload and self.training else contextlib.nullcontext():
            states_1SD = self.lm.base_model(
                input_ids=packed.input_ids_1S, position_ids=packed.position_ids_1S, use_cache=False, segments=segments,
                **segments.for_kernels(),
            ).last_hidden_state  # fmt: skip
        states_ND = states_1SD[0].index_select(0, packed.predictor_N)
        # A factor of the logits is one of their temperature.
        temperatures_N = packed.temperatures_N / self._factor
        targets_N = None if logits else packed.targets_N
        found: tuple[Tensor, Tensor] = self.lm.lm_head(states_ND, targets_N, temperatures_N, chunks)
        return found


def load_model(
    path: str,
    *,
    precision: str,
    zero: Mapping[str, Any] | None,
    longest: int = 2**31,
    checkpointing: bool = False,
    offload_activations: bool = False,
    trust_remote_code: bool = False,
) -> PolicyModel:
    """The model of a directory, in training mode.

    Args: zero: the DeepSpeed configuration, by which weights are partitioned while they are read (no rank ever holds the whole
        model); None: whole. Under it this is a collective. longest: tokens of the longest sample.
    Raises: ConfigError: names `model`: not a causal language model, one whose checkpoint lacks some of its tensors, or one whose
        head or attention is not covered.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    attention.register()
    # transformers keeps a weak reference to this and partitions what it loads for as long as it lives.
    watched = HfDeepSpeedConfig(dict(zero)) if zero is not None else None
    try:
        whole = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        config = whole.get_text_config()  # of a model that also sees, the part that reads and writes
        check_config(config, longest=min(longest, positions(config)))
        lm, loaded = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=getattr(torch, precision), attn_implementation=attention.NAME,
            trust_remote_code=trust_remote_code, output_loading_info=True, key_mapping=None if config is whole else _TEXT_PART,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: {error}", field="model") from error
    except (
        AttributeError,
        KeyError,
        TypeError,
    ) as error:  # what classes that know their own kinds of attention only say
        raise ConfigError(f"model {path}: not supported: {type(error).__name__}: {error}", field="model") from error
    finally:
        del watched
    if missing := sorted(loaded["missing_keys"]):
        # transformers gives them random values, and says so in its log only.
        raise ConfigError(
            f"model {path}: its checkpoint has no {missing[0]} ({len(missing)} of the model's tensors are missing); if it "
            "takes images too, and transformers does not know the names of its text part, save the text part by itself",
            field="model",
        )
    # Where weights leave, these are turned back (`weights/source.py`). Under ZeRO-3 transformers notes here all that it knows for
    # the model, also what this checkpoint did not need.
    lm._weight_conversions = [one for one in getattr(lm, "_weight_conversions", None) or () if one.was_used()]
    head = getattr(lm, "lm_head", None)
    if getattr(head, "weight", None) is None or getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"model {path}: its output head is not a plain matrix; this model is not supported", field="model"
        )
    if checkpointing:
        # Re-entrant: the other kind compares shapes of what it saved and computed again, and ZeRO-3's weights are empty in
        # between.
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    lm.train()
    return PolicyModel(lm, offload_activations=offload_activations)


def head_factor(config: Any) -> float:
    """What logits are multiplied by, after the product with the head. 1.0: nothing."""
    found = 1.0
    for name, power in _FACTORS.items():
        found *= float(getattr(config, name, None) or 1.0) ** power
    return found


def cost_model(lm: Any, *, frozen: bool = False) -> CostModel:
    """What a token costs, from the model's configuration and the sizes of its parameters (whole ones, also under ZeRO-3).

    Of experts those count that a token is sent to; for what pairs of tokens cost, layers with attention do.

    Args: frozen: only an adapter gets gradients, which is not in `lm` yet, and costs next to nothing.
    Raises: ConfigError: it has experts that can't be counted.
    """
    config = lm.config
    sizes = sizes_of(lm)
    kinds = layer_kinds(config)
    heads = getattr(config, "num_attention_heads", None) or 0
    size = (getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0
    attentive = [
        kind for kind in kinds if kind not in STATEFUL - {"hybrid"} and ("attention" in kind or kind == "hybrid")
    ]
    return CostModel.of(
        parameters=sizes.active - sizes.outer, layers=len(attentive) if kinds else config.num_hidden_layers,
        attention_width=heads * size, hidden=config.hidden_size, vocabulary=config.vocab_size,
        frozen=frozen,
    )  # fmt: skip


@contextlib.contextmanager
def _offloaded(tokens: int) -> Iterator[None]:
    """Keep what is saved for the backward pass of this size, the layers' states, in the host's memory.

    Only large activations go: [1, tokens, …]. Weights have other shapes, and must not be copied.
    """

    def pack(tensor: Tensor) -> Any:
        if tensor.shape[:2] != (1, tokens) or not tensor.is_floating_point():
            return tensor
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        kept.copy_(tensor, non_blocking=True)
        return tensor.device, kept

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, kept = saved
        found: Tensor = kept.to(device, non_blocking=True)
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield

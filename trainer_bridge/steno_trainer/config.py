"""The trainer's settings: one frozen tree, checked at load, each field with its unit and the reason for its default.

Owns what an operator can choose about a training run and which combinations are refused. How the values are found (command line,
environment `STENO_TRAIN_*`, file) is `steno/config/settings.py`. Light to import: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from steno.config.plugins import names_function
from steno.config.settings import Settings, SettingsConfigDict
from steno.contracts.errors import ConfigError
from steno.contracts.records import MAX_REWARD
from steno_trainer.data.advantages import GDPO, Estimator
from steno_trainer.data.overlong import Overlong, OverlongFiltering
from steno_trainer.objective.aggregation import Aggregation
from steno_trainer.objective.registry import REGISTRY, imitates

Decay = Annotated[float, Field(ge=0, lt=1)]


class Need(NamedTuple):
    """What the setting `field` needs to have an effect. words: the need, as messages say it. by: the settings that decide whether
    it is met; messages show the values of all of them."""

    field: str
    words: str
    by: tuple[str, ...]
    met: Callable[[Any], bool]


_RATIOS = "a ratio other than 1: mini_batches or epochs above 1, or proximal: sampler"
_OF_RATIOS = ("mini_batches", "epochs", "proximal")


def _ratios_differ(settings: Any) -> bool:
    """Whether a token's ratio can be other than 1. If not, the proximal policy is the policy in training."""
    return bool(settings.epochs * settings.mini_batches > 1 or settings.proximal == "sampler")


NEEDS = (
    *(
        Need(field, "an objective that reads rewards and sampled probabilities", ("objective",), lambda s: not s.imitates)
        for field in (
            "importance_sampling_level", "proximal", "estimator", "count_silent_groups", "clip_low", "clip_high", "dual_clip",
            "mismatch", "mismatch_level", "mismatch_low", "mismatch_high", "overlong_max_tokens", "overlong_penalty_factor",
            "annotate", "distillation",
        )
    ),
    Need("reduce_precision", "precision: bfloat16", ("precision",), lambda s: s.precision == "bfloat16"),
    Need("lora_alpha", "lora_rank", ("lora_rank",), lambda s: s.lora_rank is not None),
    Need("lora_targets", "lora_rank", ("lora_rank",), lambda s: s.lora_rank is not None),
    Need(
        "dual_clip", "objective: dual_clip or FILE.py:function", ("objective",),
        lambda s: s.objective == "dual_clip" or s.objective not in REGISTRY,
    ),
    Need("importance_sampling_level", _RATIOS, _OF_RATIOS, _ratios_differ),
    Need(
        "overlong_penalty_factor", "overlong_max_tokens", ("overlong_max_tokens",),
        lambda s: s.overlong_max_tokens is not None,
    ),
    # `off` is accepted: with `sampler` nothing is corrected anyway.
    Need("mismatch", "proximal: trainer", ("proximal",), lambda s: s.mismatch == "off" or s.proximal == "trainer"),
    Need("mismatch_low", "mismatch: masked", ("mismatch",), lambda s: s.mismatch == "masked"),
    *(
        Need(
            field, "mismatch: truncated or masked, and proximal: trainer", ("mismatch", "proximal"),
            lambda s: s.mismatch != "off" and s.proximal == "trainer",
        )
        for field in ("mismatch_level", "mismatch_high")
    ),
    Need(
        "reference", "reference_kl or distillation above 0", ("reference_kl", "distillation"), lambda s: s.scores_reference
    ),
    Need("distillation", "reference, the teacher", ("reference",), lambda s: s.reference is not None),
    Need("gdpo_metrics", "estimator: gdpo", ("estimator",), lambda s: s.estimator == GDPO),
    Need(
        "overlong_max_tokens", "another estimator than gdpo, which reads no length penalty", ("estimator",),
        lambda s: s.estimator != GDPO,
    ),
    Need("count_silent_groups", "distillation: 0, which trains these groups", ("distillation",), lambda s: not s.distillation),
    Need("offload_parameters", "offload_optimizer", ("offload_optimizer",), lambda s: s.offload_optimizer),
)  # fmt: skip
IDLE = tuple(
    Need(field, _RATIOS, _OF_RATIOS, lambda s: _ratios_differ(s) or s.objective not in REGISTRY)
    for field in ("clip_low", "clip_high", "dual_clip")
)
"""Settings that are warned of, not refused, if they have no effect: recipes set clipping bounds even if every ratio is 1."""


class TrainerSettings(Settings):
    """What `steno train` runs with."""

    model_config = SettingsConfigDict(env_prefix="STENO_TRAIN_", allow_inf_nan=False)

    # -- what is trained
    model: str = Field(description="model directory (or a name, where transformers can fetch it) to start from")
    precision: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="weights and activations; optimizer state and accumulated gradients are float32 anyway"
    )
    reduce_precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type in which gradients are summed over ranks; bfloat16 sends half the bytes and rounds each sum to 8 bits",
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto: CUDA where there is a GPU")
    trust_remote_code: bool = Field(False, description="run the Python files of a model directory")
    seed: int = Field(0, ge=0, description="seed of everything random in training: mini-batches, dropout")

    # -- an adapter in place of the whole model
    lora_rank: int | None = Field(
        None, ge=1, le=1024,
        description="train a LoRA adapter of this rank, and leave the model as it is; unset: train the whole model",
    )  # fmt: skip
    lora_alpha: int | None = Field(
        None, ge=1, description="the adapter is scaled by this over its rank; unset: the rank, which is a scale of 1"
    )
    lora_targets: list[str] = Field(
        default_factory=list,
        description="layers that get an adapter, by the last word of their names: q_proj, v_proj, …; unset: all linear layers "
        "but the head",
    )

    # -- the optimizer
    learning_rate: float = Field(
        1e-6, gt=0, description="peak learning rate; 1e-6 is usual for RL of whole models, 1e-5 to 1e-4 with lora_rank"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps from 0 to the peak rate, linearly")
    total_steps: int | None = Field(None, ge=1, description="steps of the whole run; linear and cosine end there, at 0")
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.95), description="AdamW's beta1 and beta2; beta2 0.95 forgets a bad gradient in 20 steps"
    )
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(
        0.0, ge=0, description="AdamW's weight decay; RL changes weights too little to need one"
    )
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are scaled down to this norm; 0: never")

    # -- the objective: docs/objective.md has the formulas
    objective: str = Field(
        "clip",
        description=f"loss of a token: {', '.join(REGISTRY)}, or FILE.py:function, a function of your own",
    )
    dual_clip: float = Field(
        3.0, gt=1, description="ratio beyond which `dual_clip` pushes a token of negative advantage down no further"
    )
    estimator: str = Field(
        "grpo",
        description=f"how rewards become advantages: {', '.join(Estimator)}, {GDPO}, or FILE.py:function, a function of your own",
    )
    gdpo_metrics: list[str] = Field(
        default_factory=list,
        description="metrics of the trials that are the rewards of the estimator gdpo, each NAME or NAME=WEIGHT; repeat for "
        "several; without a weight: 1",
    )
    aggregation: Aggregation = Field(Aggregation.TOKEN_MEAN, description="weight of each token")
    constant_tokens: int | None = Field(None, ge=1, description="C of the aggregation `constant`, in tokens")
    count_silent_groups: bool = Field(
        True, description="groups whose rewards are all equal count in the divisor of a token's loss, as in the papers"
    )
    importance_sampling_level: Literal["token", "completion", "sequence"] = Field(
        "token",
        description="unit with one importance ratio, clipped as one; a `sequence` is all trained tokens of a sample (GSPO)",
    )
    clip_low: float | None = Field(
        None, ge=0, le=1,
        description="ratio is clipped below at 1 - this, for negative advantages; unset: 0.2, and 3e-4 where tokens share one",
    )  # fmt: skip
    clip_high: float | None = Field(
        None, ge=0,
        description="ratio is clipped above at 1 + this, for positive advantages; unset: 0.28 (DAPO), and 4e-4 (GSPO)",
    )  # fmt: skip
    overlong_filtering: OverlongFiltering = Field(
        OverlongFiltering.OFF,
        description="left out of the loss: `completion`: cut completions; `trial`: these, and all of a trial that reached a "
        "limit",
    )
    overlong_max_tokens: int | None = Field(
        None, ge=1, description="sampled tokens at which a trial gets the full length penalty; unset: no penalty"
    )
    overlong_buffer_tokens: int | None = Field(
        None, ge=1, description="tokens below overlong_max_tokens over which the penalty grows from 0"
    )
    overlong_penalty_factor: float = Field(1.0, gt=0, description="full length penalty, subtracted from the reward")
    proximal: Literal["trainer", "sampler"] = Field(
        "trainer",
        description="denominator of the ratio that is clipped: probabilities of the trainer at the start of the step (with one "
        "optimizer step per batch nothing is clipped then), or those recorded by the sampler (then `mismatch` does nothing)",
    )
    mismatch: Literal["off", "truncated", "masked"] = Field(
        "truncated", description="importance weights against what the rollout engine recorded"
    )
    mismatch_level: Literal["token", "sequence", "geometric"] | None = Field(
        None,
        description="unit with one weight of `mismatch`: a token, or all trained tokens of a sample, by the product "
        "(`sequence`) or the geometric mean (`geometric`) of their ratios; if importance_sampling_level is not token: all tokens "
        "that share a ratio; unset: token, but geometric if importance_sampling_level is not token",
    )
    mismatch_low: float = Field(0.5, ge=0, description="lowest ratio that `masked` keeps")
    mismatch_high: float = Field(2.0, gt=0, description="largest ratio that `masked` keeps and `truncated` cuts to")
    reference_kl: float = Field(0.0, ge=0, description="weight of the k3 KL to the reference; 0: none")
    distillation: float = Field(
        0.0, ge=0,
        description="weight of log(reference / policy) in each token's advantage: the reference is a teacher then, and groups "
        "whose rewards are all equal are trained too; 0: none",
    )  # fmt: skip
    reference: str | None = Field(
        None,
        description="model directory of the reference, or of the teacher; default: `model`, which with lora_rank is the model "
        "without its adapter",
    )
    entropy_bonus: float = Field(0.0, description="weight of the entropy, in nats")

    # -- a step
    groups_per_step: int = Field(8, ge=1, description="groups that one step trains")
    max_staleness_steps: int = Field(
        1, ge=0, description="most steps that a sample's oldest version may be behind; 0: on-policy"
    )
    epochs: int = Field(1, ge=1, description="times that a step goes over its samples")
    mini_batches: int = Field(1, ge=1, description="optimizer steps per epoch; more than one clips against the start")
    micro_batch_tokens: int = Field(
        16384,
        ge=2,
        description="tokens that a GPU runs at once (a sequence-parallel group, if there are any); also the longest sample",
    )
    chunk_tokens: int = Field(
        1024, ge=1, description="trained tokens whose logits are in memory at once: about 3 x vocabulary x 4 bytes each"
    )

    # -- memory
    activation_checkpointing: bool = Field(True, description="keep one state per layer and recompute the rest")
    activation_offload: bool = Field(
        False, description="keep activation_checkpointing's states in host memory until needed"
    )
    offload_optimizer: bool = Field(False, description="optimizer state and float32 weights in the host's memory")
    offload_parameters: bool = Field(False, description="weights in the host's memory too; needs offload_optimizer")
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="GPUs that share each sample (DeepSpeed-Ulysses); divides their number and the model's heads",
    )
    deepspeed: Path | None = Field(
        None, description="JSON file that overrides the DeepSpeed configuration made from these settings"
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="peak TFLOPS of one GPU, for MFU; default: by the GPU's name, if known"
    )

    # -- what is kept
    checkpoint_dir: Path = Field(
        Path("checkpoints"), description="folder of this run's checkpoints, shared by all nodes"
    )
    checkpoint_every: int = Field(10, ge=1, description="steps between two checkpoints")
    checkpoints_kept: int = Field(2, ge=1, description="number of checkpoints that are kept, newest first")

    annotate: bool = Field(
        False,
        description="post, for each trained token, by how much the trainer's log-probability differs from the sampler's (2 bytes "
        "per token, after the step); read with the turns",
    )

    # -- patience
    wait_timeout_s: float = Field(
        86400.0,
        gt=0,
        description="seconds that ranks wait for the next batch of the first rank (on gloo, which uses no GPU)",
    )
    collective_timeout_s: float = Field(
        1800.0, gt=0, description="seconds after which a collective of the step counts as hung"
    )

    @property
    def imitates(self) -> bool:
        """Whether the objective reads no rewards, ratios and sampled probabilities."""
        return imitates(self.objective)

    @property
    def scores_reference(self) -> bool:
        """Whether a step needs log-probabilities by the reference."""
        return self.reference_kl > 0 or self.distillation > 0

    @property
    def gdpo_weights(self) -> dict[str, float]:
        """Metric -> weight. Raises: ConfigError."""
        weights: dict[str, float] = {}
        for one in self.gdpo_metrics:
            name, number = one.rsplit("=", 1) if "=" in one else (one, "1")
            try:
                weight = float(number)
            except ValueError:
                weight = 0.0
            if not name or name in weights or not 0 < abs(weight) <= MAX_REWARD:
                raise ConfigError(
                    f"gdpo_metrics: got {one}, must be NAME or NAME=WEIGHT, each name once, each weight a number other than 0 "
                    f"and within ±{MAX_REWARD:g}",
                    field="gdpo_metrics",
                )
            weights[name] = weight
        return weights

    @property
    def overlong(self) -> Overlong:
        return Overlong(
            self.overlong_filtering,
            self.overlong_max_tokens,
            self.overlong_buffer_tokens or 1,
            self.overlong_penalty_factor,
        )

    def check(self) -> None:
        """Raises: ConfigError: names the field of a combination that can't be."""
        if (self.aggregation is Aggregation.CONSTANT) != (self.constant_tokens is not None):
            raise ConfigError(
                f"constant_tokens: got {self.constant_tokens}, must be set with aggregation: constant, and only then; "
                f"aggregation: got {self.aggregation.value}",
                field="constant_tokens",
            )
        if self.objective not in REGISTRY and not names_function(self.objective):
            raise ConfigError(
                f"objective: got {self.objective}, must be {', '.join(REGISTRY)} or FILE.py:function", field="objective"
            )
        if self.estimator not in (*Estimator, GDPO) and not names_function(self.estimator):
            raise ConfigError(
                f"estimator: got {self.estimator}, must be {', '.join(Estimator)}, {GDPO} or FILE.py:function",
                field="estimator",
            )
        if self.estimator == GDPO and not self.gdpo_weights:
            raise ConfigError(
                "gdpo_metrics: got nothing, estimator gdpo needs the metrics that are rewards", field="gdpo_metrics"
            )
        self.check_needs(NEEDS)
        if (self.overlong_max_tokens is None) != (self.overlong_buffer_tokens is None):
            raise ConfigError(
                f"overlong_buffer_tokens: got {self.overlong_buffer_tokens}, must be set together with overlong_max_tokens, "
                f"{self.overlong_max_tokens}",
                field="overlong_buffer_tokens",
            )
        if (self.overlong_buffer_tokens or 0) > (self.overlong_max_tokens or 0):
            raise ConfigError(
                f"overlong_buffer_tokens: got {self.overlong_buffer_tokens}, must be at most overlong_max_tokens, "
                f"{self.overlong_max_tokens}",
                field="overlong_buffer_tokens",
            )
        if self.mismatch == "masked" and not self.mismatch_low < self.mismatch_high:
            raise ConfigError(
                f"mismatch_low: got {self.mismatch_low}, must be below mismatch_high, {self.mismatch_high}",
                field="mismatch_low",
            )
        if self.mismatch_level == "token" and self.importance_sampling_level != "token":
            raise ConfigError(
                f"mismatch_level: got token, must be sequence or geometric where importance_sampling_level is "
                f"{self.importance_sampling_level}: tokens that share a ratio have one weight",
                field="mismatch_level",
            )
        if self.schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"total_steps: got nothing, schedule {self.schedule} needs it", field="total_steps")
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise ConfigError(
                f"warmup_steps: got {self.warmup_steps}, must be at most total_steps, {self.total_steps}",
                field="warmup_steps",
            )

    def check_needs(self, needs: Iterable[Need]) -> None:
        """Raises: ConfigError: names the first setting that would have no effect. A setting at its default is accepted."""
        for need, seen in self._unmet(needs):
            raise ConfigError(
                f"{need.field}: got {self._shown(need.field)}, needs {need.words}; {seen}", field=need.field
            )

    def idle(self) -> list[str]:
        """Warnings for the operator: one for each setting of `IDLE` that is set and has no effect."""
        return [
            f"{need.field}: got {self._shown(need.field)}, has no effect without {need.words}; {seen}"
            for need, seen in self._unmet(IDLE)
        ]

    def _unmet(self, needs: Iterable[Need]) -> Iterator[tuple[Need, str]]:
        """Yields each need that is not met by a setting other than its default, and the values that decide it."""
        for need in needs:
            default = type(self).model_fields[need.field].get_default(call_default_factory=True)
            if getattr(self, need.field) != default and not need.met(self):
                yield need, ", ".join(f"{name} is {self._shown(name)}" for name in need.by)

    def _shown(self, field: str) -> str:
        value = getattr(self, field)
        return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

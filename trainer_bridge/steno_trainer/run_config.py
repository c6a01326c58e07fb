"""The settings of a whole training run: those of the optimisation, and of the loop around it. `STENO_TRAIN_*` in the
environment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from steno.config.keys import ShownKey
from steno.config.object_store import check_url
from steno.config.settings import PROXY_HELP, ProxyUrl, admin_key_here, proxy_here
from steno.contracts.errors import ConfigError
from steno.contracts.policy import MOST_DEADLINE_S
from steno.contracts.runs.train_models import ModelNames
from steno_trainer.config import Need, TrainerSettings

RUN_NEEDS = (
    *(
        Need(field, "pushes of weights; records and offline push none", ("offline", "records"), lambda s: not s.is_offline)
        for field in (
            "max_staleness_steps", "transport", "weights_dir_at_workers", "weights_url", "push", "push_every", "push_deadline_s",
            "kv", "probe_tokens", "probe_tolerance", "send_dtype",
        )
    ),
    Need("weights_dir_at_workers", "transport: filesystem", ("transport",), lambda s: s.transport == "filesystem"),
    Need("push_full_every", "push: delta", ("push",), lambda s: s.push == "delta"),
    Need("nccl_processes", "transport: nccl", ("transport",), lambda s: s.transport == "nccl"),
    Need("nccl_address", "transport: nccl", ("transport",), lambda s: s.transport == "nccl"),
    Need("probe_tolerance", "probe_tokens above 0", ("probe_tokens",), lambda s: s.probe_tokens > 0),
    Need("take_s", "groups of a proxy, since those of a file are all there", ("records",), lambda s: s.records is None),
    Need("lease_ttl_s", "groups that a proxy leases", ("records",), lambda s: s.records is None),
    Need("take_over", "a run at a proxy", ("records",), lambda s: s.records is None),
    Need("dynamic_sampling", "distillation: 0, which trains every group", ("distillation",), lambda s: not s.distillation),
    Need("gdpo_metrics", "trials with metrics, which those of a file do not have", ("records",), lambda s: s.records is None),
    Need("report_by", "groups with tasks, which those of a file do not have", ("records",), lambda s: s.records is None),
)  # fmt: skip


class RunSettings(TrainerSettings):
    """What `steno train` runs with."""

    # -- where groups come from
    proxy: ProxyUrl = Field(default_factory=proxy_here, description=PROXY_HELP)
    key: ShownKey = Field(default_factory=admin_key_here, description="admin key; unset: STENO_ADMIN_KEY")
    run: str = Field("default", min_length=1, max_length=128, description="the run whose groups are trained")
    policy: str = Field("default", min_length=1, max_length=128, description="name of the policy that is trained")
    train_models: ModelNames = Field(
        default_factory=list,
        description="calls that are trained, by the model name that the agent asked for, with * and ?; repeat for several; "
        "unset: all of the policy's",
    )
    lease_ttl_s: float = Field(
        600.0, ge=10, le=86400, description="seconds after which the groups of a trainer that died are served again"
    )
    take_over: bool = Field(
        False,
        description="take the run over even from a trainer that the proxy heard of in the last 15 s; that trainer ends",
    )
    take_s: float | None = Field(
        None, gt=0,
        description="seconds after which a step takes the groups that are ready, at least one; unset: it waits for all",
    )  # fmt: skip
    dynamic_sampling: bool = Field(
        False,
        description="wait for groups whose rewards differ; groups whose rewards are all equal are replaced by new ones (DAPO)",
    )

    offline: bool = Field(
        False,
        description="train the run's recorded groups, of any policy version, push no weights, and end when no groups are left",
    )
    records: Path | None = Field(
        None,
        description="train the samples of this file (.jsonl or .parquet, as `steno sessions export --records samples` writes it) "
        "offline, without a proxy",
    )

    # -- where weights go
    transport: Literal["filesystem", "stream", "nccl"] = Field(
        "filesystem",
        description="filesystem: a folder that workers see; stream: through the proxy; nccl: between the GPUs",
    )
    weights_dir: Path = Field(Path("weights"), description="folder of full copies of the weights, this run's alone")
    weights_dir_at_workers: str | None = Field(
        None, description="path of weights_dir on the workers, if it differs (filesystem)"
    )
    weights_url: str | None = Field(
        None,
        description="object store where workers read the copies instead, s3://BUCKET/PREFIX or gs://…, this run's alone; workers "
        "are given the same; credentials and endpoint from the environment (filesystem)",
    )
    nccl_processes: int = Field(
        1, ge=1, description="processes of each worker's engine: tensor x pipeline x data parallel (nccl)"
    )
    nccl_address: str | None = Field(
        None, min_length=1, max_length=255,
        description="address or name of the first rank's machine, as workers reach it; unset: on the route to them (nccl)",
    )  # fmt: skip
    push: Literal["full", "delta", "adapter"] = Field(
        "full",
        description="full: every push is a full copy; delta: most are what changed bit for bit since the last one; adapter: the "
        "adapter of lora_rank alone, to engines that were started for it (delta and adapter: not nccl)",
    )
    push_full_every: int = Field(20, ge=1, le=64, description="pushes from one full copy to the next (push: delta)")
    push_every: int = Field(1, ge=1, description="steps between two pushes of the weights")
    push_deadline_s: float = Field(
        600.0,
        gt=0,
        le=MOST_DEADLINE_S,
        description="seconds that workers have to load the weights; later, a worker counts as failed",
    )
    kv: Literal["recompute", "keep"] = Field(
        "recompute", description="KV cache of requests in flight at an update: computed again, or kept"
    )
    probe_tokens: int = Field(
        64,
        ge=0,
        le=4096,
        description="tokens whose log-probabilities workers compare before they serve new weights; 0: no probe",
    )
    probe_tolerance: float | None = Field(
        None, gt=0,
        description="largest difference of a probe token's log-probability, in nats; of this or the default, whichever is more, "
        "0.15 bounds the 90th percentile and 0.05 the mean; unset, the default: 1 in bfloat16, 0.02 in float32",
    )  # fmt: skip
    send_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="floating-point type in which weights are sent; unset: the type in which they are trained"
    )

    # -- evaluation
    eval_every: int | None = Field(
        None, ge=1, description="steps between two evaluations; the first is before the first step"
    )
    eval_config: Path | None = Field(
        None, description="settings of the evaluation's rollouts (a file for steno rollout --config), in YAML or TOML"
    )

    # -- how it is watched
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of Prometheus metrics; 0: a free one; unset: none"
    )
    metrics_host: str = Field("127.0.0.1", description="address of the Prometheus metrics")
    tensorboard_dir: Path | None = Field(None, description="folder of TensorBoard's files")
    wandb_project: str | None = Field(None, description="project of Weights & Biases")
    wandb_mode: Literal["online", "offline"] = Field("online", description="offline: files for `wandb sync`")
    wandb_dir: Path = Field(Path("wandb"), description="folder of its files")
    report_by: str | None = Field(
        None, min_length=1,
        description="field of the tasks (`source`, `metadata.level`) by whose values rewards are reported too: reward_by/VALUE",
    )  # fmt: skip
    metrics_file: Path | None = Field(None, description="file that gets a JSON line per step")

    @property
    def is_offline(self) -> bool:
        """Whether the weights in training sample nothing: they are not pushed to workers."""
        return self.offline or self.records is not None

    @property
    def staleness_bound(self) -> int | None:
        """In steps. None: offline, where samples of any version are trained."""
        return None if self.is_offline else self.max_staleness_steps

    @property
    def probe_precision(self) -> str:
        """The lowest precision that workers may compute in: the lower one of `precision` and `send_dtype`."""
        return "bfloat16" if "bfloat16" in (self.precision, self.send_dtype) else "float32"

    def check(self) -> None:
        """Raises: ConfigError: names the field of a combination that can't be."""
        super().check()
        self.check_needs(RUN_NEEDS)
        if self.push_every > self.max_staleness_steps + 1:
            raise ConfigError(
                f"push_every {self.push_every}: agents would sample by weights {self.push_every - 1} steps behind, and "
                f"max_staleness_steps is {self.max_staleness_steps}",
                field="push_every",
            )
        if (self.eval_every is None) != (self.eval_config is None):
            raise ConfigError("eval_every and eval_config go together", field="eval_config")
        if self.eval_every is not None and self.eval_every % self.push_every:
            raise ConfigError(
                f"eval_every: got {self.eval_every}, must be a multiple of push_every ({self.push_every})",
                field="eval_every",
            )
        if self.probe_tokens == 1:
            raise ConfigError(
                "probe_tokens: got 1, must be 0 or at least 2: nothing comes before the first token, so that it has no "
                "log-probability",
                field="probe_tokens",
            )
        if self.weights_url is not None:
            if self.transport != "filesystem" or self.weights_dir_at_workers is not None:
                raise ConfigError(
                    "weights_url goes with transport: filesystem, without weights_dir_at_workers", field="weights_url"
                )
            check_url(self.weights_url, "weights_url")
        if self.push == "delta" and self.transport == "nccl":
            raise ConfigError(
                "push: got delta; with transport: nccl it must be full: no copy is written, and differences need one",
                field="push",
            )
        if self.push == "adapter" and self.transport == "nccl":
            raise ConfigError(
                "push: got adapter; with transport: nccl it must be full: vLLM takes adapters from files", field="push"
            )
        if self.push == "adapter" and self.lora_rank is None:
            raise ConfigError("push: got adapter, needs lora_rank, which is unset", field="push")
        if self.is_offline:
            self._check_offline()
        elif self.imitates:
            raise ConfigError(
                f"objective: got {self.objective}, which imitates what is on record: set records or offline",
                field="objective",
            )
        if self.imitates and self.dynamic_sampling:
            raise ConfigError(
                f"dynamic_sampling: got true, must be false with objective {self.objective}, which reads no rewards",
                field="dynamic_sampling",
            )

    def _check_offline(self) -> None:
        if self.proximal == "trainer" and self.mismatch == "off":
            raise ConfigError(
                "mismatch: got off; offline it must be truncated or masked, or proximal: sampler: the recorded log-probabilities "
                "are what corrects for weights that sampled long ago",
                field="mismatch",
            )
        if self.eval_config is not None:
            raise ConfigError(
                "eval_config: offline no worker serves the weights in training; `steno evaluate --model` evaluates a checkpoint",
                field="eval_config",
            )
        if self.records is not None and self.annotate:
            raise ConfigError("annotate: must be false with records: no proxy is there to post to", field="annotate")
        if self.records is not None and self.records.suffix not in (".jsonl", ".parquet"):
            raise ConfigError(f"records: got {self.records.name}, must end in .jsonl or .parquet", field="records")

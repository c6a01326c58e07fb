"""A policy's weights on their way to the workers: what a trainer posts, what workers check, what everybody can read of it.

A version is `<lineage>/<step>` (I10). Weights travel as safetensors shards, and patches that lead on from them, whatever carries
them to where a worker can read them (`filesystem`, `stream`); only `nccl` has neither. Digests are blake2b with 16 bytes, in hex.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, SerializerFunctionWrapHandler, model_serializer

LINEAGE = r"^[A-Za-z0-9._-]{1,64}$"
MOST_DEADLINE_S = 86400
"""Of an update."""
DIGEST = r"^[0-9a-f]{32}$"
Transport = Literal["filesystem", "stream", "nccl"]
PATCHES = "weight_patches"
"""Among a card's capabilities: its worker knows `Manifest.patches`. One that does not finds that digests differ, and refuses."""


class TensorEntry(BaseModel):
    """One tensor under the name that its checkpoint gives it. digest: of its contiguous little-endian bytes."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=512)
    dtype: str = Field(max_length=32, description="torch's name without the module: float32, bfloat16, …")
    shape: list[int] = Field(max_length=8)
    digest: str = Field(pattern=DIGEST)


class ShardEntry(BaseModel):
    """One file: safetensors, or a patch of one. size: bytes of the file; digest: of all of them."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(safetensors|patch)$")
    size: int = Field(ge=1)
    digest: str = Field(pattern=DIGEST)

    @property
    def object_name(self) -> str:
        """In an object store, where a file is named after what is in it: a copy is stored once, whatever versions refer to it."""
        return f"{self.digest}.{self.name.rpartition('.')[2]}"


class PatchEntry(BaseModel):
    """From one version's weights to those of the next that was pushed.

    before, after: `Manifest.digest` of the two. files: what changed in each shard (contracts/weight_patch.py), in the order of
    `Manifest.shards`.
    """

    model_config = ConfigDict(extra="forbid")
    before: str = Field(pattern=DIGEST)
    after: str = Field(pattern=DIGEST)
    files: list[ShardEntry] = Field(min_length=1, max_length=4096)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class AdapterEntry(BaseModel):
    """Says that the tensors are a LoRA adapter's, under peft's names, and that the result is `base` with this adapter.

    base: digest of the checkpoint that it goes onto (`steno.models.checkpoint`). rank, alpha: of every layer; what a layer adds
    is alpha / rank times B A.
    """

    model_config = ConfigDict(extra="forbid")
    base: str = Field(pattern=DIGEST)
    rank: int = Field(ge=1, le=4096)
    alpha: int = Field(ge=1, le=1_000_000)


class Manifest(BaseModel):
    """What an update consists of: every tensor, each in exactly one shard (no shards: `nccl`).

    tensors: with the digests of the result. patches: none: the shards are the result. Else the shards are an earlier full copy,
    and the result is that copy with all patches applied, the first one first. A worker that has the weights of some patch's
    `before` needs the patches from that one on; all others need every file. adapter: the tensors are an adapter's; a worker that
    does not know this field finds that they are not the model's, and refuses. Empty patches and adapter are left out of the JSON,
    so that the same update keeps its id.
    """

    model_config = ConfigDict(extra="forbid")
    tensors: list[TensorEntry] = Field(min_length=1, max_length=100_000)
    shards: list[ShardEntry] = Field(default_factory=list, max_length=4096)
    patches: list[PatchEntry] = Field(default_factory=list, max_length=256)
    adapter: AdapterEntry | None = None

    @property
    def files(self) -> list[ShardEntry]:
        """All files: what a worker needs that has the weights of no patch's `before`."""
        return [*self.shards, *(file for patch in self.patches for file in patch.files)]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """Of the weights, however they are cut into shards."""
        lines = sorted(f"{t.name}\0{t.dtype}\0{t.shape}\0{t.digest}" for t in self.tensors)
        if (adapter := self.adapter) is not None:
            lines.append(f"\0adapter\0{adapter.rank}\0{adapter.alpha}\0{adapter.base}")
        return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = dump(self)
        for name in ("patches", "adapter"):
            if not fields.get(name):
                fields.pop(name, None)
        return fields


class Probe(BaseModel):
    """Log-probabilities of a few tokens under the trainer's weights. A worker compares its own before it names the version (I10).

    logprobs: of token_ids[1:], each given the tokens before it, at temperature 1. The tolerances bound the absolute differences,
    in nats. tolerance: the largest difference. p90_tolerance: the 90th percentile. mean_tolerance: the mean. Two engines that
    compute alike differ little at most tokens and much at some, so the last two detect wrong weights sooner than
    the first. Older releases know `tolerance` alone. A tolerance that is not set is left out of the JSON, so that the same update
    keeps its id.
    """

    model_config = ConfigDict(extra="forbid")
    token_ids: list[int] = Field(min_length=2, max_length=4096)
    logprobs: list[FiniteFloat] = Field(min_length=1, max_length=4095)
    tolerance: float = Field(0.05, gt=0, allow_inf_nan=False, description="nats")
    p90_tolerance: float | None = Field(None, gt=0, allow_inf_nan=False, description="nats")
    mean_tolerance: float | None = Field(None, gt=0, allow_inf_nan=False, description="nats")

    @model_serializer(mode="wrap")
    def _without_what_is_not_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = dump(self)
        return {name: value for name, value in fields.items() if value is not None}


class UpdateSpec(BaseModel):
    """`POST /policy/updates`. The same spec again answers with the recorded update; a known version with other digests is 409.

    lineage, step: the version these weights are to have. parent: the version that this lineage was resumed from; None: none.
    location: where they are: a folder that workers can read, or `URL/<lineage>` in an object store (`filesystem`), the rendezvous
    as JSON (`nccl`), "" (`stream`).
    kv: `recompute`: requests in flight prefill again after the update; `keep`: they go on with their cache.
    deadline_s: seconds that workers have to load the weights. A worker that is later counts as failed, and catches up.
    """

    model_config = ConfigDict(extra="forbid")
    run_id: str | None = Field(None, max_length=128)
    policy: str = Field("default", min_length=1, max_length=128)
    lineage: str = Field(pattern=LINEAGE)
    step: int = Field(ge=0, le=2**53)
    parent: str | None = Field(None, max_length=128)
    transport: Transport
    location: str = Field("", max_length=4096)
    manifest: Manifest
    kv: Literal["recompute", "keep"] = "recompute"
    probe: Probe | None = None
    deadline_s: float = Field(600.0, gt=0, le=MOST_DEADLINE_S, allow_inf_nan=False)

    @property
    def version(self) -> str:
        return f"{self.lineage}/{self.step}"

    @property
    def update_id(self) -> str:
        """Of everything in it: the same spec is the same update at every replica, also at one that has forgotten it."""
        rest = self.model_dump_json(exclude={"manifest": {"tensors"}})
        return blake2b(f"{rest}\0{self.manifest.digest}".encode(), digest_size=16).hexdigest()


class NcclRendezvous(BaseModel):
    """`UpdateSpec.location` of `nccl`, as JSON. Another one than last time: the group is made anew.

    world_size: the trainer's sender (rank 0) and every process of every worker. rank_offsets: worker_id -> rank of the first
    of its processes. The rest is how vLLM packs tensors; both ends take it from here.
    """

    model_config = ConfigDict(extra="forbid")
    master_address: str = Field(min_length=1, max_length=255)
    master_port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2)
    rank_offsets: dict[str, int] = Field(min_length=1)
    packed: bool = True
    packed_buffer_size_bytes: int = Field(1024**3, ge=1)
    packed_num_buffers: int = Field(2, ge=1)


class Want(BaseModel):
    """Bytes that some worker lacks, the first of them: upload from here on (`stream`)."""

    model_config = ConfigDict(extra="forbid")
    shard: str
    offset: int


class Received(BaseModel):
    """The answer to an upload. received: bytes of the shard before this one went to workers that lacked them (one that is too
    slow may have missed some); bytes from here on were not wanted, or not yet: go on with what `Update.wants` says.
    """

    model_config = ConfigDict(extra="forbid")
    received: int


class WorkerUpdate(BaseModel):
    """How far one worker is. received: bytes staged. pause_s: how long its generations stood still. load_s: from `apply`
    to served."""

    model_config = ConfigDict(extra="forbid")
    worker_id: str
    state: Literal["waiting", "receiving", "ready", "loading", "served", "failed"] = "waiting"
    received: int = 0
    pause_s: float | None = None
    load_s: float | None = None
    error: str | None = None


class Update(BaseModel):
    """`GET /policy/updates/{update_id}`: an update as it stands. Times are Unix seconds.

    state: `running` until every worker has served it or has been named as failed; `done` then, `failed` if none serves it;
    `superseded` once a newer version of the policy was posted. wants: bytes to upload, the earliest first; also
    after `done`, when a late worker catches up.
    """

    model_config = ConfigDict(extra="forbid")
    update_id: str
    version: str
    policy: str = "default"
    transport: Transport
    state: Literal["running", "done", "failed", "superseded"] = "running"
    workers: list[WorkerUpdate] = Field(default_factory=list)
    wants: list[Want] = Field(default_factory=list)
    created_at: float
    ended_at: float | None = None


class PolicyView(BaseModel):
    """One policy as this proxy knows it. version: the newest that any worker has served; None before the first update.

    workers: version -> ids of the workers that serve it.
    """

    model_config = ConfigDict(extra="forbid")
    policy: str
    version: str | None = None
    update_id: str | None = None
    workers: dict[str, list[str]] = Field(default_factory=dict)


class PolicyList(BaseModel):
    """`GET /policy`: every policy that workers announce or that was updated."""

    items: list[PolicyView]


class ModelName(BaseModel):
    """A name that workers have served: a request for it means that model and no other, until it is retired.

    policy: that it was last served under; "": an older release has kept the name alone. While a name of the policy `default` is
        kept, names that no worker has served mean that policy and no other.
    workers: ids of those that serve it, as this proxy sees them; none: requests for it wait, then get 503.
    """

    model_config = ConfigDict(extra="forbid")
    name: str
    policy: str = ""
    workers: list[str] = Field(default_factory=list)


class ModelNames(BaseModel):
    """`GET /policy/models`: by name; a fleet's fit in one page."""

    items: list[ModelName]

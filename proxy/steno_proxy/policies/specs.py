"""What is posted, as far as the model of the body can't judge it, and an update of which only the record is left."""

from __future__ import annotations

from steno.contracts.errors import BadRequest
from steno.contracts.lenient import read_json
from steno.contracts.policy import Update, UpdateSpec
from steno_proxy.store.policies import UpdateRow


def check(spec: UpdateSpec) -> None:
    """Check that the fields of an update agree with each other. Raises: BadRequest: two of them contradict each other."""
    names = [shard.name for shard in spec.manifest.shards]
    if len(set(names)) != len(names):
        raise BadRequest("manifest.shards: two shards have the same name", field="manifest.shards")
    if spec.transport == "nccl" and names:
        raise BadRequest("manifest.shards: must be empty for transport nccl", field="manifest.shards")
    if spec.transport != "nccl" and not names:
        raise BadRequest(
            f"manifest.shards: transport {spec.transport} needs at least one shard", field="manifest.shards"
        )
    if spec.transport == "stream" and spec.location:
        raise BadRequest("location: must be empty for transport stream", field="location")
    if spec.transport != "stream" and not spec.location:
        raise BadRequest(f"location is required for transport {spec.transport}", field="location")
    if spec.probe is not None and len(spec.probe.logprobs) != len(spec.probe.token_ids) - 1:
        raise BadRequest("probe.logprobs: must have one entry for each token but the first", field="probe.logprobs")


def recorded(row: UpdateRow) -> Update:
    """An update on record as `GET /policy/updates/{update_id}` gives it, without its workers."""
    spec = read_json(UpdateSpec, row.spec)
    return Update.model_validate(
        {"update_id": row.update_id, "version": row.version, "policy": row.policy, "transport": spec.transport,
         "state": row.state, "created_at": row.created_at, "ended_at": row.ended_at}
    )  # fmt: skip

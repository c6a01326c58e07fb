"""Checks a posted update beyond what its model checks, and rebuilds the view of an update of which only the record is left."""

from __future__ import annotations

from steno.contracts.errors import BadRequest
from steno.contracts.lenient import read_json
from steno.contracts.policy import Manifest, Update, UpdateSpec
from steno_proxy.store.policies import UpdateRow


def check(spec: UpdateSpec) -> None:
    """Check that the fields of an update agree with each other. Raises: BadRequest: two of them contradict each other."""
    manifest = spec.manifest
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        raise BadRequest("manifest.shards: two shards or patches have the same name", field="manifest.shards")
    if spec.transport == "nccl" and names:
        raise BadRequest("manifest.shards: must be empty for transport nccl", field="manifest.shards")
    if spec.transport != "nccl" and not names:
        raise BadRequest(
            f"manifest.shards: transport {spec.transport} needs at least one shard", field="manifest.shards"
        )
    _check_patches(manifest)
    if spec.transport == "stream" and spec.location:
        raise BadRequest("location: must be empty for transport stream", field="location")
    if spec.transport != "stream" and not spec.location:
        raise BadRequest(f"location is required for transport {spec.transport}", field="location")
    if spec.probe is not None and len(spec.probe.logprobs) != len(spec.probe.token_ids) - 1:
        raise BadRequest("probe.logprobs: must have one entry for each token but the first", field="probe.logprobs")


def _check_patches(manifest: Manifest) -> None:
    """Check that the patches have a file for each shard and lead, one after the other, to the manifest's tensors. Raises:
    BadRequest."""
    field = "manifest.patches"
    strange = [shard.name for shard in manifest.shards if not shard.name.endswith(".safetensors")]
    if strange:
        raise BadRequest(f"manifest.shards: got {strange[0]}, must be a .safetensors file", field="manifest.shards")
    for place, patch in enumerate(manifest.patches):
        strange = [file.name for file in patch.files if not file.name.endswith(".patch")]
        if strange:
            raise BadRequest(f"{field}.{place}.files: got {strange[0]}, must be a .patch file", field=field)
        if len(patch.files) != len(manifest.shards):
            raise BadRequest(
                f"{field}.{place}.files: got {len(patch.files)}, must be one for each of {len(manifest.shards)} shards",
                field=field,
            )
        last = place + 1 == len(manifest.patches)
        wanted = manifest.digest if last else manifest.patches[place + 1].before
        if patch.after != wanted:
            what = "the digest of manifest.tensors" if last else f"`before` of patch {place + 1}"
            raise BadRequest(f"{field}.{place}.after: got {patch.after}, {what} is {wanted}", field=field)


def recorded(row: UpdateRow) -> Update:
    """An update on record as `GET /policy/updates/{update_id}` gives it, without its workers."""
    spec = read_json(UpdateSpec, row.spec)
    return Update.model_validate(
        {"update_id": row.update_id, "version": row.version, "policy": row.policy, "transport": spec.transport,
         "state": row.state, "created_at": row.created_at, "ended_at": row.ended_at}
    )  # fmt: skip

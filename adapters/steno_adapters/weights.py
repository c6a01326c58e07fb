"""New weights on their way to the workers, from any state dict: `push` returns once every worker serves them, or is named.

They travel as safetensors through the proxy's policy updates (`POST /policy/updates`): a version is `<lineage>/<step>`, and a
version that is known with other weights is refused. Names are those of the model's checkpoint; where transformers has others, as
for the experts of a mixture, `as_in_checkpoint` gives them back. Of tensors that share memory (tied weights) the first name is
sent.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from steno import Client, StenoError
from steno.contracts.errors import BadRequest, Conflict, NotFound
from steno.contracts.policy import (
    LINEAGE,
    MOST_DEADLINE_S,
    Manifest,
    Probe,
    ShardEntry,
    TensorEntry,
    Update,
    UpdateSpec,
)

log = logging.getLogger(__name__)

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

SHARD_BYTES = 1 << 30
UPLOAD_BYTES = 16 << 20
"""In one request: repeated whole after a failure."""
WAIT_S = 5.0
PAUSE_S = 0.2
"""Between attempts while the proxy is away."""
FAILED_PAUSE_S, MAX_FAILED_PAUSE_S = 5.0, 60.0
"""Before an update that no worker took is posted again, doubling: the proxy then asks every worker anew."""
_VERSION = re.compile(rf"({LINEAGE[1:-1]})/(0|[1-9][0-9]*)")


class PushRefused(StenoError):
    """Workers do not serve the weights that were pushed: none of them took them, or a newer version came. No route's error."""

    code = "push_refused"


def parse_version(version: str) -> tuple[str, int]:
    """`<lineage>/<step>` -> (lineage, step). Raises: BadRequest."""
    found = _VERSION.fullmatch(version)
    if found is None:
        raise BadRequest(
            f"version: got {version!r}, must be LINEAGE/STEP: letters, digits, '.', '_', '-', and a number",
            field="version",
        )
    return found[1], int(found[2])


def push(
    client: Client,
    tensors: Weights,
    version: str,
    *,
    run: str | None = None,
    policy: str = "default",
    parent: str | None = None,
    probe: Probe | None = None,
    kv: Literal["recompute", "keep"] = "recompute",
    folder: Path | None = None,
    timeout_s: float = 600.0,
) -> Update:
    """Bring `tensors` to every worker of `policy` as `version`; the same again changes nothing. Where no worker took them (one
    that was just replaced, a disk that was full for a moment), they are offered again until `timeout_s` is over.

    Args:
        tensors: by their names in the checkpoint. They are copied to files first, so that they may change when this returns.
        parent: the version that this lineage went on from, where another one came before it.
        probe: what the trainer's weights say of a few tokens (`probe_of`): workers compare before they serve.
        folder: that workers can read at the same path: they read the weights from there, and a copy per version stays for those
            that come late, in `weights-LINEAGE-STEP-DIGEST`. None: bytes go through the proxy.
        timeout_s: until a worker serves it, all attempts together.
    Returns: the update, `done`; workers that failed are named in it.
    Raises: BadRequest: no version, no tensor, or one with NaN or infinite values. Conflict: the version exists with other
        weights. PushRefused: no worker serves it. TimeoutError.
    """
    lineage, step = parse_version(version)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".steno-push-", dir=folder) as scratch:
        here, is_new = Path(scratch), False
        manifest = _written(here, tensors)
        if folder is not None:
            here, is_new = _moved(manifest, here, folder / f"weights-{lineage}-{step}-{_digest(manifest)}")
        spec = UpdateSpec(
            run_id=run,
            policy=policy,
            lineage=lineage,
            step=step,
            parent=parent,
            transport="stream" if folder is None else "filesystem",
            location="" if folder is None else str(here.resolve()),
            manifest=manifest,
            kv=kv,
            probe=probe,
            deadline_s=min(timeout_s, MOST_DEADLINE_S),
        )
        try:
            return _followed(client, spec, here, time.monotonic() + timeout_s)
        except Conflict:
            if is_new:
                shutil.rmtree(here, ignore_errors=True)
            raise


def as_in_checkpoint(model: Any, tensors: Weights) -> Weights:
    """Tensors of a transformers model as its checkpoint has them, for `push`: transformers keeps the experts of a mixture in one
    tensor for all, and renames some others; checkpoints, and so workers, have each by itself.

    Args:
        model: the transformers model itself, not what wraps it.
        tensors: under the model's own names, such as `model.state_dict()`.
    Returns: where nothing is converted, what was given; else pairs to iterate over once, each converted in its turn.
    """
    conversions = getattr(model, "_weight_conversions", None)  # what transformers' loader leaves
    if conversions is not None:
        # Under ZeRO-3 it leaves all that it knows for the model, also what this checkpoint did not need.
        model._weight_conversions = [one for one in conversions if one.was_used()]
    if not _is_converted(model):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    return (
        made for name, tensor in _each_once(tensors) for made in revert_weight_conversion(model, {name: tensor}).items()
    )


def probe_of(model: Any, token_ids: Iterable[int], *, tolerance: float = 0.02) -> Probe:
    """What a transformers model says of `token_ids`, in evaluation mode and without gradient, for `push`.

    Args: tolerance: largest difference that a worker may have, in nats: 0.02 fits float32, 1.0 bfloat16.
    """
    ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    training = model.training
    model.eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
    model.train(training)
    said = logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return Probe(token_ids=ids[0].tolist(), logprobs=said, tolerance=tolerance)


def _written(folder: Path, tensors: Weights) -> Manifest:
    entries: list[TensorEntry] = []
    shards: list[ShardEntry] = []
    for number, shard in enumerate(_shards(tensors), 1):
        path = folder / f"model-{number:05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        entries += [_entry(name, tensor) for name, tensor in shard.items()]
        shards.append(_shard_entry(path))
    if not entries:
        raise BadRequest("tensors: got none, must be at least one", field="tensors")
    return Manifest(tensors=entries, shards=shards)


def _digest(manifest: Manifest) -> str:
    """A digest of its files, for the folder's name: workers may still read other weights that had the same version."""
    return blake2b("".join(shard.digest for shard in manifest.shards).encode(), digest_size=8).hexdigest()


def _moved(manifest: Manifest, scratch: Path, here: Path) -> tuple[Path, bool]:
    """Move its files from `scratch` to `here`; files that are there, and whole, stay. Returns: `here`; whether it is new."""
    is_new = not here.exists()
    here.mkdir(exist_ok=True)
    for shard in manifest.shards:
        there = here / shard.name
        if not there.is_file() or there.stat().st_size != shard.size or _shard_entry(there) != shard:
            (scratch / shard.name).replace(there)
    return here, is_new


def _is_converted(model: Any) -> bool:
    if not hasattr(model, "base_model_prefix"):  # no transformers model
        return False
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return bool(conversions)


def _each_once(tensors: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yields only the first of tensors that share memory. Yields all tensors of an iterator: it may reuse their memory."""
    if not isinstance(tensors, Mapping):
        yield from tensors
        return
    seen = set[tuple[int, Any, Any]]()
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        yield name, tensor


def _shards(tensors: Weights) -> Iterator[dict[str, Tensor]]:
    """On the CPU, each tensor once, about SHARD_BYTES at a time."""
    shard, size, names = dict[str, Tensor](), 0, set[str]()
    for name, tensor in _each_once(tensors):
        if name in names:
            raise BadRequest(f"tensors: {name} comes twice, must be once and whole", field="tensors")
        names.add(name)
        own = tensor.detach().to("cpu", copy=True).contiguous()
        if own.is_floating_point() and not own.isfinite().all():
            raise BadRequest(f"tensors: {name} has NaN or infinite values: the weights are not sent", field="tensors")
        if shard and size + own.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name], size = own, size + own.nbytes
    if shard:
        yield shard


def _entry(name: str, tensor: Tensor) -> TensorEntry:
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return TensorEntry(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        digest=blake2b(raw, digest_size=16).hexdigest(),
    )


def _shard_entry(path: Path) -> ShardEntry:
    digest, size = blake2b(digest_size=16), 0
    with path.open("rb") as file:
        while piece := file.read(UPLOAD_BYTES):
            digest.update(piece)
            size += len(piece)
    return ShardEntry(name=path.name, size=size, digest=digest.hexdigest())


def _followed(client: Client, spec: UpdateSpec, folder: Path, until: float) -> Update:
    """Post the update and upload the wanted shards until it has ended. It is posted again if the proxy was restarted and has lost
    it, or if no worker took it."""
    update, trouble, refused, pause_s = None, "", "", FAILED_PAUSE_S
    while time.monotonic() < until:
        try:
            update = client.post_update(spec) if update is None else client.update(update.update_id, wait_s=WAIT_S)
            for want in update.wants:
                with (folder / want.shard).open("rb") as file:
                    file.seek(want.offset)
                    piece = file.read(UPLOAD_BYTES)
                try:
                    client.upload_shard(update.update_id, want.shard, want.offset, piece)
                except Conflict:  # that worker has moved on: ask again what is wanted
                    break
        except NotFound:
            update = None
            time.sleep(PAUSE_S)
            continue
        except StenoError as error:
            if not error.retryable:
                raise
            if trouble != str(error):
                trouble = str(error)
                log.warning("update %s waits: %s", spec.version, trouble)
            time.sleep(PAUSE_S)
            continue
        if update.state == "running":
            continue
        named = {worker.worker_id: worker.error or "" for worker in update.workers if worker.state == "failed"}
        if update.state != "done":
            refused = f"update {spec.version} is {update.state}; workers that failed: {named or 'none'}"
            if update.state != "failed" or time.monotonic() + pause_s >= until:
                raise PushRefused(refused)
            log.warning("%s; it is posted again in %.0f s", refused, pause_s)
            time.sleep(pause_s)
            update, pause_s = None, min(2 * pause_s, MAX_FAILED_PAUSE_S)
            continue
        if named:
            log.warning("update %s: workers that do not serve it: %s", spec.version, named)
        return update
    if refused:
        raise PushRefused(refused)
    raise TimeoutError(
        f"update {spec.version} is {update.state if update else 'not accepted'}: {trouble or 'no trouble'}"
    )

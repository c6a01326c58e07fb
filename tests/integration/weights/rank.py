"""One rank of a ZeRO-3 model whose weights leave: `python -m tests.integration.weights.rank FOLDER`, under torchrun.

Does everything in turn, as one start takes seconds, and leaves what it saw in FOLDER/seen-<rank>.json. `job.json` says what model
and how large the buckets are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from steno_trainer.distributed.ranks import Ranks
from steno_trainer.model.deepspeed_config import start_deepspeed


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    ranks = Ranks.open("cpu")
    engine = _zero3(job["model"])
    seen: dict[str, Any] = {}
    for name in job["do"]:
        seen[name] = globals()[f"do_{name}"](folder, job, engine, ranks)
    (folder / f"seen-{ranks.rank}.json").write_text(json.dumps(seen))
    ranks.barrier()
    ranks.close()


def _zero3(model: str) -> Any:
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "gradient_clipping": 1.0,
    }
    start_deepspeed(cuda=False, own_kernels=False)
    keep = HfDeepSpeedConfig(config)  # before the model is loaded, so that no rank ever holds it whole
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(model=module, config=config, model_parameters=module.parameters())
    del keep
    return engine


def _step(engine: Any, rank: int) -> float:
    torch.manual_seed(rank)
    ids = torch.randint(0, engine.module.config.vocab_size, (1, 12))
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss)


def do_copies(folder: Path, job: dict[str, Any], engine: Any, ranks: Ranks) -> Any:
    """Copies before and after two steps: gathering must not disturb training. The oracle gathers parameter by parameter."""
    import deepspeed

    from steno_trainer.data.staleness import PolicyVersion
    from steno_trainer.weights.files import copies as module
    from steno_trainer.weights.files.copies import WeightsCopies
    from steno_trainer.weights.source import ModelWeights

    written: list[str] = []
    real = module.write_shard

    def counted(path: Path, tensors: Any) -> Any:
        written.append(path.name)
        return real(path, tensors)

    module.write_shard = counted
    copies = WeightsCopies(folder / "copies", ranks=ranks)
    source = ModelWeights(engine.module, bucket_bytes=job["bucket_bytes"])
    first = copies.write(PolicyVersion("run", 0), source)
    losses = [_step(engine, ranks.rank) for _ in range(2)]
    second = copies.write(PolicyVersion("run", 2), source)
    losses.append(_step(engine, ranks.rank))
    third = copies.write(PolicyVersion("run", 3), source)
    expected: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            expected[name] = parameter.detach().clone()
    if ranks.first:
        torch.save(expected, folder / "expected.pt")
    module.write_shard = real
    return {
        "written": written,
        "losses": losses,
        "folders": [str(copy.folder) for copy in (first, second, third)],
        "digest": third.manifest.digest,
        "plan": [[meta.name for meta in bucket] for bucket in source.plan()],
    }


def do_changes(folder: Path, job: dict[str, Any], engine: Any, ranks: Ranks) -> Any:
    """Copies by difference in bfloat16, and full ones of the same weights: their digests, and who wrote which patch."""
    from steno_trainer.data.staleness import PolicyVersion
    from steno_trainer.weights.files import differences as module
    from steno_trainer.weights.files.copies import WeightsCopies
    from steno_trainer.weights.source import ModelWeights

    written: list[str] = []
    real = module.write_patch

    def counted(path: Path, before: Any, now: Any) -> Any:
        written.append(path.name)
        return real(path, before, now)

    module.write_patch = counted
    source = ModelWeights(engine.module, dtype=torch.bfloat16, bucket_bytes=job["bucket_bytes"])
    changes = module.WeightsDifferences(folder / "changes", ranks=ranks)
    digests, copy = [], changes.write(PolicyVersion("run", 0), source)
    for step in (1, 2):
        _step(engine, ranks.rank)
        copy = changes.write(PolicyVersion("run", step), source)
        full = WeightsCopies(folder / "whole", ranks=ranks).write(PolicyVersion("run", step), source)
        digests.append((copy.manifest.digest, full.manifest.digest))
    module.write_patch = real
    asked = changes.write(PolicyVersion("run", 3), source, full=ranks.first)
    return {
        "written": written, "digests": digests, "manifest": copy.manifest.model_dump(), "folder": str(copy.folder),
        "asked": len(asked.manifest.patches),
    }  # fmt: skip


def do_memory(folder: Path, job: dict[str, Any], engine: Any, ranks: Ranks) -> Any:
    """Peak memory of a copy beyond what the rank holds anyway, bytes, and the most that was gathered at one time."""
    from steno_trainer.data.staleness import PolicyVersion
    from steno_trainer.weights.files.copies import WeightsCopies
    from steno_trainer.weights.source import ModelWeights

    source = ModelWeights(engine.module, bucket_bytes=job["bucket_bytes"])
    for bucket in source.buckets():  # whatever is allocated once and kept
        del bucket
    ranks.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = _status("VmRSS")
    WeightsCopies(folder / "memory", ranks=ranks).write(PolicyVersion("run", 0), source)
    peak = _status("VmHWM") - before
    gathered = 0
    for bucket in source.buckets():
        gathered = max(gathered, sum(p.numel() * p.element_size() for p in engine.module.parameters()))
        del bucket
    return {"peak": peak, "gathered": gathered, "left": sum(p.numel() for p in engine.module.parameters())}


def do_failure(folder: Path, job: dict[str, Any], engine: Any, ranks: Ranks) -> Any:
    """The second rank's disk is full: what all ranks are told, and whether the next copy works."""
    from steno_trainer.data.staleness import PolicyVersion
    from steno_trainer.errors import CopyFailed
    from steno_trainer.weights.files import copies as module
    from steno_trainer.weights.files.copies import WeightsCopies
    from steno_trainer.weights.source import ModelWeights

    real = module.write_shard

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if ranks.rank == 1:
        module.write_shard = full
    copies = WeightsCopies(folder / "failing", ranks=ranks)
    source = ModelWeights(engine.module, bucket_bytes=job["bucket_bytes"])
    try:
        copies.write(PolicyVersion("run", 0), source)
    except CopyFailed as error:
        told = str(error)
    else:
        told = ""
    module.write_shard = real
    return [told, copies.write(PolicyVersion("run", 0), source).version]


def do_publish(folder: Path, job: dict[str, Any], engine: Any, ranks: Ranks) -> Any:
    """What each rank hears of an update that the first one posts, and the probe that each of them makes."""
    from steno_trainer.data.staleness import PolicyVersion
    from steno_trainer.weights.exchange import beside_first
    from steno_trainer.weights.files.copies import WeightsCopies
    from steno_trainer.weights.publisher import Publisher
    from steno_trainer.weights.source import ModelWeights
    from steno_trainer.weights.transports import StreamTransport
    from tests.support.weights.probe import make_probe, probe_ids
    from tests.unit.trainer.weights.fake_proxy import FakeProxy

    probe = make_probe(engine.module, probe_ids(engine.module.config.vocab_size))
    proxy = FakeProxy()
    transport = StreamTransport(WeightsCopies(folder / "published", ranks=ranks, writers=beside_first(ranks)))
    with Publisher(transport, [proxy] if ranks.first else [], ranks=ranks) as publisher:
        published = publisher.publish(
            PolicyVersion("run", 0), ModelWeights(engine.module, bucket_bytes=job["bucket_bytes"]), probe
        )
        update = publisher.wait(published, 60)
    return {
        "state": update.state,
        "version": update.version,
        "calls": len(proxy.calls),
        "probe": probe.logprobs,
        "writers": beside_first(ranks),
    }


def do_nccl(folder: Path, job: dict[str, Any], engine: Any, ranks: Ranks) -> Any:
    """An NCCL update whose first group breaks in the middle: what the second one is given, and what the ranks gathered."""
    from steno_trainer.data.staleness import PolicyVersion
    from steno_trainer.weights.nccl.transport import NcclTransport
    from steno_trainer.weights.publisher import Publisher
    from steno_trainer.weights.source import ModelWeights
    from tests.integration.weights.test_nccl import Fleet, Recorded

    fleet = Fleet(a=1.0)

    class Breaking(Recorded):
        def send(self, metas: Any, tensors: Any) -> None:
            next(tensors)
            raise RuntimeError("NCCL error: remote process exited")

    opened: list[Any] = []

    def open_group(meeting: Any) -> Any:
        opened.append(fleet.open(meeting) if opened else Breaking(meeting, fleet.proxy.sent))
        return opened[-1]

    passes: list[list[str]] = []

    class Seen(ModelWeights):
        def buckets(self) -> Any:
            passes.append([])
            for bucket in super().buckets():
                passes[-1] += bucket
                yield bucket

    transport = NcclTransport(ranks, lambda: fleet.workers, address=lambda: "127.0.0.1", open_group=open_group)
    with Publisher(transport, [fleet.proxy] if ranks.first else [], ranks=ranks) as publisher:
        published = publisher.publish(PolicyVersion("run", 0), Seen(engine.module, bucket_bytes=job["bucket_bytes"]))
        update = publisher.wait(published, 60)
        if ranks.first:
            [(_, pairs)] = opened[-1].rounds
            torch.save(dict(pairs), folder / "sent.pt")
    return {"passes": passes, "state": update.state, "digest": published.spec.manifest.digest}


def _status(field: str) -> int:
    """Of /proc/self/status, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

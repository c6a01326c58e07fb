"""Devices, versions, and whether the attention that a step calls counts keys from the end, forwards and backwards."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.calls import answer, job_of_this_process

PACKAGES = ("torch", "triton", "deepspeed", "transformers", "accelerate", "vllm", "flashinfer-python")


def versions() -> dict[str, str | None]:
    cuda = torch.cuda.is_available()
    nccl = torch.cuda.nccl.version() if cuda else None  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(), **{name: _version(name) for name in PACKAGES}, "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "cudnn": str(torch.backends.cudnn.version()) if cuda else None,
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def attend_on_cpu(
    query_SHD: Tensor, key_KHD: Tensor, value_KHD: Tensor, starts_Q1: Tensor, key_starts_Q1: Tensor, *_: Any
) -> Tensor:
    """Calls what a step uses without the kernel, with the arguments of `attention.variable_lengths`. A segment's own tokens are
    the last of its path; here paths share no tokens, so the tokens before them are laid down as another segment."""
    from steno_trainer.model.attention import Segments, _one_by_one

    starts: list[int] = [0]
    paths: list[tuple[tuple[int, int], ...]] = []
    own: list[Tensor] = []
    query, lengths = [], list(pairwise(key_starts_Q1.tolist()))
    for (first, last), (begin, end) in zip(pairwise(starts_Q1.tolist()), lengths, strict=True):
        before = (end - begin) - (last - first)
        for length in (before, last - first):
            starts.append(starts[-1] + length)
        paths += [(), ((starts[-3], starts[-2]),)]
        query += [torch.zeros_like(key_KHD[begin : begin + before]), query_SHD[first:last]]
        own.append(torch.arange(starts[-2], starts[-1]))
    segments = Segments(tuple(starts), torch.tensor(starts, dtype=torch.int32), tuple(paths))
    q, k, v = (x.transpose(0, 1) for x in (torch.cat(query), key_KHD, value_KHD))
    return _one_by_one(q, k, v, segments, None, None).transpose(0, 1)[torch.cat(own)]


def main() -> None:
    job = job_of_this_process()
    if "kernel" in job:
        from steno_trainer.model.attention import variable_lengths
        from steno_trainer.model.sharing import aligned_to_the_end

        device = torch.device(job["kernel"])
        cuda = device.type == "cuda"
        attend = variable_lengths if cuda else attend_on_cpu
        answer(job, {"kernel": attend.__name__, "aligned": aligned_to_the_end(device, attend)})
        return
    count = torch.cuda.device_count()
    answer(job, {
        "gpus": [torch.cuda.get_device_name(n) for n in range(count)],
        "gpu_memory_bytes": [torch.cuda.get_device_properties(n).total_memory for n in range(count)],
        "versions": versions(),
    })  # fmt: skip


if __name__ == "__main__":
    main()

"""What ZeRO-3 and sequence parallelism ask of NCCL (on CPUs: of gloo), with answers that are known."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_check.calls import answer, job_of_this_process
from steno_trainer.distributed.ranks import Ranks

REPEATS = 5


def wrong(ranks: Ranks, elements: int) -> dict[str, bool]:
    """Of each collective, whether its answer is not right on this rank."""
    size, rank, device = ranks.size, ranks.rank, ranks.device
    numbers = torch.arange(size, device=device, dtype=torch.float32)

    def blocks(values: Tensor) -> Tensor:
        return values.repeat_interleave(elements)

    total = blocks(numbers[rank : rank + 1])
    dist.all_reduce(total)
    first = blocks(numbers[rank : rank + 1] + 7)
    dist.broadcast(first, 0)
    gathered = torch.empty(size * elements, device=device)
    dist.all_gather_into_tensor(gathered, blocks(numbers[rank : rank + 1]))
    scattered = torch.empty(elements, device=device)
    dist.reduce_scatter_tensor(scattered, blocks(numbers))
    swapped = torch.empty(size * elements, device=device)
    dist.all_to_all_single(swapped, blocks(numbers + size * rank))
    right = {
        "all_reduce": (total, blocks(numbers.sum()[None])), "broadcast": (first, blocks(numbers[:1] + 7)),
        "all_gather": (gathered, blocks(numbers)), "reduce_scatter": (scattered, blocks(size * numbers[rank : rank + 1])),
        "all_to_all": (swapped, blocks(size * numbers + rank)),
    }  # fmt: skip
    return {name: not torch.equal(found, expected) for name, (found, expected) in right.items()}


def wrong_anywhere(ranks: Ranks, here: dict[str, bool]) -> dict[str, Any]:
    """How many ranks got a wrong answer, and of what. A collective.

    Args: here: what `wrong` said on this rank.
    """
    counts = ranks.add(torch.tensor([*here.values(), any(here.values())], dtype=torch.int64)).tolist()
    return {"wrong_ranks": counts[-1], "wrong": [name for name, count in zip(here, counts, strict=False) if count]}


def bytes_per_s(ranks: Ranks, elements: int) -> float:
    """Of an all-reduce in float32, by what each rank has."""
    given = torch.ones(elements, device=ranks.device)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(given)
        float(given[0])  # waits for the device
        seconds.append(time.perf_counter() - started)
    return 4 * elements / min(seconds)


def main() -> None:
    job = job_of_this_process()
    ranks = Ranks.open(job["device"])
    found: dict[str, Any] = {"ranks": ranks.size, "backend": dist.get_backend()}
    found |= wrong_anywhere(ranks, wrong(ranks, job["elements"]))
    found["all_reduce_bytes_per_s"] = bytes_per_s(ranks, job["elements"])
    if ranks.first:
        answer(job, found)
    ranks.close()


if __name__ == "__main__":
    main()

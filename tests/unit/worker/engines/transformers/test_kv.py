"""Slots: what a row sees is its own past, whoever joins or leaves."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from steno_worker.engines.transformers import kv
from steno_worker.engines.transformers.kv import SlotCache


def put(cache: SlotCache, *rows: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One new token in every slot; its key is the number given. Returns (keys (B, T), mask (B, T))."""
    _, mask_B1QT = cache.begin(1)
    new = torch.tensor(rows).view(-1, 1, 1, 1)
    keys, values = cache.update(new, -new, 0)
    assert torch.equal(keys, -values)
    return keys[:, 0, :, 0], mask_B1QT[:, 0, 0]


def seen(keys_BT: torch.Tensor, mask_BT: torch.Tensor) -> list[list[float]]:
    return [keys[mask].tolist() for keys, mask in zip(keys_BT, mask_BT, strict=True)]


def single(*tokens: float) -> SlotCache:
    cache = SlotCache(1)
    cache.open_slot()
    positions, mask = cache.begin(len(tokens))
    assert positions.tolist() == [list(range(len(tokens)))]
    assert mask[0, 0].tolist() == torch.ones(len(tokens), len(tokens)).tril().bool().tolist()
    new = torch.tensor(tokens).view(1, 1, -1, 1)
    cache.update(new, -new, 0)
    return cache


def test_rows_of_different_lengths_see_their_own_tokens_only() -> None:
    cache = SlotCache(4)
    cache.adopt(single(1, 2, 3))
    cache.adopt(single(9))
    assert seen(*put(cache, 4, 8)) == [[1, 2, 3, 4], [9, 8]]
    assert cache.lengths == [4, 2]


def test_the_last_row_takes_the_place_of_one_that_leaves() -> None:
    cache = SlotCache(4)
    for tokens in ([1, 2], [3], [5, 6, 7]):
        cache.adopt(single(*tokens))
    assert cache.release(0) == 2
    assert seen(*put(cache, 8, 4)) == [[5, 6, 7, 8], [3, 4]]
    assert cache.release(1) == 1
    assert seen(*put(cache, 9)) == [[5, 6, 7, 8, 9]]


def test_growth_keeps_what_was_there() -> None:
    cache = SlotCache(2)
    cache.adopt(single(*range(300)))
    cache.adopt(single(*range(1000)))
    assert seen(*put(cache, -1, -2)) == [[*range(300), -1], [*range(1000), -2]]


def long(tokens: int, *, width: int = 1) -> SlotCache:
    """0, 1, 2 …, in chunks, as prompts are computed."""
    cache = SlotCache(1)
    cache.open_slot()
    for chunk in torch.arange(tokens).split(500):
        cache.begin(len(chunk))
        new = chunk.float().view(1, 1, -1, 1).expand(1, 1, -1, width)
        cache.update(new, -new, 0)
    return cache


LENGTHS = (20, 30, 10_000, 10, 50, 60)


def test_one_long_sequence_is_computed_apart_from_the_short_ones() -> None:
    cache, found = SlotCache(64), []
    for length in LENGTHS:
        cache.adopt(long(length))
    assert cache.spans() == [range(0, 2), range(2, 4), range(4, 6)]
    for span in cache.spans():
        _, mask_B1QT = cache.begin(1, span)
        new = torch.full((len(span), 1, 1, 1), -1.0)
        keys, _ = cache.update(new, -new, 0)
        found += seen(keys[:, 0, :, 0], mask_B1QT[:, 0, 0])
    assert found == [[*range(length), -1] for length in LENGTHS]
    assert cache.lengths == [length + 1 for length in LENGTHS]


def test_sequences_of_about_one_length_are_computed_together() -> None:
    cache = SlotCache(8)
    for length in (9000, 5000, 8000, 7000):
        cache.adopt(long(length))
    assert cache.spans() == [range(4)]
    assert SlotCache(8).spans() == []


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_long_sequence_takes_memory_in_its_own_slot_only() -> None:
    """Its keys and values are 41 MB; 64 slots as long as this one would be 2.6 GB."""
    before, cache = resident_bytes(), SlotCache(64)
    for length in (1, 20_000, 1):
        cache.adopt(long(length, width=256))
    held = resident_bytes()
    assert held - before < 300e6
    for _ in range(3):
        cache.release(0)
    assert held - resident_bytes() > 30e6, "an empty cache holds nothing"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of each tensor that is made of zeros, on a device where it takes all its memory at once."""
    made: list[int] = []
    zeros = torch.zeros

    def noted(*shape: Any, **how: Any) -> torch.Tensor:
        tensor: torch.Tensor = zeros(*shape, **how)
        made.append(tensor.numel())
        return tensor

    monkeypatch.setattr(kv, "_is_lazy", lambda device: False)
    monkeypatch.setattr(torch, "zeros", noted)
    return made


def test_off_the_cpu_slots_are_there_as_they_are_used(taken: list[int]) -> None:
    """As on the CPU in all else: what is seen of them, who moves where, how they grow."""
    cache = SlotCache(5)
    for number in range(5):
        cache.adopt(single(*map(float, range(number, number + 20 + 100 * number))))
        assert cache._keys[0].shape[0] == cache._values[0].shape[0] == (1, 2, 4, 4, 5)[number]
        spoken = [[*range(row, row + 20 + 100 * row), *[-1] * (number - row)] for row in range(number + 1)]
        assert seen(*put(cache, *[-1.0] * (number + 1))) == [[*row, -1] for row in spoken]
    assert cache.release(1) == 4
    fifth = [*range(4, 424), -1]
    assert seen(*put(cache, *[-2.0] * 4))[1] == [*fifth, -2]
    for _ in range(4):
        cache.release(0)
    taken.clear()
    cache.open_slot()
    put(cache, 7.0)
    assert max(taken) == kv.GROW_TOKENS, "an empty cache begins with one slot again"


def test_one_long_prompt_off_the_cpu_takes_its_own_memory(taken: list[int]) -> None:
    cache = SlotCache(64)
    cache.open_slot()
    cache.begin(8192)
    new = torch.empty(1, 8, 8192, 128, device="meta")
    cache.update(new, new, 0)
    assert sum(taken[-2:]) == 2 * new.numel()
    for number in range(1, 64):
        cache.open_slot()
        assert cache._keys[0].shape == (1 << number.bit_length(), 8, 8192, 128)


def test_more_sequences_than_slots_is_refused() -> None:
    cache = SlotCache(1)
    cache.open_slot()
    with pytest.raises(IndexError):
        cache.open_slot()

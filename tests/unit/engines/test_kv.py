"""Slots: what a row sees is its own past, whoever joins or leaves."""

import pytest
import torch

from inference_worker.engines.kv import SlotCache


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


def test_more_sequences_than_slots_is_refused() -> None:
    cache = SlotCache(1)
    cache.open_slot()
    with pytest.raises(IndexError):
        cache.open_slot()

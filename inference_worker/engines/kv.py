"""Key and value tensors of running sequences, one slot each, for any transformers model with plain full attention.

Owns where a sequence's keys and values lie; knows nothing of requests. Slots 0..n-1 are in use, so that a step reads a view and
copies nothing; a sequence that leaves is replaced by the last one. Padding is on the right: what lies behind a slot's length
is masked, so a row's numbers do not depend on who else is in the batch beyond float32 rounding (I1).

Shapes: S slots, H key-value heads, T tokens, D head size, B rows of this step, Q new tokens of each row.
"""

from __future__ import annotations

import torch

GROW_TOKENS = 256
"""Capacity grows by at least this, and by half, so that copies stay linear in what was generated."""


class SlotCache:
    """Duck-typed for transformers' `Cache`: attention layers call `update`. Not thread-safe."""

    is_compileable = False

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.lengths: list[int] = []
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._capacity = 0
        self._starts_B = torch.zeros(0, dtype=torch.long)
        self._steps_Q = torch.zeros(0, dtype=torch.long)
        self._longest = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def begin(self, new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare a forward pass of `new_tokens` in every slot in use.

        Returns: positions int64 (B, Q), and the attention mask bool (B, 1, Q, T): True where a query may look.
        """
        self._starts_B = torch.tensor(self.lengths)
        self._steps_Q = torch.arange(new_tokens)
        self._longest = max(self.lengths) + new_tokens
        self._reserve(self._longest)
        positions_BQ = self._starts_B[:, None] + self._steps_Q
        mask_B1QT = torch.arange(self._longest) <= positions_BQ[:, None, :, None]
        self.lengths = [length + new_tokens for length in self.lengths]
        return positions_BQ, mask_B1QT

    def update(
        self, keys_BHQD: torch.Tensor, values_BHQD: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer: store what is new, return all that the rows may look at, (B, H, T, D)."""
        rows, _, new_tokens, _ = keys_BHQD.shape
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._blank(keys_BHQD)
            self._values[layer_idx] = self._blank(values_BHQD)
        keys_SHTD, values_SHTD = self._keys[layer_idx], self._values[layer_idx]
        if rows == 1:
            start = self.lengths[0] - new_tokens
            keys_SHTD[:1, :, start : start + new_tokens] = keys_BHQD
            values_SHTD[:1, :, start : start + new_tokens] = values_BHQD
        else:
            row_B1 = torch.arange(rows)[:, None]
            at_BQ = self._starts_B[:, None] + self._steps_Q
            keys_SHTD[row_B1, :, at_BQ] = keys_BHQD.transpose(1, 2)
            values_SHTD[row_B1, :, at_BQ] = values_BHQD.transpose(1, 2)
        return keys_SHTD[:rows, :, : self._longest], values_SHTD[:rows, :, : self._longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What models ask when they are not told positions; ours always are."""
        return max(self.lengths, default=0)

    def open_slot(self) -> int:
        """Take a slot with nothing in it; returns its number."""
        if len(self.lengths) == self.slots:
            raise IndexError("no free slot")
        self.lengths.append(0)
        return len(self.lengths) - 1

    def adopt(self, other: SlotCache) -> int:
        """Take over the one sequence of `other` into a new slot; returns the slot's number."""
        slot = self.open_slot()
        length = other.lengths[0]
        self._reserve(length)
        for layer, keys_1HTD in other._keys.items():
            if layer not in self._keys:
                self._keys[layer] = self._blank(keys_1HTD)
                self._values[layer] = self._blank(other._values[layer])
            self._keys[layer][slot, :, :length] = keys_1HTD[0, :, :length]
            self._values[layer][slot, :, :length] = other._values[layer][0, :, :length]
        self.lengths[slot] = length
        return slot

    def release(self, slot: int) -> int:
        """Give a slot back. Returns the number of the slot that moved into it (itself: nothing moved)."""
        last = len(self.lengths) - 1
        if slot != last:
            length = self.lengths[last]
            for cached in (*self._keys.values(), *self._values.values()):
                cached[slot, :, :length] = cached[last, :, :length]
            self.lengths[slot] = length
        self.lengths.pop()
        return last

    def clear(self) -> None:
        """Forget every sequence; memory is kept."""
        self.lengths.clear()

    def _blank(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: masked positions still go through a multiplication, and NaN times zero is NaN.
        return torch.zeros(self.slots, like.shape[1], self._capacity, like.shape[3], dtype=like.dtype)

    def _reserve(self, tokens: int) -> None:
        if tokens <= self._capacity:
            return
        self._capacity = max(tokens, self._capacity + max(GROW_TOKENS, self._capacity // 2))
        for store in (self._keys, self._values):
            for layer, old_SHTD in store.items():
                grown = self._blank(old_SHTD)
                grown[:, :, : old_SHTD.shape[2]] = old_SHTD
                store[layer] = grown

"""Key and value tensors of running sequences, one slot each, for any transformers model with plain full attention.

Owns where a sequence's keys and values lie; knows nothing of requests. Slots 0..n-1 are in use, so that a step reads views and
copies nothing; a sequence that leaves is replaced by the last one. Every slot has room for the longest sequence. On a CPU it
takes memory for its own only; elsewhere it takes all of it, and there are as many slots as are in use, up to twice that. Padding
is on the right: what lies behind a slot's length is masked, so a row's numbers do not depend on who else is in the batch beyond
float32 rounding (I1).

Shapes: S slots, H key-value heads, T tokens, D head size, B rows of this step, Q new tokens of each row.
"""

from __future__ import annotations

import math
import mmap

import torch

GROW_TOKENS = 256
"""Capacity grows by at least this, and by half, so that copies stay linear in what was generated."""
PADDING_TOKENS = 4096
"""About what one more forward pass costs, in tokens of padding that attention looks at in vain."""


class SlotCache:
    """Duck-typed for transformers' `Cache`: attention layers call `update`. Not thread-safe."""

    is_compileable = False

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.lengths: list[int] = []
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._capacity = 0
        self._rooms = 1  # slots in a tensor off the CPU
        self._slots = range(0)
        self._starts_B = torch.zeros(0, dtype=torch.long)
        self._steps_Q = torch.zeros(0, dtype=torch.long)
        self._longest = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def spans(self) -> list[range]:
        """The slots in use, in neighbours that are computed together: in a span, less than half is padding, or little.

        So one long sequence does not make all the others as long.
        """
        spans: list[range] = []
        start = tokens = longest = 0
        for slot, length in enumerate(self.lengths):
            longest, tokens = max(longest, length), tokens + length
            if slot > start and (slot + 1 - start) * longest > 2 * tokens + PADDING_TOKENS:
                spans.append(range(start, slot))
                start, longest, tokens = slot, length, length
        return [*spans, range(start, len(self.lengths))] if self.lengths else []

    def begin(self, new_tokens: int, slots: range | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare a forward pass of `new_tokens` in every slot in use, or in neighbours of them.

        Returns: positions int64 (B, Q), and the attention mask bool (B, 1, Q, T): True where a query may look.
        """
        self._slots = slots or range(len(self.lengths))
        here = slice(self._slots.start, self._slots.stop)
        self._starts_B = torch.tensor(self.lengths[here])
        self._steps_Q = torch.arange(new_tokens)
        self._longest = max(self.lengths[here]) + new_tokens
        self._reserve(self._longest)
        positions_BQ = self._starts_B[:, None] + self._steps_Q
        mask_B1QT = torch.arange(self._longest) <= positions_BQ[:, None, :, None]
        self.lengths[here] = [length + new_tokens for length in self.lengths[here]]
        return positions_BQ, mask_B1QT

    def update(
        self, keys_BHQD: torch.Tensor, values_BHQD: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer: store what is new, return all that the rows may look at, (B, H, T, D)."""
        rows, _, new_tokens, _ = keys_BHQD.shape
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._blank(keys_BHQD)
            self._values[layer_idx] = self._blank(values_BHQD)
        here = slice(self._slots.start, self._slots.stop)
        keys_BHTD, values_BHTD = self._keys[layer_idx][here], self._values[layer_idx][here]
        if rows == 1:
            start = self.lengths[self._slots.start] - new_tokens
            keys_BHTD[:, :, start : start + new_tokens] = keys_BHQD
            values_BHTD[:, :, start : start + new_tokens] = values_BHQD
        else:
            row_B1 = torch.arange(rows)[:, None]
            at_BQ = self._starts_B[:, None] + self._steps_Q
            keys_BHTD[row_B1, :, at_BQ] = keys_BHQD.transpose(1, 2)
            values_BHTD[row_B1, :, at_BQ] = values_BHQD.transpose(1, 2)
        return keys_BHTD[:, :, : self._longest], values_BHTD[:, :, : self._longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What models ask when they are not told positions; ours always are."""
        return max(self.lengths, default=0)

    def open_slot(self) -> int:
        """Take a slot with nothing in it; returns its number."""
        if len(self.lengths) == self.slots:
            raise IndexError("no free slot")
        if len(self.lengths) == self._rooms:
            self._rooms = min(self.slots, 2 * self._rooms)
            if any(not _is_lazy(keys.device) for keys in self._keys.values()):
                self._grow()
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
        if not self.lengths:
            self.clear()
        return last

    def clear(self) -> None:
        """Forget every sequence, and give memory back."""
        self.lengths.clear()
        self._keys.clear()
        self._values.clear()
        self._capacity = 0
        self._rooms = 1

    def _blank(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros, with room for the longest sequence in each slot. On a CPU for all slots, since the system allocates only what is
        written to; elsewhere, where all is allocated at once, for those in use, rounded up to a power of two."""
        # Zeros, as fresh pages are: masked positions still go through a multiplication, and NaN times zero is NaN.
        is_lazy = _is_lazy(like.device)
        shape = (self.slots if is_lazy else self._rooms, like.shape[1], self._capacity, like.shape[3])
        if not is_lazy:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        pages = mmap.mmap(-1, math.prod(shape) * like.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(pages, dtype=like.dtype).view(shape)

    def _reserve(self, tokens: int) -> None:
        if tokens <= self._capacity:
            return
        self._capacity = max(tokens, self._capacity + max(GROW_TOKENS, self._capacity // 2))
        self._grow()

    def _grow(self) -> None:
        for store in (self._keys, self._values):
            for layer, old_SHTD in store.items():
                grown = store[layer] = self._blank(old_SHTD)
                for slot, length in enumerate(self.lengths):
                    grown[slot, :, :length] = old_SHTD[slot, :, :length]


def _is_lazy(device: torch.device) -> bool:
    """Whether a tensor there takes memory as it is written to."""
    return device.type == "cpu"

"""Which samples begin alike: those that share their first tokens are one trie, in which each token is computed once. Pure.

Samples are brought into an order in which those that begin alike are neighbours. Then one number per sample describes the tries:
how many tokens it shares with the sample before it. Any selection of samples, in this order, computes of each what comes after
that shared part. (It is the array of longest common prefixes: Manber and Myers, "Suffix Arrays", 1993.)

Only what comes before a token, ids and positions, decides the model's state at it. So samples of any trials may share tokens,
sampled ones too; what is trained of a sample, and how, is no part of the trie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Forest:
    """Of n samples. order: each of their indices once, neighbours begin alike. shared[k]: with how many tokens order[k] begins as
    order[k - 1] does, the most that it shares with any before it; shared[0] is 0."""

    order: tuple[int, ...]
    shared: tuple[int, ...]

    @classmethod
    def of(cls, samples: Sequence[ArrayLike]) -> Forest:
        """Of samples' token ids, int [T] each, at least 0. The same samples give the same forest, on every machine."""
        arrays = [np.ascontiguousarray(ids, dtype=">i4") for ids in samples]
        # Ids in big-endian bytes are ordered as the ids are, and compared in one call.
        keys = [array.tobytes() for array in arrays]
        order = sorted(range(len(arrays)), key=lambda i: (keys[i], i))
        shared = [0, *(_alike(arrays[a], arrays[b]) for a, b in pairwise(order))]
        return cls(tuple(order), tuple(shared[: len(order)]))

    @classmethod
    def apart(cls, count: int) -> Forest:
        """Of samples that share nothing: tries without branches."""
        return cls(tuple(range(count)), (0,) * count)

    def walk(self, chosen: Iterable[int]) -> Iterator[tuple[int, int]]:
        """The chosen samples in the forest's order, each with how many of its tokens those before it (of the chosen) have
        computed."""
        last = None
        for place in sorted(self._places[i] for i in chosen):
            yield self.order[place], 0 if last is None else self._least(last + 1, place)
            last = place

    def only(self, chosen: Sequence[int]) -> Forest:
        """The forest of the chosen samples; its sample i is `chosen[i]`."""
        number = {i: n for n, i in enumerate(chosen)}
        found = [(number[i], before) for i, before in self.walk(chosen)]
        return Forest(tuple(i for i, _ in found), tuple(before for _, before in found))

    def tries(self) -> list[range]:
        """Of each trie, the range of `order` that its samples fill."""
        starts = [place for place, shared in enumerate(self.shared) if shared == 0]
        return [range(a, b) for a, b in pairwise([*starts, len(self.order)])]

    @cached_property
    def _places(self) -> list[int]:
        places = [0] * len(self.order)
        for place, i in enumerate(self.order):
            places[i] = place
        return places

    @cached_property
    def _minima(self) -> list[list[int]]:
        """[h][k]: the least of shared[k : k + 2 ** h]."""
        rows = [list(self.shared)]
        while len(rows[-1]) > (half := 1 << (len(rows) - 1)):
            rows.append([min(a, b) for a, b in zip(rows[-1], rows[-1][half:], strict=False)])
        return rows

    def _least(self, first: int, last: int) -> int:
        """Of shared[first : last + 1]."""
        height = (last - first + 1).bit_length() - 1
        row = self._minima[height]
        return min(row[first], row[last + 1 - (1 << height)])


def _alike(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if bool(differs.any()) else length

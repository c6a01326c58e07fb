"""One plan of a step for all ranks: which sample goes into which micro-batch of which rank. Pure Python; it moves no data.

In a micro-batch each token is computed once, whichever samples have it (`forest`), so samples that begin alike belong together;
what a cut between them computes again is part of what is weighed.

Under ZeRO-3 every rank must make the same calls of every submodule, forward and backward, or all of them hang: so all ranks have
equally many micro-batches (a rank with nothing left gets an empty one, which is run as a dummy) and cut the head's work into
equally many chunks. And since each layer's weights are gathered by all ranks together, a micro-batch takes as long as the
slowest rank's: what is balanced is the cost at each position, not a rank's total.

The plan is made once, from all samples of a step, and is plain data, which ranks check against the samples.
The same input gives the same plan, on every machine.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from steno.contracts.errors import ConfigError
from steno_trainer.errors import BadPlan
from steno_trainer.packing.cut import fewest_repeats
from steno_trainer.packing.forest import Forest

PATHS = 8
"""The samples of a micro-batch may have this many times its budget in tokens, if shared tokens are counted for each sample. Keys
and values are gathered along the samples' paths, for one layer at a time: they are 1,000 of the about 70,000 values that a layer
of a model with 7 billion parameters keeps of a token."""
EVENER = (1, 2, 4)
"""Pieces to a micro-batch, for ways to cut that let ranks wait less."""
HALVINGS = 12
"""Bisections that search for the largest piece's cost in an even cut: to a four-thousandth of the work."""


class PackingItem(NamedTuple):
    """A sample as the plan sees it: its tokens, and how many of them are trained (the head runs for those only)."""

    tokens: int
    trained: int


@dataclass(frozen=True)
class CostModel:
    """Model FLOPs, forward and backward, of one sample; also what MFU is measured in. Recomputation is not counted.

        cost(T, n, s) = 6 P (T - s)  +  6 L W (T^2 - s^2)  +  6 H V n

    s: of its first tokens, those that another sample of the micro-batch has computed; P: parameters active per token, without
    embedding and head; L: layers; W: heads x head size; H: hidden size; V: vocabulary. The second term is that of causal
    attention within the sample: half of 12 L W per token and position.
    Where the weights are `frozen`, under an adapter, they get no gradient, and 4 stands for the 6 of the first and the last term.
    Source: PaLM, arXiv:2204.02311, appendix B; halved for the causal mask as in FlashAttention-2, arXiv:2307.08691, 4.1.
    """

    per_token: float
    per_pair: float
    per_trained: float

    @classmethod
    def of(
        cls, *, parameters: int, layers: int, attention_width: int, hidden: int, vocabulary: int, frozen: bool = False
    ) -> CostModel:
        passes = 4.0 if frozen else 6.0
        return cls(passes * parameters, 6.0 * layers * attention_width, passes * hidden * vocabulary)

    def flops(self, item: PackingItem, shared: int = 0) -> float:
        def until(tokens: int) -> float:
            return (self.per_token + self.per_pair * tokens) * tokens

        return until(item.tokens) - until(shared) + self.per_trained * item.trained

    def together(self, items: Sequence[PackingItem], forest: Forest, chosen: Iterable[int]) -> float:
        """Of the chosen samples in one micro-batch."""
        return sum(self.flops(items[i], shared) for i, shared in forest.walk(chosen))


class MicroBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one rank runs at once: indices into the step's samples, how many tokens it computes, each once, and how many of the
    samples' are trained. Empty: a dummy."""

    items: tuple[int, ...] = ()
    tokens: int = 0
    trained: int = 0


class PackingPlan(msgspec.Struct, frozen=True, array_like=True):
    """ranks[r][i]: the i-th micro-batch of rank r, of at most budget_tokens. chunks[i]: into how many chunks every rank cuts the
    head's work at its i-th micro-batch, of at most chunk_tokens trained tokens each; at least 1."""

    budget_tokens: int
    chunk_tokens: int
    ranks: tuple[tuple[MicroBatch, ...], ...]
    chunks: tuple[int, ...]

    def check(self, items: Sequence[PackingItem], forest: Forest) -> None:
        """Whether this is a plan of these samples that ranks can run in lockstep. Raises: BadPlan: saying what is not."""
        placed = sorted(i for batches in self.ranks for batch in batches for i in batch.items)
        if placed != list(range(len(items))):
            raise BadPlan(
                f"{len(items)} samples, but the plan places {len(placed)}, {len(set(placed))} of them different"
            )
        for r, batches in enumerate(self.ranks):
            if len(batches) != len(self.chunks):
                raise BadPlan(f"rank {r} has {len(batches)} micro-batches of {len(self.chunks)}")
            for i, batch in enumerate(batches):
                size = Size.of(batch.items, items, forest)
                if (size.tokens, size.trained) != (batch.tokens, batch.trained) or size.tokens > self.budget_tokens:
                    raise BadPlan(
                        f"rank {r}, micro-batch {i}: {size.tokens} tokens in a budget of {self.budget_tokens}"
                    )
                if size.paths > PATHS * self.budget_tokens:
                    raise BadPlan(
                        f"rank {r}, micro-batch {i}: paths of {size.paths} tokens, {PATHS} x the budget at most"
                    )
                if size.trained > self.chunks[i] * self.chunk_tokens or self.chunks[i] < 1:
                    raise BadPlan(
                        f"rank {r}, micro-batch {i}: {size.trained} trained tokens in {self.chunks[i]} chunks"
                    )

    @property
    def tokens(self) -> int:
        """That all ranks compute, without dummies."""
        return sum(batch.tokens for batches in self.ranks for batch in batches)

    def flops(self, items: Sequence[PackingItem], forest: Forest, cost: CostModel) -> list[list[float]]:
        """Of each rank's micro-batches."""
        return [[cost.together(items, forest, batch.items) for batch in batches] for batches in self.ranks]

    def balance(self, items: Sequence[PackingItem], forest: Forest, cost: CostModel) -> float:
        """Work over (ranks x the time of the slowest, at each position): 1.0 if no rank ever waits, 0.0 without work."""
        by_batch = self.flops(items, forest, cost)
        slowest = sum(max(column) for column in zip(*by_batch, strict=True))
        return sum(map(sum, by_batch)) / (len(self.ranks) * slowest) if slowest else 0.0


class Size(NamedTuple):
    """The size of some samples in one micro-batch. tokens: those that it computes, shared ones once. paths: tokens of all
    samples, shared ones counted for each. room: how much of the token budget they take."""

    tokens: int
    trained: int
    paths: int

    @classmethod
    def of(cls, chosen: Iterable[int], items: Sequence[PackingItem], forest: Forest) -> Size:
        walked = list(forest.walk(chosen))
        paths = sum(items[i].tokens for i, _ in walked)
        return cls(paths - sum(shared for _, shared in walked), sum(items[i].trained for i, _ in walked), paths)

    @property
    def room(self) -> int:
        return max(self.tokens, -(-self.paths // PATHS))


def plan_step(
    items: Sequence[PackingItem],
    forest: Forest | None = None,
    *,
    ranks: int,
    budget_tokens: int,
    chunk_tokens: int,
    cost: CostModel,
    alone: bool = False,
) -> PackingPlan:
    """Pack a step's samples into as few rounds of micro-batches as the budget allows, balanced by estimated FLOPs.

    What is packed are pieces of tries: first the largest that fit, cut where the fewest tokens are repeated; where ranks would
    wait for each other's, also smaller ones. Two packings of each are tried, by cost (longest first onto the least loaded) and by
    size (best fit). The one whose rounds take less, with all that is computed again, is taken.

    Args: items: all samples of the step, in the order that indices mean. forest: what they share; None: nothing. budget_tokens:
        of one micro-batch; what memory allows. chunk_tokens: trained tokens whose logits may exist at once. alone: each sample
        gets a micro-batch of its own.
    Raises: BadPlan: a sample over the budget (they are counted out before, as `too_long`), or with impossible counts.
        ConfigError: a number that must be positive is not.
    """
    for name, value in (("ranks", ranks), ("budget_tokens", budget_tokens), ("chunk_tokens", chunk_tokens)):
        if value < 1:
            raise ConfigError(f"{name}: got {value}, must be above 0", field=name)
    for i, item in enumerate(items):
        if not 0 < item.tokens <= budget_tokens or not 0 <= item.trained <= item.tokens:
            raise BadPlan(f"sample {i}: {item.tokens} tokens, {item.trained} trained, in a budget of {budget_tokens}")
    if forest is None or alone:
        forest = Forest.apart(len(items))
    candidates = [
        arranged
        for pieces in _Tries(items, forest, cost).ways_to_cut(budget_tokens, ranks)
        for arranged in _packings(pieces, ranks, budget_tokens, alone)
    ]
    best = min(candidates, key=lambda rounds: sum(max(b.cost for b in row) for row in rounds))
    by_rank = _deal(best, ranks)

    def batch(bin_: Bin) -> MicroBatch:
        size = Size.of(bin_.items, items, forest)
        return MicroBatch(tuple(sorted(bin_.items)), size.tokens, size.trained)

    batches = tuple(tuple(batch(b) for b in row) for row in by_rank)
    chunks = tuple(max(1, *(-(-batch.trained // chunk_tokens) for batch in row)) for row in zip(*batches, strict=True))
    plan = PackingPlan(budget_tokens, chunk_tokens, batches, chunks)
    plan.check(items, forest)
    return plan


@dataclass(frozen=True)
class Bin:
    """Samples that stay together: a piece of a trie, or some of them. room and cost: at most; pieces that meet may share more."""

    items: tuple[int, ...] = ()
    room: int = 0
    cost: float = 0.0

    def __add__(self, other: Bin) -> Bin:
        return Bin(self.items + other.items, self.room + other.room, self.cost + other.cost)


class _Tries:
    """A step's tries, and how to cut them."""

    def __init__(self, items: Sequence[PackingItem], forest: Forest, cost: CostModel) -> None:
        self._items, self._forest, self._cost = items, forest, cost
        self._tries = forest.tries()
        # Sums over places of what comes after the part that is shared with the place before.
        self._tokens, self._paths, self._costs = [0], [0], [0.0]
        for i, shared in zip(forest.order, forest.shared, strict=True):
            self._tokens.append(self._tokens[-1] + items[i].tokens - shared)
            self._paths.append(self._paths[-1] + items[i].tokens)
            self._costs.append(self._costs[-1] + cost.flops(items[i], shared))

    def ways_to_cut(self, budget: int, ranks: int) -> Iterator[list[Bin]]:
        """In the largest pieces that fit; then, where ranks could share the work, in ones that are as even as they can be: so
        many that each rank gets a few at a time."""
        whole = self._cut(budget, math.inf)
        yield self._bins(whole)
        if ranks == 1 or not any(self._forest.shared):
            return
        bins = -(-len(_best_fit(self._bins(whole), budget)) // ranks) * ranks
        for few in EVENER:
            low, high = self._costs[-1] / (few * bins), self._costs[-1]
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                low, high = (low, middle) if len(self._cut(budget, middle)) <= few * bins else (middle, high)
            yield self._bins(self._cut(budget, high))

    def _cut(self, budget: int, most: float) -> list[range]:
        """Pieces of at most the budget, and of at most that cost."""
        tokens, paths, costs, shared = self._tokens, self._paths, self._costs, self._forest.shared
        per_token, per_pair = self._cost.per_token, self._cost.per_pair

        def fits(first: int, last: int) -> bool:
            again = shared[first]
            work = costs[last + 1] - costs[first] + (per_token + per_pair * again) * again
            own, all_ = tokens[last + 1] - tokens[first] + again, paths[last + 1] - paths[first]
            return work <= most and own <= budget and all_ <= PATHS * budget

        return [part for trie in self._tries for part in fewest_repeats(trie, shared, fits)]

    def _bins(self, parts: Iterable[range]) -> list[Bin]:
        inside = (self._forest.order[part[0] : part[-1] + 1] for part in parts)
        return [
            Bin(
                chosen,
                Size.of(chosen, self._items, self._forest).room,
                self._cost.together(self._items, self._forest, chosen),
            )
            for chosen in inside
        ]


def _packings(pieces: list[Bin], ranks: int, budget: int, alone: bool) -> Iterator[list[list[Bin]]]:
    dense = pieces if alone else _best_fit(pieces, budget)
    rounds = max(1, -(-len(dense) // ranks))
    spread = None if alone else _spread(pieces, rounds * ranks, budget)
    if spread is not None:
        yield _arrange(spread, ranks)
    yield _arrange(dense + [Bin()] * (rounds * ranks - len(dense)), ranks)


def _best_fit(pieces: Sequence[Bin], budget: int) -> list[Bin]:
    """Best fit decreasing by room: into the fullest bin that still has some."""
    bins: list[Bin] = []
    free: list[tuple[int, int]] = []  # (room left, bin), sorted
    for piece in sorted(pieces, key=lambda piece: (-piece.room, piece.items)):
        at = bisect_left(free, (piece.room, -1))
        if at == len(free):
            bins.append(piece)
            left, bin_ = budget, len(bins) - 1
        else:
            left, bin_ = free.pop(at)
            bins[bin_] += piece
        insort(free, (left - piece.room, bin_))
    return bins


def _spread(pieces: Sequence[Bin], count: int, budget: int) -> list[Bin] | None:
    """Longest processing time first: the most expensive piece into the cheapest bin that has room. None: there is none."""
    bins = [Bin()] * count
    heap = [(0.0, b) for b in range(count)]
    for piece in sorted(pieces, key=lambda piece: (-piece.cost, piece.items)):
        full = []
        while heap and bins[heap[0][1]].room + piece.room > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        _, b = heapq.heappop(heap)
        bins[b] += piece
        heapq.heappush(heap, (bins[b].cost, b))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _arrange(bins: list[Bin], ranks: int) -> list[list[Bin]]:
    """Bins into rounds of one per rank, the most expensive ones together: no other grouping has a smaller sum of maxima."""
    ordered = sorted(bins, key=lambda b: (-b.cost, sorted(b.items)))
    return [ordered[at : at + ranks] for at in range(0, len(ordered), ranks)]


def _deal(rounds: list[list[Bin]], ranks: int) -> list[list[Bin]]:
    """Who runs which bin of a round: the most expensive goes to the rank with the least work so far."""
    by_rank: list[list[Bin]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    for row in rounds:
        for r, bin_ in zip(sorted(range(ranks), key=lambda r: (work[r], r)), row, strict=True):
            by_rank[r].append(bin_)
            work[r] += bin_.cost
    return by_rank

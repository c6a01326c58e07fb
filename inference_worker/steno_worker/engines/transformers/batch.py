"""Continuous batching over one causal language model: sequences join and leave between steps.

Owns which sequence runs in which slot and what one step computes; no threads, no asyncio. A step is at most one budget of
prompt tokens (oldest first) and one token for every running sequence, so a long prompt delays the others by one chunk at a time.
Every step's tokens carry the version of the weights that sampled them (I10). After new weights, sequences in flight prefill
again, unless they keep their cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from steno.contracts.errors import BadRequest, StenoError, UnsoundOutput
from steno_worker.engines.transformers.kv import SlotCache
from steno_worker.engines.transformers.sampler import DrawnToken, SamplerRow, draw
from steno_worker.interfaces import TokenStep


@dataclass(eq=False, slots=True)
class Sequence:
    """One completion. ids: prompt and what was drawn; `computed` of them have keys and values in the cache.

    own: the cache of a sequence whose prompt is still being computed; a running one has a slot in the batch's.
    mixed_kv: of what is computed, some is of weights that were loaded before those that sample now.
    """

    request_id: str
    row: SamplerRow
    max_tokens: int
    ids: list[int] = field(init=False)
    computed: int = 0
    own: SlotCache | None = None
    mixed_kv: bool = False

    def __post_init__(self) -> None:
        self.ids = list(self.row.prompt_ids)


class RunningBatch:
    """Single-threaded: whoever calls `step` makes every other call too."""

    def __init__(self, model: PreTrainedModel, *, version: str, max_running: int, prefill_tokens: int) -> None:
        self.model = model
        self.version = version
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._cache = SlotCache(max_running)
        self._running: list[Sequence] = []
        """By slot: `_running[i]` has slot i."""
        self._waiting: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cache.lengths)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    @torch.inference_mode()
    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence; nothing if it has ended."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            slot = self._running.index(sequence)
            moved = self._cache.release(slot)
            self._running[slot] = self._running[moved]
            self._running.pop()

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, TokenStep | StenoError]]:
        """Compute one step: a token for each running sequence and for each whose prompt is now complete. A sequence ends with an
        error if its law leaves no token, or its logits are not finite."""
        ready, logits = self._prefill()
        decoding = list(self._running)
        for slots in self._cache.spans():
            last_B1 = torch.tensor([decoding[slot].ids[-1:] for slot in slots])
            logits.append(self._forward(self._cache, last_B1, slots))
        for sequence in ready:
            assert sequence.own is not None
            self._cache.adopt(sequence.own)
            sequence.own = None
            self._running.append(sequence)
        sampled = ready + decoding
        if not sampled:
            return []
        drawn = draw(torch.cat(logits), [sequence.row for sequence in sampled])
        return [(sequence, self._take(sequence, token)) for sequence, token in zip(sampled, drawn, strict=True)]

    @torch.inference_mode()
    def swap_weights(self, version: str, tensors: Mapping[str, torch.Tensor], *, keep: bool = False) -> None:
        """Replace parameters between two steps, all or none. What is in flight prefills again, with the new weights, or
        goes on with the keys and values that the old ones made (`keep`).

        Raises: ValueError naming the tensor that is unknown or of another shape; nothing has changed then.
        """
        own = self.model.state_dict()
        for name, tensor in tensors.items():
            if name not in own:
                raise ValueError(f"the model has no tensor {name!r}")
            if own[name].shape != tensor.shape:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}, the model has {tuple(own[name].shape)}")
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        self.version = version
        if keep:
            for sequence in (*self._running, *self._waiting):
                sequence.mixed_kv = sequence.computed > 0
            return
        for sequence in reversed([*self._running, *self._waiting]):
            sequence.computed, sequence.own, sequence.mixed_kv = 0, None, False
            if sequence in self._running:
                self._waiting.appendleft(sequence)
        self._running.clear()
        self._cache.clear()

    @torch.inference_mode()
    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of token_ids[1:], each given those before it, at temperature 1."""
        cache = SlotCache(1)
        cache.open_slot()
        positions_1Q, mask_11QT = cache.begin(len(token_ids))
        out = self.model(
            input_ids=torch.tensor([token_ids]),
            position_ids=positions_1Q,
            attention_mask=mask_11QT,
            past_key_values=cache,
            use_cache=True,
        )
        logprobs_QV = out.logits[0, :-1].float().log_softmax(-1)
        scores: list[float] = logprobs_QV.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
        return scores

    def _prefill(self) -> tuple[list[Sequence], list[torch.Tensor]]:
        """Spend the step's budget of prompt tokens. Returns the sequences that are complete, and their last logits."""
        ready: list[Sequence] = []
        logits: list[torch.Tensor] = []
        budget = self._prefill_tokens
        while budget > 0 and self._waiting and len(self._running) + len(ready) < self._max_running:
            sequence = self._waiting[0]
            if sequence.own is None:
                sequence.own = SlotCache(1)
                sequence.own.open_slot()
            chunk = sequence.ids[sequence.computed : sequence.computed + budget]
            last_1V = self._forward(sequence.own, torch.tensor([chunk]))
            sequence.computed += len(chunk)
            budget -= len(chunk)
            if sequence.computed == len(sequence.ids):
                self._waiting.popleft()
                ready.append(sequence)
                logits.append(last_1V)
        return ready, logits

    def _forward(self, cache: SlotCache, ids_BQ: torch.Tensor, slots: range | None = None) -> torch.Tensor:
        """Logits after the last of each row's new ids, (B, V)."""
        positions_BQ, mask_B1QT = cache.begin(ids_BQ.shape[1], slots)
        out = self.model(
            input_ids=ids_BQ,
            position_ids=positions_BQ,
            attention_mask=mask_B1QT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: torch.Tensor = out.logits[:, -1]
        return logits_BV

    def _take(self, sequence: Sequence, token: DrawnToken) -> TokenStep | StenoError:
        """Record a drawn token; a sequence that has ended leaves the batch."""
        if token.fault:
            self.drop(sequence)
            if sequence.row.is_bent:
                return BadRequest(token.fault)
            return UnsoundOutput("the model's logits are NaN or infinite: check its weights")
        row = sequence.row
        sequence.ids.append(token.id)
        sequence.computed = len(sequence.ids) - 1
        row.drawn.append(token.id)
        step = TokenStep(
            ids=[token.id],
            logprobs=[token.logprob],
            version=self.version,
            top=[token.top] if row.top else None,
            constrained=row.matcher is not None,
            mixed_kv=sequence.mixed_kv,
        )
        if token.id in row.stops or (row.matcher is not None and row.matcher.done):
            step.finish = "stop"
        elif len(row.drawn) >= sequence.max_tokens:
            step.finish = "length"
        if step.finish is not None:
            self.drop(sequence)
        return step

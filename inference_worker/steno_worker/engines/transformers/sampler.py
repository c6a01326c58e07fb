"""Drawing tokens by a sampling law: logits in, ids and log-probabilities out. Pure but for each row's random numbers.

The order is vLLM's (allowed ids, logit bias, minimum length, penalties, grammar, temperature, min-p, top-k, top-p), and so is
the meaning of the log-probability: of the distribution that the token was drawn from, all of these applied
(`processed_logprobs`). For plain temperature sampling that is the policy's own at this temperature (I1); greedy rows report it
at temperature 1.

Shapes: B rows, V vocabulary entries. All float32.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from steno.contracts.chat import Sampling
from steno_worker.engines.transformers.grammar import Matcher


@dataclass(slots=True)
class SamplerRow:
    """One request's law and what it remembers. `drawn`: ids so far, kept by the caller of `draw`.

    stops: ids that end the completion. top: alternatives wanted per token.
    """

    law: Sampling
    prompt_ids: Sequence[int]
    stops: frozenset[int]
    top: int = 0
    matcher: Matcher | None = None
    drawn: list[int] = field(default_factory=list)
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.law.seed)

    @property
    def bends_early(self) -> bool:
        """Whether anything happens to this row's logits before the temperature."""
        law = self.law
        return bool(
            law.logit_bias
            or law.allowed_token_ids
            or self.matcher
            or law.min_tokens > len(self.drawn)
            or law.remembers_output()
        )

    @property
    def is_bent(self) -> bool:
        """Whether its law can leave nothing to draw; otherwise it is the model that does."""
        return self.bends_early or self.truncates

    @property
    def truncates(self) -> bool:
        law = self.law
        return law.temperature > 0 and (law.top_p < 1.0 or law.top_k > 0 or law.min_p > 0.0)


@dataclass(slots=True)
class DrawnToken:
    """One token. top: alternatives [(id, logprob)], best first; those that could not be drawn are left out.

    fault: why nothing could be drawn; then the rest means nothing.
    """

    id: int
    logprob: float
    top: list[tuple[int, float]]
    fault: str = ""


def draw(logits_BV: torch.Tensor, rows: Sequence[SamplerRow]) -> list[DrawnToken]:
    """Draw one token for each row. Advances each row's random numbers and grammar; `drawn` is left to the caller.

    A row's draw depends on its seed and its logits only, never on the rest of the batch. A row whose law leaves nothing to
    draw gets a fault instead of a token, and the others go on.
    """
    logits_BV = logits_BV.float()
    if any(row.bends_early or row.truncates for row in rows):
        logits_BV = logits_BV.clone()
    for logits_V, row in zip(logits_BV, rows, strict=True):
        if row.bends_early:
            _bend(logits_V, row)
    if any(row.law.temperature not in (0.0, 1.0) for row in rows):
        logits_BV = logits_BV / torch.tensor([[row.law.temperature or 1.0] for row in rows])
    for logits_V, row in zip(logits_BV, rows, strict=True):
        if row.truncates:
            _truncate(logits_V, row.law)
    logprobs_BV = logits_BV.log_softmax(-1)
    ids_B = _pick(logprobs_BV, rows)
    chosen = logprobs_BV.gather(1, ids_B[:, None])[:, 0].tolist()
    return [
        _drawn(row, token, logprob, logprobs_V)
        for row, token, logprob, logprobs_V in zip(rows, ids_B.tolist(), chosen, logprobs_BV, strict=True)
    ]


def _drawn(row: SamplerRow, token: int, logprob: float, logprobs_V: torch.Tensor) -> DrawnToken:
    if not math.isfinite(logprob):
        return DrawnToken(token, logprob, [], "the sampling law excludes every token")
    if row.matcher is not None and (refused := row.matcher.accept(token)):
        return DrawnToken(token, logprob, [], f"the grammar allows no next token: {refused}")
    return DrawnToken(token, logprob, _alternatives(logprobs_V, row.top) if row.top else [])


def _bend(logits_V: torch.Tensor, row: SamplerRow) -> None:
    law = row.law
    if law.allowed_token_ids:
        allowed = torch.tensor(law.allowed_token_ids)
        kept = logits_V[allowed]
        logits_V.fill_(-math.inf)[allowed] = kept
    for token, bias in law.logit_bias.items():
        logits_V[token] += bias
    # Not under a grammar: a finished one allows nothing but a stop id.
    if row.stops and len(row.drawn) < law.min_tokens and row.matcher is None:
        logits_V[sorted(row.stops)] = -math.inf
    if law.remembers_output():
        _penalise(logits_V, row)
    if row.matcher is not None:
        logits_V.masked_fill_(~row.matcher.allowed(logits_V.shape[0]).to(logits_V.device), -math.inf)


def _penalise(logits_V: torch.Tensor, row: SamplerRow) -> None:
    law, size = row.law, logits_V.shape[0]
    if law.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.drawn}))
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / law.repetition_penalty, values * law.repetition_penalty)
    if row.drawn and (law.presence_penalty or law.frequency_penalty):
        counts_V = torch.bincount(torch.tensor(row.drawn), minlength=size).float()
        logits_V -= law.frequency_penalty * counts_V + law.presence_penalty * (counts_V > 0)


def _truncate(logits_V: torch.Tensor, law: Sampling) -> None:
    """min-p, then top-k, then top-p, each over what the one before has left."""
    if law.min_p > 0.0:
        logits_V[logits_V < logits_V.max() + math.log(law.min_p)] = -math.inf
    if 0 < law.top_k < logits_V.shape[0]:
        logits_V[logits_V < logits_V.topk(law.top_k).values[-1]] = -math.inf
    if law.top_p < 1.0:
        sorted_V, order_V = logits_V.sort(descending=True, stable=True)
        probs_V = sorted_V.softmax(-1)
        before_V = probs_V.cumsum(-1) - probs_V
        before_V[0] = 0.0  # the likeliest stays, whatever top_p is
        logits_V[order_V[(before_V >= law.top_p) & (before_V > 0)]] = -math.inf


def _pick(logprobs_BV: torch.Tensor, rows: Sequence[SamplerRow]) -> torch.Tensor:
    """Ids int64 (B,). Inverse of the cumulative distribution: one random number per token, the same for any batch."""
    if all(row.law.temperature == 0.0 for row in rows):
        return logprobs_BV.argmax(-1)
    sums_BV = logprobs_BV.double().exp_().cumsum_(-1)
    total_B = sums_BV[:, -1]
    at_B = torch.tensor([row.random.random() if row.law.temperature > 0 else 0.0 for row in rows], dtype=torch.float64)
    # Strictly below the total, so that what is found has a probability above zero.
    at_B = torch.minimum(at_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    # A row without a distribution (nan) is found beyond its end; it must not take the others with it.
    ids_B = torch.searchsorted(sums_BV, at_B[:, None], right=True)[:, 0].clamp_(max=logprobs_BV.shape[1] - 1)
    greedy = [index for index, row in enumerate(rows) if row.law.temperature == 0.0]
    if greedy:
        ids_B[greedy] = logprobs_BV[greedy].argmax(-1)
    return ids_B


def _alternatives(logprobs_V: torch.Tensor, count: int) -> list[tuple[int, float]]:
    best = logprobs_V.topk(min(count, logprobs_V.shape[0]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(token, logprob) for token, logprob in pairs if logprob > -math.inf]

"""The step from its definitions: one process, plain torch, one sample at a time, whole logits, transformers' own attention."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from steno_trainer.data.rows import TrainingRow
from steno_trainer.step.step_plan import StepBatch


class Reference:
    """dtype float64: rounding is what we compare with. Optimizer: AdamW as in the settings of the test."""

    def __init__(
        self,
        model: Path,
        *,
        learning_rate: float,
        epsilon: float,
        max_grad_norm: float = 0.0,
        frozen: Path | None = None,
    ) -> None:
        self.model, self.frozen = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
            for path in (model, frozen or model)
        )
        self.max_grad_norm = max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), eps=epsilon, weight_decay=0.0
        )

    def step(
        self,
        batch: StepBatch,
        passes: Sequence[Sequence[int]],
        *,
        reference_kl: float = 0.0,
        distillation: float = 0.0,
        level: str = "token",
        corrected: str | None = None,
        kept: tuple[float, float] = (0.5, 2.0),
        low: float = 0.2,
        high: float = 0.28,
    ) -> dict[str, float]:
        """passes: row numbers of each optimizer step. level: which tokens share a ratio. corrected: the tokens that share a ratio
        (by token: all of a row) have one mismatch weight: the product of theirs (`sequence`), or the geometric mean
        (`geometric`). kept: `masked` makes weights outside these bounds 0. Returns: the loss and the gradient's norm, averaged
        over passes. Sets `stopped`: the part of ratios that were clipped."""
        with torch.no_grad():
            proximal = [self._logprobs(self.model, row)[0] for row in batch.rows]
            frozen = [self._logprobs(self.frozen, row)[0] for row in batch.rows]
        losses, norms, stopped = [], [], []
        for part in passes:
            by_trial = Counter()
            for i in part:
                by_trial[batch.rows[i].trial_id] += int(batch.rows[i].loss_mask_T.sum())
            total = torch.zeros((), dtype=torch.float64)
            for i in part:
                row = batch.rows[i]
                logprobs, entropies = self._logprobs(self.model, row)
                start = proximal[i] if len(passes) > 1 else logprobs.detach()
                advantage = batch.advantages[row.trial_id]
                sampling = row.sampling_logprobs_T[row.loss_mask_T].double()
                for number in set(numbers := _numbers(row, level)):
                    of = torch.tensor([at for at, found in enumerate(numbers) if found == number])
                    share = (logprobs[of] - start[of]).mean().exp().item()
                    stopped.append(share > 1 + high if advantage > 0 else share < 1 - low)
                for at in range(len(logprobs)):
                    of_token = advantage + distillation * (frozen[i][at] - start[at]).item()
                    same = torch.tensor([found == numbers[at] for found in numbers])
                    apart = (start - sampling)[same if corrected is None or level != "token" else slice(None)]
                    rho = math.exp(apart.sum() if corrected == "sequence" else apart.mean())
                    m = rho if kept[0] <= rho <= kept[1] else 0.0
                    change = (logprobs - start)[same].mean().detach()
                    ratio = (change + logprobs[at] - logprobs[at].detach()).exp()
                    gain = m * torch.minimum(ratio * of_token, ratio.clamp(1 - low, 1 + high) * of_token)
                    away = frozen[i][at] - logprobs[at]
                    kl = away.exp() - away - 1
                    total = total + (-gain + reference_kl * kl - 0.01 * entropies[at]) / by_trial.total()
            self.optimizer.zero_grad()
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm or math.inf)
            self.optimizer.step()
            losses.append(total.item())
            norms.append(norm.item())
        self.stopped = sum(stopped) / len(stopped)
        return {"loss": sum(losses) / len(losses), "optimizer/grad_norm": sum(norms) / len(norms)}

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().float() for name, parameter in self.model.named_parameters()}

    @staticmethod
    def _logprobs(model: Any, row: TrainingRow) -> tuple[Tensor, Tensor]:
        """Of the row's trained tokens."""
        logits = model(input_ids=row.token_ids_T[None]).logits[0, :-1]
        logprobs = torch.log_softmax(logits / row.temperatures_T[1:, None].double(), -1)
        trained = row.loss_mask_T[1:]
        picked = logprobs.gather(-1, row.token_ids_T[1:, None])[:, 0]
        return picked[trained], -(logprobs.exp() * logprobs).sum(-1)[trained]


def _numbers(row: TrainingRow, level: str) -> list[int]:
    """Of each trained token, what names the sequence that it is of."""
    trained = row.loss_mask_T.nonzero()[:, 0].tolist()
    if level == "sequence":
        return [0] * len(trained)
    return [
        max(start for start in row.completion_starts if start <= at) if level == "completion" else at for at in trained
    ]

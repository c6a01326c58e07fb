"""From the setting `objective` to its function: one of ours, or one of a user's file.

A user's is `function(terms: Terms) -> Tensor`, the loss of each token, [N]. It is tried on a few tokens before anything is
loaded: what would make a step wrong, or stop it hours later, is said at once.

Shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from steno.config.plugins import load_function
from steno.contracts.errors import ConfigError
from steno_trainer.errors import BadBatch
from steno_trainer.objective.registry import REGISTRY
from steno_trainer.objective.terms import Terms, TokenLosses, TokenObjective

ALIKE = 1e-4
"""Largest difference, of the loss's size, between a token's loss by itself and among others: float32 sums are rounded."""


def objective_named(name: str) -> TokenObjective:
    """Raises: ConfigError: names `objective`: no such one; or a file or function that is none, or not per token."""
    if name in REGISTRY:
        found: TokenObjective = import_module(f"steno_trainer.objective.{REGISTRY[name].module}").losses
        return found
    given: Callable[[Terms], Any] = load_function(name, "objective")
    _try(name, given)

    def losses(terms: Terms) -> TokenLosses:
        if not len(terms.logprobs_N):  # a dummy: its graph must be there, whatever a sum or mean of nothing is
            return TokenLosses(terms.logprobs_N)
        wrong = _wrong(found := given(terms), terms)
        if wrong:
            raise BadBatch(f"objective {name}: {wrong}")
        return TokenLosses(found)

    return losses


def _try(name: str, given: Callable[[Terms], Any]) -> None:
    together = _tokens(slice(None))
    try:
        found = given(together)
        wrong = _wrong(found, together) or _not_to_train(found)
        if not wrong:
            alone = torch.cat([given(_tokens(slice(i, i + 1))).reshape(-1) for i in range(len(found))])
            wrong = _by_others(found, alone)
    except Exception as error:
        wrong = f"on {len(together.logprobs_N)} tokens it raised {type(error).__name__}: {error}"
    if wrong:
        raise ConfigError(f"objective {name}: {wrong}", field="objective")


def _wrong(found: Any, terms: Terms) -> str:
    """What is wrong with what a user's function returned; empty: nothing."""
    expected = tuple(terms.logprobs_N.shape)
    if not isinstance(found, Tensor):
        return f"it returned a {type(found).__name__}, must be a tensor: the loss of each token"
    if tuple(found.shape) != expected:
        return f"it returned a tensor of shape {tuple(found.shape)}, must be {expected}: the loss of each token, not their sum"
    if found.dtype != terms.logprobs_N.dtype:
        return f"it returned {found.dtype}, must be {terms.logprobs_N.dtype}"
    if not found.requires_grad:
        return "its loss has no gradient: it must depend on logprobs_N or ratios_N, not detached"
    return ""


def _not_to_train(found: Tensor) -> str:
    return "" if bool(found.isfinite().all()) else f"its losses are {found.tolist()}, must be finite"


def _by_others(together: Tensor, alone: Tensor) -> str:
    for i, (with_others, by_itself) in enumerate(zip(together.tolist(), alone.tolist(), strict=True)):
        if abs(with_others - by_itself) > ALIKE * max(1.0, abs(by_itself)):
            return (
                f"the loss of token {i} is {by_itself:.6g} by itself and {with_others:.6g} among others; it must not depend on "
                "them, since which tokens are in one call depends on packing and ranks (averages are `aggregation`)"
            )
    return ""


def _tokens(which: slice) -> Terms:
    """Of six tokens, of both signs and on both sides of the usual bounds."""
    proximal = torch.tensor([-0.1, -2.0, -1.0, -0.7, -3.0, -0.5])[which]
    ratios = torch.tensor([0.3, 1.5, 1.0, 4.0, 0.9, 1.1])[which]
    logprobs = (proximal + ratios.log()).requires_grad_()
    arrays = {
        "logprobs_N": logprobs, "ratios_N": (logprobs - proximal).exp(), "proximal_logprobs_N": proximal,
        "advantages_N": torch.tensor([1.0, -0.5, 0.2, -1.5, 0.7, -1.0])[which],
        "sampling_logprobs_N": proximal - 0.05,
    }  # fmt: skip
    settings = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert {field.name for field in fields(Terms)} == {*arrays, *settings}
    return Terms(**arrays, **settings)  # type: ignore[arg-type]

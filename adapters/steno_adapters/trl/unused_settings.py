"""Settings of TRL's own rollouts, which nothing here reads: values other than the default are refused, with a message that says
what decides instead. Pure; no TRL."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from steno.contracts.errors import BadRequest

_SAMPLING = "the trials' SamplingPolicy decides, which leaves out truncation and penalties unless told otherwise"
_PLAYED = {
    "top_p": _SAMPLING,
    "top_k": _SAMPLING,
    "min_p": _SAMPLING,
    "repetition_penalty": _SAMPLING,
    "chat_template_kwargs": "the agent's requests say them",
    "max_tool_calling_iterations": "the agent decides, and the Limits of its trials (max_turns)",
    "tools": "the agent has its own",
    "environment_factory": "the agent has its own",
}
"""Field of the config, or argument of the trainer -> what decides instead."""
UNUSED_BY_ASYNC = _PLAYED | {
    "num_generations": "`n` decides, or the program that runs the trials elsewhere",
    "max_completion_length": "the Limits of the trials decide (max_tokens), and token_budget",
    "fork_threshold_tokens": "the record decides which branches there are",
    "reward_funcs": "a trial's reward is the one on record",
}
UNUSED_BY_PROMPTS = _PLAYED | {"generation_kwargs": _SAMPLING}
"""Without `max_completion_length`: TRL's loss reads it, for `loss_type` dr_grpo."""
_OFF = {"min_p": 0.0, "top_k": -1}
"""Values that are accepted besides the default: they switch the setting off, too."""


def check_unused(unused: Mapping[str, str], args: Any, options: Mapping[str, Any], n: int | None = None) -> None:
    """Args: args: TRL's config. options: other arguments of its trainer. n: trials of a task: `num_generations` may say the same.

    Raises: BadRequest: one of `unused` is not its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name, instead in unused.items():
        value = getattr(args, name) if name in defaults else options.get(name)
        allowed = [defaults.get(name), *([n] if name == "num_generations" else [])]
        if value not in (*allowed, _OFF.get(name), None, [], {}):
            must = " or ".join(str(each) for each in dict.fromkeys(allowed))
            raise BadRequest(f"{name}: got {str(value)[:100]}, must be {must}: {instead}", field=name)

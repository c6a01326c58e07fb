"""Applies a trial's sampling policy to the sampling that its agent asks for, so that the tokens can be trained (I1).

Neutralising takes out what bends the distribution: truncation, penalties, logit bias, tokens and words that are allowed or
forbidden, a floor on length, greedy decoding (also what means it: temperatures that engines refuse), and
what switches a grammar on (strict tools, required or named tool choice, forbidding parallel calls). Kept: the seed, stop
strings, `max_tokens`, tool choice `none`, and `response_format`, which is an explicit contract with the agent: the worker marks
its tokens constrained. Forced values come last and win over both; forcing a bent law is allowed where nothing says that
every token must be trainable, and its tokens are then not trained.
"""

from __future__ import annotations

from typing import Any

import msgspec

from steno.contracts.chat import Job, Sampling, Tool
from steno.contracts.errors import BadRequest
from steno.contracts.records import SamplingPolicy

MIN_TEMPERATURE = 0.01
"""Engines refuse less, but for 0, which is greedy."""
MAX_STOPS = 16
"""As many as an agent may send."""
_PLAIN = Sampling()
_BENDING = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens",
    "ignore_eos", "allowed_token_ids", "bad_words",
)  # fmt: skip
_FIELDS = {field.name: field.type for field in msgspec.structs.fields(Sampling)}
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 100.0),
    "min_tokens": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
}
"""What engines take, both ends included."""


def check(policy: SamplingPolicy) -> None:
    """Check that a policy can be applied. Called at registration, so that no turn fails for it.

    Raises: BadRequest: naming `sampling.force.<key>`: no such field, a wrong type, out of range, or a forced law that is not
        plain although `neutralise` is true.
    """
    forced = _forced(policy)
    if policy.neutralise:
        for key in forced:
            if not msgspec.structs.replace(_PLAIN, **{key: forced[key]}).is_plain():
                raise BadRequest(
                    f"{key}: got {forced[key]!r}: can't be forced with neutralise: true (the default for groups of purpose "
                    "train), since tokens that are sampled with it can't be trained",
                    field=f"sampling.force.{key}",
                )


def apply(policy: SamplingPolicy, job: Job) -> tuple[Job, dict[str, Any]]:
    """The job as the trial allows it.

    A policy that leaves `neutralise` open neutralises nothing: a group resolves it when it is made, by its purpose.

    Returns: the job, and what was changed: {"temperature": {"asked": 0.0, "served": 1.0}, "tools.0.function.strict": …}; the
        same job and {} when nothing was.
    Raises: BadRequest: as `check`.
    """
    law: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    if policy.neutralise:
        law = {name: getattr(_PLAIN, name) for name in _BENDING}
        if job.sampling.temperature < MIN_TEMPERATURE:
            law["temperature"] = 1.0
        rest = _without_grammar(job, changed)
    law.update(_forced(policy))
    for name, served in law.items():
        asked = getattr(job.sampling, name)
        if asked != served:
            changed[name] = {"asked": asked, "served": served}
    if not changed:
        return job, {}
    return msgspec.structs.replace(job, sampling=msgspec.structs.replace(job.sampling, **law), **rest), changed


def _forced(policy: SamplingPolicy) -> dict[str, Any]:
    forced = {}
    for key, value in policy.force.items():
        field = f"sampling.force.{key}"
        if key not in _FIELDS:
            raise BadRequest(f"no such sampling field: {key}; there are {', '.join(_FIELDS)}", field=field)
        try:
            # strict=False only where JSON can't say it: object keys are strings, token ids are not.
            forced[key] = msgspec.convert(value, _FIELDS[key], strict=key != "logit_bias")
        except msgspec.ValidationError as error:
            raise BadRequest(f"{key}: {error}", field=field) from error
        low, high = _RANGES.get(key, (0.0, 0.0))
        number = forced[key]
        if key in _RANGES and number is not None and not low <= number <= high:
            raise BadRequest(f"{field}: got {number}, must be {low} to {high}", field=field)
        wrong = _wrong(key, number)
        if wrong:
            raise BadRequest(f"{key} {wrong}", field=field)
    return forced


def _wrong(key: str, value: Any) -> str:
    """What is wrong with a forced value besides its range; "" for nothing."""
    if key == "temperature" and 0.0 < value < MIN_TEMPERATURE:
        return f"must be 0 or at least {MIN_TEMPERATURE}"
    if key == "logit_bias" and not all(_is_id(token) and -100.0 <= bias <= 100.0 for token, bias in value.items()):
        return "must map token ids to numbers between -100 and 100"
    if key in ("stop_token_ids", "allowed_token_ids") and not all(_is_id(token) for token in value):
        return "must be token ids"
    if key == "bad_words" and not all(_is_text(word) for word in value):
        return "must be texts, none of them empty"
    if key == "stop" and (len(value) > MAX_STOPS or not all(_is_text(stop) for stop in value)):
        return f"must be at most {MAX_STOPS} strings, none of them empty"
    return ""


def _is_text(value: str) -> bool:
    """Not empty, and no half surrogate pairs, which no wire carries."""
    return bool(value) and value.encode(errors="ignore").decode() == value


def _is_id(token: int) -> bool:
    return 0 <= token < 2**31


def _without_grammar(job: Job, changed: dict[str, Any]) -> dict[str, Any]:
    """What to replace in the job so that no grammar is switched on for its tools."""
    rest: dict[str, Any] = {}
    if job.tool_choice not in ("auto", "none"):
        rest["tool_choice"] = "auto"
        changed["tool_choice"] = {"asked": job.tool_choice, "served": "auto"}
    if not job.parallel_tool_calls:
        rest["parallel_tool_calls"] = True
        changed["parallel_tool_calls"] = {"asked": False, "served": True}
    tools = [_lenient(tool) for tool in job.tools]
    for i, (before, after) in enumerate(zip(job.tools, tools, strict=True)):
        if before is not after:
            changed[f"tools.{i}.function.strict"] = {"asked": True, "served": False}
            rest["tools"] = tools
    return rest


def _lenient(tool: Tool) -> Tool:
    function = tool.get("function")
    if not isinstance(function, dict) or not function.get("strict"):
        return tool
    return {**tool, "function": {**function, "strict": False}}

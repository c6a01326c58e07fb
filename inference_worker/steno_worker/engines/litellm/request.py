"""A job in the words of `litellm.acompletion`, and what of it an upstream can't take. Pure: litellm is not imported here.

Sampling fields at their defaults are not sent: many models refuse fields that they don't know, whatever their value. A field
that an upstream does not support is left out and named, as LiteLLM's `drop_params` does, so that the record shows the law in
effect. What changes the meaning of the answer (tools, a response format) is never left out: it is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from steno.contracts.chat import Job, Message, Sampling, has_images
from steno.contracts.errors import BadRequest

BEYOND_OPENAI: dict[str, frozenset[str]] = {
    "top_k": frozenset(
        {"hosted_vllm", "anthropic", "bedrock", "gemini", "vertex_ai", "ollama", "together_ai", "openrouter"}
    ),
    "min_p": frozenset({"hosted_vllm", "together_ai", "openrouter"}),
    "repetition_penalty": frozenset({"hosted_vllm", "together_ai", "openrouter"}),
    "min_tokens": frozenset({"hosted_vllm"}),
    "stop_token_ids": frozenset({"hosted_vllm"}),
    "ignore_eos": frozenset({"hosted_vllm"}),
    "chat_template_kwargs": frozenset({"hosted_vllm"}),
}
"""Fields outside OpenAI's API -> providers that take them by this name. LiteLLM passes such fields on to every provider, and most
answer 400."""
SHOWN_IN_RESULTS = frozenset({"anthropic"})
"""Providers whose tool results may hold images, by way of LiteLLM. OpenAI refuses them there, others lose them on the way."""
MOVED = "The image is in the message after the results."
_PLAIN = Sampling()
_LAW = tuple(field for field in Sampling.__struct_fields__)


@dataclass(frozen=True, slots=True)
class LiteLLMRequest:
    """arguments: for `acompletion`, without the model. law: the sampling law in effect. dropped: fields left out, by name."""

    arguments: dict[str, Any]
    law: Sampling
    dropped: list[str]


def litellm_request(
    job: Job, provider: str, supported: Collection[str], *, signs_thinking: bool = False
) -> LiteLLMRequest:
    """What to send for a job.

    Args: supported: names of OpenAI's fields that the model takes, as `litellm.get_supported_openai_params` tells.
        signs_thinking: where it is asked to think, the model takes its last reply back, if that called tools, only with its
        signed thinking. The record keeps no signatures, so it is not asked to think on such a turn.
    Raises: BadRequest: tools or a response format that the model has no place for; a prompt in token ids.
    """
    if job.prompt_ids is not None:
        raise BadRequest("prompt: this model's upstream takes text only, no token ids", field="prompt")
    arguments: dict[str, Any] = {}
    dropped: list[str] = []
    if signs_thinking and _goes_on_from_calls(job.messages):
        supported = frozenset(supported) - {"reasoning_effort"}
    for name, value in (_sampling(job.sampling) | _wishes(job)).items():
        takes = provider in BEYOND_OPENAI[name] if name in BEYOND_OPENAI else name in supported
        if takes:
            arguments[name] = value
        else:
            dropped.append(name)
    for name, value in _substance(job).items():
        if name not in supported:
            raise BadRequest(f"{name} is not supported by this model's upstream", field=name)
        arguments[name] = value
    if job.prompt_text is not None:
        arguments["prompt"] = job.prompt_text
    else:
        messages = job.messages if provider in SHOWN_IN_RESULTS else images_after_results(job.messages)
        arguments["messages"] = [_message(message) for message in messages]
    back = {name: getattr(_PLAIN, name) for name in dropped if name in _LAW}
    law = msgspec.structs.replace(job.sampling, **back) if back else job.sampling
    return LiteLLMRequest(arguments, law, dropped)


def _sampling(law: Sampling) -> dict[str, Any]:
    """Fields of the law that differ from their defaults, in OpenAI's words (which are ours)."""
    fields = {name: getattr(law, name) for name in _LAW if getattr(law, name) != getattr(_PLAIN, name)}
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in law.logit_bias.items()}
    return fields


def _wishes(job: Job) -> dict[str, Any]:
    """What an answer can do without."""
    fields: dict[str, Any] = {}
    kwargs = dict(job.template_kwargs)
    effort = kwargs.pop("reasoning_effort", None)
    if effort is not None:
        fields["reasoning_effort"] = effort
    if kwargs:
        fields["chat_template_kwargs"] = kwargs
    if job.tools and not job.parallel_tool_calls:
        fields["parallel_tool_calls"] = False
    if job.top_logprobs is not None:
        fields["logprobs"] = True
        if job.top_logprobs:
            fields["top_logprobs"] = job.top_logprobs
    return fields


def _substance(job: Job) -> dict[str, Any]:
    """What an answer without would be another answer."""
    fields: dict[str, Any] = {}
    if job.tools:
        fields["tools"] = job.tools
        if job.tool_choice.startswith("function:"):
            name = job.tool_choice.removeprefix("function:")
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif job.tool_choice != "auto":
            fields["tool_choice"] = job.tool_choice
    wanted = job.response_format
    if wanted.type == "json_schema":
        schema = {"name": wanted.name or "answer", "schema": wanted.schema or {}, "strict": wanted.strict}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted.type != "text":
        fields["response_format"] = {"type": wanted.type}
    return fields


def images_after_results(messages: Sequence[Message]) -> Sequence[Message]:
    """Images of tool results in a user message of their own after the last result of their turn, each result saying so.

    The same object where there are none.
    """
    if not any(message["role"] == "tool" and has_images([message]) for message in messages):
        return messages
    moved: list[Message] = []
    waiting: list[Message] = []
    for message in messages:
        if message["role"] != "tool" and waiting:
            moved.append({"role": "user", "content": waiting})
            waiting = []
        if message["role"] == "tool" and has_images([message]):
            waiting += [part for part in message["content"] if part["type"] == "image_url"]
            texts = [part for part in message["content"] if part["type"] != "image_url"]
            message = {**message, "content": [*texts, {"type": "text", "text": MOVED}]}
        moved.append(message)
    if waiting:
        moved.append({"role": "user", "content": waiting})
    return moved


def _goes_on_from_calls(messages: Sequence[Message]) -> bool:
    """Whether the last reply called tools."""
    replies = [message for message in messages if message["role"] == "assistant"]
    return bool(replies and replies[-1].get("tool_calls"))


def _message(message: Message) -> Message:
    """As OpenAI has it: no content beside calls is null (several APIs refuse an empty text)."""
    if message["role"] == "assistant" and message.get("tool_calls") and not message["content"]:
        return {**message, "content": None}
    return message

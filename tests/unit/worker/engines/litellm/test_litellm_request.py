"""A job in LiteLLM's words: what is sent, what is left out and named, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.chat import Job, ResponseFormat, Sampling
from steno.contracts.errors import BadRequest
from steno.contracts.records import ids_to_bytes
from steno_worker.engines.litellm.request import MOVED, litellm_request

ALL = frozenset(
    "temperature top_p presence_penalty frequency_penalty seed stop max_tokens logit_bias logprobs top_logprobs tools "
    "tool_choice parallel_tool_calls response_format reasoning_effort".split()
)
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def test_what_is_at_its_default_is_not_sent() -> None:
    assert litellm_request(Job(messages=HI, tools=TOOLS), "openai", ALL).arguments == {"messages": HI, "tools": TOOLS}


def test_everything_that_a_model_takes_is_sent() -> None:
    law = Sampling(temperature=0.0, top_p=0.5, seed=0, stop=["x"], max_tokens=9, logit_bias={7: -1.0}, top_k=4)
    schema = ResponseFormat("json_schema", "n", {"type": "object"}, True)
    job = Job(
        messages=HI, tools=TOOLS, tool_choice="function:look", parallel_tool_calls=False, sampling=law, top_logprobs=2,
        response_format=schema, template_kwargs={"reasoning_effort": "low", "enable_thinking": False},
    )  # fmt: skip
    asked = litellm_request(job, "hosted_vllm", ALL)
    assert asked.dropped == [] and asked.law == law
    assert asked.arguments == {
        "messages": HI, "temperature": 0.0, "top_p": 0.5, "seed": 0, "stop": ["x"], "max_tokens": 9,
        "logit_bias": {"7": -1.0}, "top_k": 4, "tools": TOOLS, "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2,
        "tool_choice": {"type": "function", "function": {"name": "look"}}, "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
    }  # fmt: skip


def test_what_a_model_does_not_take_is_left_out_named_and_gone_from_the_law() -> None:
    law = Sampling(temperature=0.3, top_k=5, seed=1, max_tokens=9)
    job = Job(messages=HI, sampling=law, top_logprobs=0, template_kwargs={"enable_thinking": True})
    asked = litellm_request(job, "openai", frozenset({"temperature", "max_tokens"}))
    assert asked.arguments == {"messages": HI, "temperature": 0.3, "max_tokens": 9}
    assert sorted(asked.dropped) == ["chat_template_kwargs", "logprobs", "seed", "top_k"]
    assert asked.law == Sampling(temperature=0.3, max_tokens=9)


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (Job(messages=HI, tools=TOOLS), "tools"),
        (Job(messages=HI, response_format=ResponseFormat("json_object")), "response_format"),
        (Job(prompt_ids=ids_to_bytes([1, 2])), "prompt"),
    ],
)
def test_what_would_make_another_answer_is_refused_by_name(job: Job, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        litellm_request(job, "openai", frozenset({"temperature"}))
    assert refused.value.field == field


CALLED: list[dict[str, Any]] = [
    *HI,
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "red"},
]


@pytest.mark.parametrize(
    ("messages", "signs", "sent"),
    [
        (HI, True, True),
        (CALLED, True, False),
        ([*CALLED, {"role": "user", "content": "and?"}], True, False),
        ([*CALLED, {"role": "assistant", "content": "red"}, *HI], True, True),
        (CALLED, False, True),
    ],
)
def test_a_model_that_signs_its_thinking_is_not_asked_to_think_on_from_calls(
    messages: list[dict[str, Any]], signs: bool, sent: bool
) -> None:
    job = Job(messages=messages, tools=TOOLS, template_kwargs={"reasoning_effort": "low"})
    asked = litellm_request(job, "anthropic", ALL, signs_thinking=signs)
    assert ("reasoning_effort" in asked.arguments) == sent
    assert asked.dropped == ([] if sent else ["reasoning_effort"])


def test_a_plain_prompt_is_sent_as_one() -> None:
    assert litellm_request(Job(prompt_text="once"), "openai", ALL).arguments == {"prompt": "once"}


def test_content_beside_calls_is_null_where_there_is_none() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    job = Job(messages=[*HI, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert litellm_request(job, "openai", ALL).arguments["messages"][1] == {
        "role": "assistant", "content": None, "tool_calls": [call],
    }  # fmt: skip
    assert job.messages[1]["content"] == ""


def picture(url: str = "data:image/png;base64,Q0FU") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def said(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def test_images_of_users_are_sent_as_they_are() -> None:
    messages = [{"role": "user", "content": [*said("look"), picture()]}]
    assert litellm_request(Job(messages=messages), "openai", ALL).arguments["messages"] == messages


def test_images_of_results_stand_after_the_last_result_where_a_provider_takes_none_there() -> None:
    one, two = picture(), picture("https://example.com/dog.png")
    results = [
        {"role": "tool", "tool_call_id": "a", "content": [*said("red"), one]},
        {"role": "tool", "tool_call_id": "b", "content": "blue"},
        {"role": "tool", "tool_call_id": "c", "content": [two]},
    ]
    messages = [*HI, *results, {"role": "user", "content": "well?"}, {**results[2]}]
    assert litellm_request(Job(messages=messages), "openai", ALL).arguments["messages"] == [
        *HI,
        {"role": "tool", "tool_call_id": "a", "content": said("red", MOVED)},
        results[1],
        {"role": "tool", "tool_call_id": "c", "content": said(MOVED)},
        {"role": "user", "content": [one, two]},
        {"role": "user", "content": "well?"},
        {"role": "tool", "tool_call_id": "c", "content": said(MOVED)},
        {"role": "user", "content": [two]},
    ]
    assert litellm_request(Job(messages=messages), "anthropic", ALL).arguments["messages"] == messages

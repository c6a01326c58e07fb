"""An OpenAI-compatible upstream through LiteLLM: whole conversations out, text in, the record text only."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from tests.integration.upstream.conftest import KEY, TOOLS, ask, sdk, text_of
from tests.support.programs.stack import Stack


def until_turns(stack: Stack, trial_id: str, count: int) -> list[dict]:
    deadline = time.monotonic() + 60
    while len(turns := stack.turns(trial_id)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return turns


def test_the_answer_its_usage_and_its_record(front: Stack) -> None:
    answer = sdk(front, "plain").chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.content == "you said hello" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens > 0
    (turn,) = front.turns("plain")
    assert turn["reply"] == {"role": "assistant", "content": "you said hello"} and not turn["partial"]
    assert turn["new_prompt_ids"] == turn["completion_ids"] == turn["sampling_logprobs"] == turn["versions"] == []
    assert turn["upstream_tokens"] == turn["delivered"] == answer.usage.completion_tokens
    assert turn["prompt_tokens"] == answer.usage.prompt_tokens and turn["served_model"] == "openai/up"
    session = front.get("/sessions/plain")
    assert session["marks"] == ["text_only"] and session["counts"]["completion_tokens"] == turn["upstream_tokens"]


def test_a_text_only_session_has_no_samples_and_says_why(front: Stack) -> None:
    ask(front, "unsampled", "hello")
    answer = httpx.get(f"{front.url}/sessions/unsampled/samples", timeout=60)
    assert answer.status_code == 409 and "text_only" in answer.json()["error"]["message"]


def test_the_first_words_are_shown_while_the_upstream_still_speaks(front: Stack, behind: Stack) -> None:
    before = len(behind.turns("behind"))
    seen = 0
    with sdk(front, "first").chat.completions.create(
        model="any", messages=[{"role": "user", "content": "for ever"}], stream=True
    ) as chunks:
        for chunk in chunks:
            seen += bool(chunk.choices and chunk.choices[0].delta.content)
            if seen > 5:
                break
        assert seen > 5
        assert len(behind.turns("behind")) == before  # on record there when it has ended
    until_turns(behind, "behind", before + 1)


def test_a_stream_is_whole_and_its_usage_is_the_records(front: Stack) -> None:
    chunks = list(
        sdk(front, "stream").chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "slowly"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert text_of(chunks) == "a long story that is told slowly, word by word"
    assert chunks[-1].usage.completion_tokens == front.turns("stream")[0]["upstream_tokens"]


def test_reasoning_has_its_own_field(front: Stack) -> None:
    message = ask(front, "thinks", "think").json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm", "thought")
    assert front.turns("thinks")[0]["reply"]["reasoning_content"] == "hmm"


def test_a_conversation_with_tools_goes_on_and_each_message_is_on_record_once(front: Stack, behind: Stack) -> None:
    client = sdk(front, "tools")
    messages: list = [{"role": "user", "content": "look"}]
    first = client.chat.completions.create(model="any", messages=messages, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls is not None
    assert [json.loads(call.function.arguments) for call in first.message.tool_calls] == [
        {"at": "this"},
        {"at": "that"},
    ]
    messages.append(first.message.model_dump(exclude_none=True))
    for call, result in zip(first.message.tool_calls, ("red", "blue"), strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    second = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, stream=True)
    assert text_of(second) == "seen: red, blue"
    one, two = front.turns("tools")
    assert two["parent_id"] == one["turn_id"] and two["fork_reason"] is None
    assert [message["role"] for message in two["messages"]] == ["tool", "tool"]
    # The upstream got its own ids back: it recognised its turn by them.
    upstream = behind.turns("behind")[-2:]
    assert upstream[1]["parent_id"] == upstream[0]["turn_id"]
    assert list(one["call_ids"].values()) == [f"call_{upstream[0]['turn_id']}_{index}" for index in range(2)]


def test_each_of_n_choices_is_asked_for(front: Stack) -> None:
    answer = ask(front, "several", "hello", n=3).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["you said hello"] * 3
    assert len(front.turns("several")) == 3


def test_fields_are_passed_on_and_those_that_can_not_be_are_on_record(front: Stack) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    fields = {"temperature": 0.25, "seed": 7, "max_tokens": 900, "top_k": 3, "response_format": schema}
    answer = ask(front, "fields", "what did you get", **fields).json()["choices"][0]["message"]["content"]
    got = json.loads(answer)
    assert (got["temperature"], got["seed"], got["max_tokens"]) == (0.25, 7, 900)
    assert got["response_format"]["json_schema"]["schema"] == {"type": "object"}
    (turn,) = front.turns("fields")
    assert turn["options"]["dropped"] == ["top_k"] and turn["asked"]["top_k"] == 3
    assert "top_k" not in turn["law"] and turn["law"]["temperature"] == 0.25


def test_a_plain_prompt_is_completed_and_one_in_token_ids_is_refused(front: Stack) -> None:
    url = front.base_url("prompts") + "/completions"
    answer = httpx.post(url, json={"model": "any", "prompt": "once"}, timeout=60).json()
    assert answer["choices"][0]["text"] == "once upon a time"
    refused = httpx.post(url, json={"model": "any", "prompt": [1, 2, 3]}, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("said", "status", "code", "words"),
    [
        ("429", 429, "rate_limited", "come back later"),
        ("503", 503, "engine_failed", "out of order"),
        ("401", 503, "engine_failed", "who is ***?"),  # no worker says 401, so the upstream's proxy said 503
        ("too long", 400, "context_length_exceeded", "5000"),
    ],
)
def test_the_upstreams_failures_are_ours_before_the_first_byte(
    front: Stack, said: str, status: int, code: str, words: str
) -> None:
    answer = ask(front, f"fails-{said.replace(' ', '-')}", said, stream=True)
    assert answer.status_code == status and answer.json()["error"]["code"] == code
    assert words in answer.text and KEY not in answer.text
    assert ("retry-after" in answer.headers) == (status != 400)


def test_an_upstream_that_breaks_off_breaks_the_stream_and_leaves_a_partial_turn(front: Stack) -> None:
    body = {"model": "any", "stream": True, "messages": [{"role": "user", "content": "break off"}]}
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", front.base_url("breaks") + "/chat/completions", json=body, timeout=60) as answer,
    ):
        for _ in answer.iter_lines():
            pass
    (turn,) = until_turns(front, "breaks", 1)
    assert turn["partial"] and turn["finish_reason"] == "error" and turn["reply"]["content"].startswith("one")
    assert turn["upstream_tokens"] is None and turn["delivered"] is None


def test_an_agent_that_leaves_ends_the_upstreams_work(front: Stack, behind: Stack) -> None:
    before = len(behind.turns("behind"))
    body = {"model": "any", "stream": True, "messages": [{"role": "user", "content": "for ever"}]}
    with httpx.stream("POST", front.base_url("leaves") + "/chat/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    (turn,) = until_turns(front, "leaves", 1)
    assert turn["finish_reason"] == "cancelled" and turn["partial"]
    upstream = until_turns(behind, "behind", before + 1)[-1]
    assert upstream["finish_reason"] == "cancelled" and len(upstream["completion_ids"]) < 500

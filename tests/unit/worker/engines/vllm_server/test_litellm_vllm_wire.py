"""What is sent to a vLLM server, and what its events become: as data, without a server (I1)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steno.contracts.chat import Job, ResponseFormat, Sampling, ToolCallPiece
from steno.contracts.errors import BadRequest, EngineFailed
from steno.contracts.records import bytes_to_floats, bytes_to_ids, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish
from steno_worker.engines.vllm_server.wire import FIELDS, MISSING, AnswerReader, body_of, constrains

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {"name": "look", "strict": True}}
CHAT = Job(messages=HI)
PROMPT = [1, 2, 3]


def event(
    ids: list[int], finish: str | None = None, stop: Any = None, logprob: float | None = -0.5, **delta: Any
) -> dict:
    content = [{"token": "x", "bytes": [120], **({} if logprob is None else {"logprob": logprob})} for _ in ids]
    choice = {
        "delta": delta,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": finish,
        "stop_reason": stop,
    }
    return {"choices": [choice]}


def first(ids: list[int] | None = PROMPT) -> dict:
    return {
        "prompt_token_ids": ids,
        "choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
    }


def read(*events: dict, job: Job = CHAT, constrained: bool = False) -> tuple[list[Delta], Finish]:
    reader = AnswerReader(5, PROMPT, "base/0", is_chat=bool(job.messages), constrained=constrained, job=job)
    deltas = [reader.read(one) for one in events]
    return [delta for delta in [*deltas, reader.rest()] if delta is not None], reader.finish()


def test_ids_log_probabilities_and_what_the_servers_parsers_made_of_them() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": "{}"}}
    deltas, finish = read(
        first(),
        event([7], reasoning="hm"),
        event([8, 9], content="so"),
        event([10], tool_calls=[call]),
        event([11], "tool_calls", 11),
        {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}},
    )
    assert [bytes_to_ids(delta.ids).tolist() for delta in deltas] == [[7], [8, 9], [10], [11]]
    assert [bytes_to_floats(delta.logprobs).tolist() for delta in deltas] == [[-0.5], [-0.5, -0.5], [-0.5], [-0.5]]
    assert [(delta.reasoning, delta.content) for delta in deltas] == [("hm", ""), ("", "so"), ("", ""), ("", "")]
    assert deltas[2].tool_calls == [ToolCallPiece(0, "{}", "c", "look")]
    assert all(delta.version == "base/0" and not delta.constrained and not delta.tokens for delta in deltas)
    assert finish == Finish(5, "tool_calls", 5, cached_tokens=2)


def test_a_stop_string_is_told_and_a_stop_id_is_not_one() -> None:
    assert read(first(), event([7], "stop", "END"))[1].stop == "END"
    assert read(first(), event([7], "stop", 7))[1].stop == ""


def test_thinking_that_the_server_took_for_content_is_parted_again() -> None:
    pieces = ["<th", "ink>\nhm", "\n</think>\n\nso", "\n"]
    deltas, _ = read(first(), *[event([i], content=piece) for i, piece in enumerate(pieces)], event([9], "stop"))
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert "".join(delta.content for delta in deltas) == "so\n"
    assert sum(len(delta.ids) for delta in deltas) == 4 * 5


def test_text_that_is_held_back_comes_at_the_end() -> None:
    deltas, _ = read(first(), event([7], "length", content="<thi"))
    assert deltas[-1] == Delta(5, b"", b"", "base/0", "<thi")


@pytest.mark.parametrize("text", ["\n\n", "\n<", "<thi"])
def test_text_that_is_held_back_comes_before_a_call_that_follows_it(text: str) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": "{}"}}
    deltas, _ = read(
        first(),
        event([6], reasoning="hm"),
        event([7], content=text[:1]),
        event([8], content=text[1:], tool_calls=[call]),
        event([9], tool_calls=[more]),
        event([10], "tool_calls"),
    )
    assert [(delta.content, len(delta.tool_calls)) for delta in deltas] == [
        ("", 0), ("", 0), (text, 1), ("", 1), ("", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([first([1, 2])], "used a different prompt"),
        ([first(None)], "gave no prompt ids"),
        ([first(), event([7], logprob=None)], "without log-probabilities"),
        ([first(), event([7], logprob=MISSING)], "without log-probabilities"),
        ([first(), {"choices": [{"delta": {}, "token_ids": [7], "logprobs": None}]}], "without log-probabilities"),
        ([first(), event([7], "abort")], "ended this request with 'abort'"),
        ([first(), event([7])], "without a finish reason"),
        ([first(), event([7], tool_calls=[{"index": "0", "function": {"name": "look"}}])], "unexpected tool call"),
        (
            [first(), event([7], tool_calls=[{"index": 0, "function": {"name": "look", "arguments": {}}, "id": 5}])],
            "unexpected tool call",
        ),
        ([first(), event([7], content=["so"])], "gave list, expected text"),
    ],
)
def test_what_does_not_add_up_is_an_error_and_nothing_is_padded(events: list[dict], words: str) -> None:
    with pytest.raises(EngineFailed, match=words):
        read(*events)


def test_tokens_under_a_bent_law_are_marked() -> None:
    deltas, _ = read(first(), event([7], content="a"), event([8], "stop"), constrained=True)
    assert [delta.constrained for delta in deltas] == [True, True]


def test_a_token_without_text_is_shown_with_its_log_probability() -> None:
    """Half of a character, say: without it the list of tokens would be another one than was sampled."""
    part = event([7], content="")
    part["choices"][0]["logprobs"]["content"][0] |= {"token": "", "bytes": []}
    deltas, _ = read(first(), part, event([8], "stop", content="é"), job=Job(messages=HI, top_logprobs=0))
    assert [[(token.text, token.logprob) for token in delta.tokens] for delta in deltas] == [
        [("", -0.5)],
        [("x", -0.5)],
    ]


def test_plain_completions_have_parallel_lists() -> None:
    job = Job(prompt_ids=ids_to_bytes(PROMPT), top_logprobs=1)
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.25, -0.5], "top_logprobs": [{"a": -0.25}, {"c": -0.125}]}
    choice = {
        "text": "ab",
        "token_ids": [7, 8],
        "prompt_token_ids": PROMPT,
        "logprobs": logprobs,
        "finish_reason": "length",
    }
    (delta,), finish = read({"choices": [choice]}, job=job)
    assert delta.content == "ab" and [token.logprob for token in delta.tokens] == [-0.25, -0.5]
    assert delta.tokens[1].top == [("c", b"c", -0.125)] and finish == Finish(5, "length", 2)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (CHAT, False),
        (Job(messages=HI, tools=[TOOL]), False),
        (Job(messages=HI, tools=[STRICT]), True),
        (Job(messages=HI, tools=[STRICT], tool_choice="none"), False),
        (Job(messages=HI, tools=[TOOL], tool_choice="required"), True),
        (Job(messages=HI, tools=[TOOL], tool_choice="function:look"), True),
        (Job(messages=HI, tools=[TOOL], parallel_tool_calls=False), True),
        (Job(messages=HI, response_format=ResponseFormat("json_object")), True),
    ],
)
def test_what_asks_for_a_grammar(job: Job, expected: bool) -> None:
    assert constrains(job) is expected


def test_every_sampling_field_is_said_and_the_prompts_ids_stand_for_its_messages() -> None:
    long = [
        *HI,
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        {"role": "user", "content": "and?"},
    ]
    law = Sampling(max_tokens=9, stop=["x"], seed=3, logit_bias={4: 1.0})
    body = body_of(Job(messages=long, template_kwargs={"enable_thinking": False}), "m", PROMPT, law, {12, 11})
    assert body["kv_transfer_params"] == {"prompt_token_ids": PROMPT} and body["messages"] == long[-1:]
    assert body["return_token_ids"] and body["logprobs"] is True and body["top_logprobs"] == 0
    assert body["stop_token_ids"] == [11, 12] and body["logit_bias"] == {"4": 1.0} and body["max_tokens"] == 9
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and "tools" not in body
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"} <= body.keys()


@pytest.mark.parametrize("job", [CHAT, Job(prompt_ids=ids_to_bytes(PROMPT))], ids=["chat", "plain"])
def test_no_completion_is_watermarked(job: Job) -> None:
    """A watermark draws by a key; the log-probabilities that come with it are of the distribution without (I1)."""
    assert body_of(job, "m", PROMPT, Sampling(max_tokens=5), [])["watermarking"] is False


def test_a_conversation_with_calls_is_sent_whole_since_parsers_number_calls_through_it() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    long = [*HI, {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "seen"}]  # fmt: skip
    job = Job(messages=long, tools=[TOOL], tool_choice="function:look")
    body = body_of(job, "m", PROMPT, Sampling(max_tokens=9, ignore_eos=True), {11})
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool"]
    assert body["messages"][1]["reasoning"] == "hm" and "reasoning_content" not in body["messages"][1]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}} and body["stop_token_ids"] == []


def test_what_ends_under_a_grammar_is_the_requests_own_and_not_sent_again() -> None:
    """vLLM ends a request whose tokens its grammar refuses with "error". As a 503 its agent would ask again, for nothing."""
    for grammar, kind in ((True, BadRequest), (False, EngineFailed)):
        reader = AnswerReader(5, PROMPT, "base/0", is_chat=True, constrained=True, job=CHAT, grammar=grammar)
        with pytest.raises(kind) as ended:
            for one in (first(), event([7], "error")):
                reader.read(one)
        assert ended.value.retryable is not grammar and "error" in ended.value.message


def test_fields_that_not_every_server_needs_are_sent_only_where_they_are_asked_for() -> None:
    plain = body_of(CHAT, "m", PROMPT, Sampling(max_tokens=5), [])
    assert not {*FIELDS} & plain.keys()
    law = Sampling(max_tokens=5, allowed_token_ids=[7], bad_words=["no"])
    asked = msgspec.structs.replace(CHAT, shows_stop=True, shows_special=True)
    said = {name: body_of(asked, "m", PROMPT, law, [])[name] for name in FIELDS}
    assert said == {
        "allowed_token_ids": [7], "bad_words": ["no"], "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip

"""vLLM's fields: what is refused by name, what is honoured, and that the table says of the code what is so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from steno.contracts.chat import CanonicalRequest, ResponseFormat, Sampling
from steno.contracts.errors import BadRequest
from steno.contracts.records import SamplingPolicy, ids_to_bytes
from steno_proxy.dialects.base import Choice, Dialect, Header, Piece
from steno_proxy.dialects.openai import chat_request, common, completions
from steno_proxy.dialects.openai.chat import ChatDialect
from steno_proxy.dialects.openai.completions import CompletionsDialect
from steno_proxy.dialects.openai.vllm_fields import CHAT, COMPLETIONS, FIELDS, RESPONSES, Field
from steno_proxy.dialects.responses import dialect as responses
from steno_proxy.dialects.responses.dialect import ResponsesDialect
from steno_proxy.sessions import law

DIALECTS: dict[str, tuple[Dialect, dict[str, Any], type]] = {
    CHAT: (ChatDialect(), {"messages": [{"role": "user", "content": "hi"}]}, chat_request.ChatBody),
    COMPLETIONS: (CompletionsDialect(), {"prompt": "hi"}, completions._CompletionsBody),
    RESPONSES: (ResponsesDialect(), {"input": "hi"}, responses._ResponsesBody),
}
BENT = {
    "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1,
    "logit_bias": {3: 1.0}, "allowed_token_ids": [3], "bad_words": ["no"], "min_tokens": 2, "ignore_eos": True,
}  # fmt: skip
"""A value of each field that bends the law."""
HEADER = Header("0123456789ab", 1700000000, "m")


def parse(on: str, **fields: Any) -> CanonicalRequest:
    dialect, body, _ = DIALECTS[on]
    return dialect.parse(json.dumps(body | fields).encode())


def refused(on: str, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(on, **fields)
    return caught.value


def rows(does: str) -> list[Any]:
    return [pytest.param(row, on, id=f"{on}-{row.name}") for row in FIELDS if row.does == does for on in row.on]


@pytest.mark.parametrize(("row", "on"), rows("refused"))
def test_what_cannot_be_honoured_is_refused_by_name_and_its_default_is_not(row: Field, on: str) -> None:
    other = next(value for value in (7, True) if value not in row.harmless)
    assert refused(on, **{row.name: other}).field == row.name
    for value in (None, *row.harmless):
        parse(on, **{row.name: value})


@pytest.mark.parametrize(("row", "on"), rows("ignored"))
def test_what_is_ignored_has_no_part_in_what_is_asked_for(row: Field, on: str) -> None:
    given = parse(on, **{row.name: "auto" if row.name == "truncation" else None})
    assert given.job == parse(on).job
    job = parse(on, **{row.name: "any"} if row.name not in DIALECTS[on][2].__struct_fields__ else {}).job
    assert job == parse(on).job


@pytest.mark.parametrize(("row", "on"), rows("honoured"))
def test_what_is_honoured_is_read(row: Field, on: str) -> None:
    assert row.name in DIALECTS[on][2].__struct_fields__


def test_the_table_says_of_the_law_what_the_code_does() -> None:
    bending = {row.name: row for row in FIELDS if row.law == "neutralised"}
    assert bending.keys() == BENT.keys()
    for name, value in BENT.items():
        bent = Sampling(**{name: value})
        assert not bent.is_plain() and bent.remembers_output() is not bending[name].resumable
        job = chat_request.Job(sampling=bent)
        assert law.apply(SamplingPolicy(neutralise=True), job)[0].sampling == Sampling()
    for row in FIELDS:
        if row.law == "plain" and row.name in Sampling.__struct_fields__ and row.name != "temperature":
            assert Sampling(**{row.name: 5}).is_plain() and row.resumable, row.name


def test_what_counts_in_the_equality_of_retries_is_among_what_was_asked() -> None:
    told = {row.name for row in FIELDS if row.retry and row.law == "plain" and row.name in common.SAMPLING_FIELDS}
    assert {"include_stop_str_in_output", "skip_special_tokens", "max_tokens"} <= told
    asked = parse(CHAT, allowed_token_ids=[1], bad_words=["x"], include_stop_str_in_output=True).asked
    assert asked == {"allowed_token_ids": [1], "bad_words": ["x"], "include_stop_str_in_output": True}


@pytest.mark.parametrize("on", DIALECTS)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"structured_outputs": {"json": {"type": "object"}}},
            ResponseFormat("json_schema", schema={"type": "object"}),
        ),
        (
            {"structured_outputs": {"json": '{"type": "object"}'}},
            ResponseFormat("json_schema", schema={"type": "object"}),
        ),
        ({"structured_outputs": {"json_object": True}}, ResponseFormat("json_object")),
        ({"structured_outputs": {"regex": "a+", "whitespace_pattern": None}}, ResponseFormat("regex", regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ResponseFormat("choice", choice=["a", "b"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ResponseFormat("grammar", grammar='root ::= "a"')),
        ({"guided_json": {"type": "object"}}, ResponseFormat("json_schema", schema={"type": "object"})),
        ({"guided_regex": "a+"}, ResponseFormat("regex", regex="a+")),
        ({"guided_choice": ["a"]}, ResponseFormat("choice", choice=["a"])),
        ({"guided_grammar": "start: /a/"}, ResponseFormat("grammar", grammar="start: /a/")),
    ],
)
def test_structured_outputs_are_the_replys_format(on: str, given: dict[str, Any], expected: ResponseFormat) -> None:
    assert parse(on, **given).job.response_format == expected


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs.regex",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"include_stop_str_in_output": True, "stop_token_ids": [5]}, "include_stop_str_in_output"),
        ({"skip_special_tokens": False, "ignore_eos": True}, "skip_special_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
    ],
)
def test_half_a_wish_or_two_at_once_are_refused_by_field(given: dict[str, Any], field: str) -> None:
    assert refused(CHAT, **given).field == field


def test_completions_take_a_response_format() -> None:
    assert parse(COMPLETIONS, response_format={"type": "json_object"}).job.response_format == ResponseFormat(
        "json_object"
    )


def test_where_the_prompt_ends_is_a_template_option_so_that_it_is_on_record_and_makes_a_branch() -> None:
    assert parse(CHAT, add_generation_prompt=True, continue_final_message=False).job.template_kwargs == {}
    assert parse(CHAT, add_generation_prompt=False).job.template_kwargs == {"add_generation_prompt": False}
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    asked = parse(CHAT, messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert asked.job.template_kwargs == {"add_generation_prompt": False, "continue_final_message": True}


# -- what the answer holds

IDS, PROMPT = ids_to_bytes([7, 8, 9]), ids_to_bytes([1, 2])
THOUGHT = {"role": "assistant", "content": "so", "reasoning_content": "hm"}


def events(on: str, request: CanonicalRequest, *pieces: Piece, total: int = 3) -> list[dict[str, Any]]:
    dialect = DIALECTS[on][0]
    writer: Any = dialect.writer(request, HEADER)
    if request.returns_ids:
        writer.prompt(PROMPT)
    done = Choice(0, THOUGHT, "stop", 2, total)
    said = [
        writer.begin(0, 2, 0),
        *(writer.piece(0, piece) for piece in pieces),
        writer.finish(done),
        writer.end([done]),
    ]
    lines = b"".join(said).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def pieces() -> list[Piece]:
    """Reasoning, text, and a stop id without a text."""
    return [
        Piece(reasoning="hm", ids=ids_to_bytes([7])),
        Piece(content="so", ids=ids_to_bytes([8])),
        Piece(ids=ids_to_bytes([9])),
    ]


@pytest.mark.parametrize("on", [CHAT, COMPLETIONS])
def test_a_stream_gives_the_prompts_ids_once_in_its_first_event_and_each_token_once(on: str) -> None:
    seen = events(on, parse(on, stream=True, return_token_ids=True), *pieces())
    holders = [event if on == CHAT else event["choices"][0] for event in seen]
    assert [holder.get("prompt_token_ids") for holder in holders] == [[1, 2], *[None] * (len(seen) - 1)]
    assert [token for event in seen for token in event["choices"][0].get("token_ids", [])] == [7, 8, 9]


@pytest.mark.parametrize("on", [CHAT, COMPLETIONS])
def test_an_answer_in_one_piece_gives_them_where_vllm_does_and_only_if_asked(on: str) -> None:
    done = Choice(0, THOUGHT, "stop", 2, 3, ids=IDS, prompt_ids=PROMPT)
    dialect = DIALECTS[on][0]
    body = json.loads(dialect.answer(parse(on, return_token_ids=True), HEADER, [done]))
    holder = body if on == CHAT else body["choices"][0]
    assert (holder["prompt_token_ids"], body["choices"][0]["token_ids"]) == ([1, 2], [7, 8, 9])
    assert b"token_ids" not in dialect.answer(parse(on), HEADER, [done])


def test_one_piece_with_several_things_said_gives_its_ids_once() -> None:
    both = Piece(content="so", reasoning="hm", ids=IDS)
    seen = events(CHAT, parse(CHAT, stream=True, return_token_ids=True), both)
    assert [event["choices"][0].get("token_ids") for event in seen] == [None, [7, 8, 9], [], []]


def test_hidden_reasoning_is_in_no_event_nor_are_the_ids_that_spell_it() -> None:
    asked = parse(CHAT, stream=True, include_reasoning=False, return_token_ids=True, logprobs=True)
    said = json.dumps(events(CHAT, asked, *pieces()))
    assert "hm" not in said and '"token_ids"' not in said and '"so"' in said and '"prompt_token_ids"' in said
    done = Choice(0, THOUGHT, "stop", 2, 3, ids=IDS, prompt_ids=PROMPT)
    body = json.loads(ChatDialect().answer(asked, HEADER, [done]))
    assert "reasoning_content" not in body["choices"][0]["message"] and "token_ids" not in body["choices"][0]
    assert THOUGHT["reasoning_content"] == "hm"  # what is recorded is not touched


@pytest.mark.parametrize("on", [CHAT, COMPLETIONS])
def test_every_event_says_the_usage_so_far_to_who_asked(on: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    seen = events(on, parse(on, stream=True, stream_options=options), *pieces())
    counts = [event["usage"]["completion_tokens"] for event in seen]
    assert counts == sorted(counts) and counts[-1] == 3 and all(event["usage"]["prompt_tokens"] == 2 for event in seen)
    alone = events(on, parse(on, stream=True, stream_options={"continuous_usage_stats": True}), *pieces())
    assert not any("usage" in event for event in alone)  # as vLLM: only beside include_usage

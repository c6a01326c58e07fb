"""Legacy Completions: prompts as text and ids, what is refused, the legacy log-probability shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from steno.contracts.chat import CanonicalRequest, TokenLogprob
from steno.contracts.errors import BadRequest
from steno.contracts.records import ids_to_bytes
from steno_proxy.dialects.base import Choice, Header, Piece
from steno_proxy.dialects.openai.completions import CompletionsDialect

COMPLETIONS = CompletionsDialect()
HEADER = Header("0123456789ab", 1700000000, "m")


def parse(**body: Any) -> CanonicalRequest:
    return COMPLETIONS.parse(json.dumps(body).encode())


@pytest.mark.parametrize("prompt", ["hi", ["hi"]])
def test_a_text_prompt_alone_or_in_a_list(prompt: Any) -> None:
    job = parse(prompt=prompt).job
    assert (job.prompt_text, job.prompt_ids) == ("hi", None)


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_a_prompt_of_ids_alone_or_in_a_list(prompt: Any) -> None:
    job = parse(prompt=prompt).job
    assert (job.prompt_text, job.prompt_ids) == (None, ids_to_bytes([1, 2]))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": [1, True]}, "prompt.1"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [2**31]}, "prompt.0"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 99}, "logprobs"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.field == field


def test_openais_default_limit_holds_here() -> None:
    assert parse(prompt="a").job.sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("asked", "top", "shown"),
    [
        (0, [], {"c": -2.0}),
        (1, [("d", b"d", -0.1)], {"c": -2.0, "d": -0.1}),
        (2, [("d", b"d", -0.1), ("c", b"c", -2.0)], {"c": -2.0, "d": -0.1}),
        (2, [("c", b"\xff", -0.1), ("e", b"e", float("-inf"))], {"c": -2.0, "e": -9999.0}),
    ],
)
def test_the_sampled_token_is_among_the_likeliest_whatever_its_place(asked: int, top: Any, shown: Any) -> None:
    request = parse(prompt="a", logprobs=asked)
    choice = Choice(0, {"role": "assistant", "content": "c"}, "stop", 1, 1, tokens=[TokenLogprob("c", b"c", -2.0, top)])
    body = json.loads(COMPLETIONS.answer(request, HEADER, [choice]))
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [shown]


def test_stream_and_body_carry_text_and_legacy_logprobs() -> None:
    request = parse(prompt="a", logprobs=1, stream=True)
    tokens = [
        TokenLogprob("ab", b"ab", -1.0, [("ab", b"ab", -1.0)]),
        TokenLogprob("c", b"c", -2.0, [("d", b"d", -0.1)]),
    ]
    writer = COMPLETIONS.writer(request, HEADER)
    chunks = [json.loads(writer.piece(0, Piece(content=t.text, tokens=[t]))[6:]) for t in tokens]
    assert [c["choices"][0]["text"] for c in chunks] == ["ab", "c"]
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks] == [[0], [2]]
    choice = Choice(0, {"role": "assistant", "content": "abc"}, "length", 1, 2, tokens=tokens)
    body = json.loads(COMPLETIONS.answer(request, HEADER, [choice]))
    assert body["choices"][0] == {
        "index": 0,
        "text": "abc",
        "finish_reason": "length",
        "logprobs": {
            "tokens": ["ab", "c"],
            "token_logprobs": [-1.0, -2.0],
            "top_logprobs": [{"ab": -1.0}, {"c": -2.0, "d": -0.1}],
            "text_offset": [0, 2],
        },
    }
    assert writer.end([choice]) == b"data: [DONE]\n\n"
    assert json.loads(writer.finish(choice)[6:])["choices"][0]["finish_reason"] == "length"

"""vLLM's two calls about tokens: its requests to the frame that asks a worker, and the worker's answer in its shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from steno.contracts.chat import CONTINUES, OPEN_END
from steno.contracts.errors import BadRequest
from steno.contracts.records import bytes_to_ids, ids_to_bytes
from steno.contracts.wire.frames import Count, Counted, ModelCard
from steno_proxy.dialects.openai.tokenize import Detokenize, Tokenize, TokenizeRequest

CARD = ModelCard("m", 4096)
USER = {"role": "user", "content": "hi"}


def tokenize(**body: Any) -> TokenizeRequest:
    return Tokenize().parse(json.dumps(body).encode())


def refused(question: Tokenize | Detokenize, **body: Any) -> str | None:
    with pytest.raises(BadRequest) as error:
        question.parse(json.dumps(body).encode())
    return error.value.field


def said(question: Tokenize | Detokenize, asked: TokenizeRequest, counted: Counted) -> Any:
    return json.loads(b"".join(question.answer(asked, counted, CARD)))


def test_a_prompt_is_asked_with_the_tokenizers_special_tokens_unless_they_are_refused() -> None:
    asked = tokenize(model="m", prompt="a b", messages=None)
    assert (asked.frame.job.prompt_text, asked.frame.wants, asked.frame.bare, asked.model) == ("a b", "ids", False, "m")
    assert tokenize(prompt="", add_special_tokens=False).frame.bare
    assert tokenize(prompt="x", return_token_strs=True).frame.wants == "strings"


def test_a_conversation_is_read_as_chat_completions_read_it() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    said = {"role": "assistant", "content": "I", "reasoning": "r"}
    asked = tokenize(
        messages=[USER, said], tools=[tool], add_generation_prompt=False, continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False}, add_special_tokens=False, return_token_strs=False,
        chat_template=None, media_io_kwargs=None, mm_processor_kwargs=None,
    )  # fmt: skip
    job = asked.frame.job
    assert job.messages == [USER, {"role": "assistant", "content": "I", "reasoning_content": "r"}]
    assert job.tools == [tool]
    assert job.template_kwargs == {"enable_thinking": False, OPEN_END: False, CONTINUES: True}
    assert (asked.frame.wants, asked.frame.bare, job.prompt_text) == ("ids", False, None)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [USER]}, "prompt"),
        ({"prompt": ["x"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [USER], "continue_final_message": True}, CONTINUES),
        ({"messages": [USER], "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ],
)
def test_what_can_not_be_tokenized_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    assert refused(Tokenize(), **body) == field


def test_ids_are_asked_for_their_text() -> None:
    asked = Detokenize().parse(b'{"tokens": [1, 2, 3], "model": "m"}')
    assert asked.frame.job.prompt_ids is not None and asked.model == "m"
    assert (bytes_to_ids(asked.frame.job.prompt_ids).tolist(), asked.frame.wants) == ([1, 2, 3], "text")
    assert Detokenize().parse(b'{"tokens": []}').frame.job.prompt_ids == b""
    for wrong in (-1, 2**31, 2**63):
        assert refused(Detokenize(), tokens=[1, wrong]) == "tokens.1"
    assert refused(Detokenize(), tokens=["a"]) == "tokens.0"
    assert refused(Detokenize(), prompt="x") == "tokens"


def test_answers_are_vllms() -> None:
    asked = tokenize(prompt="x", return_token_strs=True)
    counted = Counted(1, 2, ids_to_bytes([7, 8]), ["a", "Ġb"])
    whole = {"count": 2, "max_model_len": 4096, "tokens": [7, 8], "token_strs": ["a", "Ġb"]}
    assert said(Tokenize(), asked, counted) == whole
    assert said(Tokenize(), tokenize(prompt="x"), counted) == whole | {"token_strs": None}
    asked = TokenizeRequest(Count(0, asked.frame.job, "text"), "")
    assert said(Detokenize(), asked, Counted(1, 2, text="a b")) == {"prompt": "a b"}


def test_a_long_answer_comes_in_short_pieces() -> None:
    ids = list(range(100_000))
    counted = Counted(1, len(ids), ids_to_bytes(ids), [str(number) for number in ids])
    asked = tokenize(prompt="x", return_token_strs=True)
    assert max(map(len, Tokenize().answer(asked, counted, CARD))) < 2**18
    whole = said(Tokenize(), asked, counted)
    assert (whole["tokens"], whole["token_strs"]) == (ids, counted.strings)

"""vLLM's own request classes against the table of their fields, and what of it the engine is given."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from vllm.sampling_params import StructuredOutputsParams

from steno.contracts.chat import Job, ResponseFormat, Sampling
from steno.contracts.errors import BadRequest, EngineFailed
from steno.contracts.wire.frames import Counted, ModelCard
from steno_proxy.dialects.openai.chat_request import ChatBody
from steno_proxy.dialects.openai.structured import StructuredOutputs
from steno_proxy.dialects.openai.tokenize import IdsBody, TextBody, Tokenize
from steno_proxy.dialects.openai.vllm_fields import ALL, CHAT, COMPLETIONS, FIELDS, RESPONSES
from steno_worker.engines.vllm.engine import VllmTokens
from steno_worker.engines.vllm.steps import steps_of
from tests.integration.vllm.drawing import NOT_THINKING, ask, draw

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]
CLASSES: dict[str, Any] = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}


@pytest.mark.parametrize("on", ALL)
async def test_the_table_says_of_every_field_of_vllm_what_becomes_of_it(on):
    """An upgrade of vLLM brings new fields: each needs a row, or it would be ignored in silence."""
    rows = {row.name: row for row in FIELDS if on in row.on}
    known = CLASSES[on].model_fields
    assert known.keys() - rows.keys() == set()
    for name, field in known.items():
        default = field.get_default(call_default_factory=True)
        if rows[name].does == "refused" and default is not None:
            assert default in rows[name].harmless, name


async def test_no_row_is_of_a_field_that_vllm_does_not_have():
    known = {name for one in CLASSES.values() for name in one.model_fields}
    assert {row.name for row in FIELDS if not row.older} <= known
    assert not {row.name for row in FIELDS if row.older} & known


async def test_every_field_of_vllms_calls_about_tokens_is_read_or_refused():
    """An upgrade of vLLM brings new ones: each changes what a client takes for the prompt."""
    refused = {row.name for row in FIELDS if row.does == "refused" and CHAT in row.on}
    assert TokenizeCompletionRequest.model_fields.keys() <= set(TextBody.__struct_fields__)
    read = set(TextBody.__struct_fields__) | set(ChatBody.__struct_fields__)
    assert TokenizeChatRequest.model_fields.keys() <= read | refused
    assert DetokenizeRequest.model_fields.keys() == set(IdsBody.__struct_fields__)
    asked = Tokenize().parse(b'{"prompt": "x"}')
    told = json.loads(b"".join(Tokenize().answer(asked, Counted(1, 0), ModelCard("m", 100))))
    assert TokenizeResponse.model_validate(told).model_dump() == told
    assert DetokenizeResponse.model_fields.keys() == {"prompt"}


async def test_structured_outputs_have_the_members_that_are_known():
    known = {field.name for field in dataclasses.fields(StructuredOutputsParams) if field.init}
    assert known == set(StructuredOutputs.__struct_fields__)


@pytest.mark.parametrize(
    ("asked", "whole"),
    [
        (ResponseFormat("regex", regex="[a-c]{3}-[0-9]"), "[a-c]{3}-[0-9]"),
        (ResponseFormat("choice", choice=["yes", 'say "no"']), 'yes|say "no"'),
        (ResponseFormat("grammar", grammar='root ::= "<" [ab] ">"'), "<[ab]>"),
    ],
)
async def test_patterns_choices_and_grammars_hold_and_are_marked(tokens: VllmTokens, asked, whole):
    job = Job(response_format=asked, template_kwargs=NOT_THINKING)
    drawn = await draw(tokens, ask(tokens, "nice", job, **NOT_THINKING), Sampling(max_tokens=40), job)
    assert all(step.constrained for step in drawn.steps)
    assert re.fullmatch(whole, tokens.format.decoder().feed(drawn.ids, final=True))


async def test_a_grammar_holds_from_the_first_token_of_a_plain_completion(tokens: VllmTokens):
    """The reasoning parser knows chats: it would wait for an end of thinking that a plain completion never has."""
    job = Job(prompt_text="nice", response_format=ResponseFormat("regex", regex="[a-c]{3}-[0-9]"))
    drawn = await draw(tokens, tokens.format.encode("nice"), Sampling(max_tokens=40), job)
    assert all(step.constrained for step in drawn.steps)
    assert re.fullmatch("[a-c]{3}-[0-9]", tokens.format.decoder().feed(drawn.ids, final=True))


@pytest.mark.parametrize(
    "asked",
    [
        ResponseFormat("regex", regex="["),
        ResponseFormat("grammar", grammar="no grammar"),
        ResponseFormat("regex", regex="a{99999}"),
    ],
)
async def test_what_no_text_can_be_held_to_is_a_bad_request(tokens: VllmTokens, asked):
    job = Job(response_format=asked, template_kwargs=NOT_THINKING)
    with pytest.raises(BadRequest):
        await draw(tokens, ask(tokens, "nice", job, **NOT_THINKING), Sampling(max_tokens=4), job)


async def test_only_allowed_ids_are_sampled(tokens: VllmTokens):
    drawn = await draw(tokens, ask(tokens, "nice", Job()), Sampling(max_tokens=8, allowed_token_ids=[20, 30]), Job())
    assert len(drawn.ids) == 8 and set(drawn.ids) <= {20, 30}


async def test_a_bad_word_is_not_sampled(tokens: VllmTokens):
    [one, *_] = tokens.format.encode("nice")
    law = Sampling(max_tokens=4, allowed_token_ids=[one, 30], logit_bias={one: 100.0})
    said = tokens.format.token_text(one)[0]
    for words, seen in (([], {one}), ([said], {30})):
        drawn = await draw(tokens, ask(tokens, "x", Job()), msgspec.structs.replace(law, bad_words=words), Job())
        assert set(drawn.ids) == seen


async def test_a_final_message_is_continued_without_a_header(tokens: VllmTokens):
    messages = [{"role": "user", "content": "the weather"}, {"role": "assistant", "content": "It is"}]
    ids = tokens.format.render(messages, [], {"add_generation_prompt": False, "continue_final_message": True})
    text = "".join(tokens.format.token_text(token)[0] for token in ids)
    assert text.endswith("It is") and text.count("assistant") == 1
    closed = tokens.format.render(messages, [], {"add_generation_prompt": False})
    assert closed[: len(ids)] == ids and len(closed) > len(ids)


async def test_a_request_that_vllm_ends_under_a_grammar_is_not_one_to_send_again():
    """Its scheduler ends one whose tokens the grammar refuses ("grammar rejected tokens") with the reason "error"."""
    ended: Any = SimpleNamespace(outputs=[SimpleNamespace(finish_reason="error", token_ids=[5], logprobs=None)])
    for grammar, kind in ((True, BadRequest), (False, EngineFailed)):
        with pytest.raises(kind):
            steps_of(ended, None, None, constrained=grammar)  # type: ignore[arg-type]

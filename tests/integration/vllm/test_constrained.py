"""What switches a grammar on, that it then holds, and that its tokens are marked (I1)."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import mistral_common
import pytest
from mistral_common.guidance.grammar_factory import GrammarFactory
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from steno.contracts.chat import Job, ResponseFormat, Sampling
from steno.contracts.errors import BadRequest, ConfigError
from steno.contracts.records import ids_to_bytes
from steno_worker.engines.vllm.args import from_fields
from steno_worker.engines.vllm.engine import VllmTokens
from tests.integration.vllm.drawing import NOT_THINKING, STRICT, TOOLS, ask, draw

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

SCHEMA = ResponseFormat(type="json_schema", name="r", schema=TOOLS[0]["function"]["parameters"], strict=True)


async def reply(tokens: VllmTokens, job: Job, max_tokens: int = 200):
    """The steps, and what the model's parsers make of them."""
    prompt = ask(tokens, "the weather", job, **job.template_kwargs)
    drawn = await draw(tokens, prompt, Sampling(max_tokens=max_tokens), job)
    decoder, parser = tokens.format.decoder(), tokens.format.parser(job, tokens.format.generation_prompt(prompt))
    parsed = [
        parser.feed(decoder.feed(step.ids, final=step.finish is not None), step.ids, final=step.finish is not None)
        for step in drawn.steps
    ]
    assert {step.constrained for step in drawn.steps} == {tokens.constrains(job)}
    calls: dict[int, list[str]] = {}
    for piece in (piece for part in parsed for piece in part.tool_calls):
        call = calls.setdefault(piece.index, ["", ""])
        call[0] += piece.name
        call[1] += piece.arguments
        assert piece.id == ""  # this format has none
    return drawn, "".join(part.content for part in parsed), [tuple(call) for call in calls.values()]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", "function:forecast"])
async def test_a_forced_tool_choice_gives_a_valid_call_and_is_marked(tokens, choice, parallel):
    job = Job(tools=STRICT, tool_choice=choice, template_kwargs=NOT_THINKING, parallel_tool_calls=parallel)
    assert tokens.constrains(job)
    drawn, content, calls = await reply(tokens, job)
    assert calls and content.strip() == ""
    assert parallel or len(calls) == 1
    names = {"forecast"} if choice != "required" else {"forecast", "weather"}
    for name, arguments in calls[: None if drawn.steps[-1].finish == "stop" else -1]:
        assert name in names
        assert set(json.loads(arguments)) == {"celsius"}


async def test_a_json_schema_holds_and_is_marked(tokens):
    job = Job(response_format=SCHEMA, template_kwargs=NOT_THINKING)
    drawn, content, calls = await reply(tokens, job, max_tokens=1500)  # the grammar takes any white space
    assert drawn.steps[-1].finish == "stop" and not calls
    assert isinstance(json.loads(content)["celsius"], bool)


async def test_a_json_object_is_one_and_is_marked(tokens):
    job = Job(response_format=ResponseFormat(type="json_object"), template_kwargs=NOT_THINKING)
    drawn, content, _ = await reply(tokens, job, max_tokens=600)
    assert content.lstrip().startswith("{") and all(step.constrained for step in drawn.steps)


async def test_reasoning_kept_from_earlier_turns_does_not_start_the_grammar(tokens):
    """The whole prompt holds a `</think>`: vLLM by itself would take this turn's reasoning for ended, too."""
    job = Job(response_format=SCHEMA)
    messages = [
        {"role": "user", "content": "the weather"},
        {"role": "assistant", "content": "nice", "reasoning_content": "is it"},
        {"role": "user", "content": "today"},
    ]
    prompt = tokens.format.render(messages, [], {})
    think_end = tokens.format.encode("</think>")
    assert think_end[0] in prompt
    (other,) = tokens.format.encode("<")  # which no grammar of JSON begins with
    bias = {think_end[0]: -100.0, other: 100.0}
    free = await draw(tokens, prompt, Sampling(max_tokens=24, logit_bias=bias), job)
    assert not tokens.format.decoder().feed(free.ids, final=True).startswith("{")


async def test_what_asks_for_no_grammar_gets_none(tokens):
    for job in (Job(), Job(tools=TOOLS), Job(tools=TOOLS, tool_choice="none"), Job(top_logprobs=2)):
        assert not tokens.constrains(job)
        drawn = await draw(tokens, ask(tokens, "nice", job), Sampling(max_tokens=4), job)
        assert not any(step.constrained for step in drawn.steps)


async def test_strict_tools_and_single_calls_switch_a_grammar_on(tokens):
    assert tokens.constrains(Job(tools=STRICT))
    assert tokens.constrains(Job(tools=TOOLS, parallel_tool_calls=False))


async def test_the_parser_of_glm_constrains_only_when_told_to(engine_args):
    by_level = {}
    for level in ("auto", "function"):
        fields = {"model": engine_args.engine.model, "dtype": "float32", "max_model_len": 256}
        args = from_fields({**fields, "tool_call_parser": "glm47", "tool_strict_level": level})
        by_level[level] = VllmTokens(args).constrains(Job(tools=TOOLS))
    assert by_level == {"auto": False, "function": True}


LONG_CODE = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[A-Z]+$", "maxLength": 4}}}


async def test_one_backend_makes_all_grammars_and_says_what_it_can_not_enforce(tokens):
    """By `auto`, vLLM checks a schema like this with another backend than the engine has, and then does not enforce it, or, where
    it came first, makes all later grammars with that one: forced tool calls fail there."""
    for schema in (LONG_CODE, {"type": "array", "items": {"type": "string"}, "uniqueItems": True}):
        job = Job(response_format=ResponseFormat(type="json_schema", schema=schema), template_kwargs=NOT_THINKING)
        with pytest.raises(
            BadRequest, match=r"not supported by xgrammar.*uniqueItems.*a pattern or format beside a length"
        ):
            await tokens.check(ask(tokens, "nice", job, **NOT_THINKING), Sampling(max_tokens=4), job)


@pytest.mark.parametrize(("asked", "backend"), [({}, "xgrammar"), ({"backend": "guidance"}, "guidance")])
async def test_a_backend_that_was_asked_for_is_kept(engine_args, asked, backend):
    fields = {"model": engine_args.engine.model, "dtype": "float32", "max_model_len": 256}
    made = VllmTokens(from_fields({**fields, "structured_outputs_config": asked}))
    assert made._config.structured_outputs_config.backend == backend


@pytest.fixture
def tekken(engine_args, tmp_path):
    """Fields of an engine with mistral-common's own Tekken vocabulary, told to be of a later version: its format from v11 on
    has a grammar for every request."""

    def fields(version: str) -> dict[str, object]:
        data = json.loads((Path(mistral_common.__file__).parent / "data" / "tekken_240911.json").read_text())
        data["config"]["version"] = version
        if version != "v3":
            known = list(Tekkenizer.DEPRECATED_SPECIAL_TOKENS)  # later versions have more, and write them out
            data["special_tokens"] = known + [
                {"rank": len(known) + n, "token_str": token, "is_control": True}
                for n, token in enumerate(("[ARGS]", "[CALL_ID]"))
            ]
        model = tmp_path / "model"
        shutil.copytree(engine_args.engine.model, model, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
        (model / "tekken.json").write_text(json.dumps(data))
        own = {"tokenizer_mode": "mistral", "tool_call_parser": "mistral"}
        return {"model": str(model), "dtype": "float32", "max_model_len": 256, **own}

    return fields


@pytest.mark.parametrize("version", ["v3", "v11", "v13"])
async def test_grammars_for_a_tekken_tokenizer_are_guidance_s(tekken, version):
    made = VllmTokens(from_fields(tekken(version)))
    assert made._config.structured_outputs_config.backend == "guidance"
    assert made.constrains(Job(tools=TOOLS, tool_choice="required"))
    assert made.constrains(Job(tools=TOOLS)) == made.constrains(Job()) == (version != "v3")


async def test_a_mistral_common_that_vllm_can_t_use_is_said_at_the_start(tekken, monkeypatch):
    def changed(self, *, newly_wanted: bool, **options: object) -> str:
        raise NotImplementedError

    monkeypatch.setattr(GrammarFactory, "get_lark_from_jinja", changed)
    with pytest.raises(ConfigError, match=r"newly_wanted.*needs 'mistral-common<1\.13'"):
        VllmTokens(from_fields(tekken("v13")))


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (Job(tools=TOOLS, tool_choice="function:none_such"), "tool_choice"),
        (Job(response_format=ResponseFormat(type="json_schema", schema={"type": "no such type"})), None),
    ],
)
async def test_what_no_grammar_can_be_made_of_is_refused(tokens, job, field):
    prompt, law = ask(tokens, "nice", job, **NOT_THINKING), Sampling(max_tokens=4)
    for refuse in (tokens.check, partial(draw, tokens)):
        with pytest.raises(BadRequest) as caught:
            await refuse(prompt, law, job)
        assert field is None or field in str(caught.value.field) + caught.value.message


async def test_what_vllm_refuses_is_refused_before_the_answer_begins(tokens):
    prompt = ask(tokens, "nice", Job())
    for law in ({"logit_bias": {10**7: 1.0}}, {"allowed_token_ids": [10**7]}, {"temperature": 0.005}):
        with pytest.raises(BadRequest, match=next(iter(law))):
            await tokens.check(prompt, Sampling(max_tokens=4, **law), Job())
    with pytest.raises(BadRequest):  # of ids that a client gave: those of a conversation are made here
        await tokens.check([10**7], Sampling(max_tokens=4), Job(prompt_ids=ids_to_bytes([10**7])))
    await tokens.check(prompt, Sampling(max_tokens=4), Job())

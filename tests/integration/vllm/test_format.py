"""vLLM's renderer and parsers behind our seams, without an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from steno.contracts.chat import Job, Message
from steno.contracts.errors import BadRequest
from steno_worker.chat.interfaces import ParsedText, ToolCallPiece
from steno_worker.engines.vllm.args import from_fields
from steno_worker.engines.vllm.chat_decode import SlowDecoder
from steno_worker.engines.vllm.chat_format import VllmFormat
from steno_worker.engines.vllm.engine import VllmTokens
from tests.integration.vllm.drawing import NOT_THINKING, TOOLS

pytestmark = pytest.mark.vllm

TALK: list[Message] = [
    {"role": "user", "content": "the weather"},
    {"role": "assistant", "content": "nice", "reasoning_content": "is it"},
    {"role": "user", "content": "today"},
]
CALLS = """<tool_call>
{"name": "weather", "arguments": {"celsius": true}}
</tool_call>
<tool_call>
{"name": "forecast", "arguments": {"celsius": false}}
</tool_call>"""


@pytest.fixture(scope="module")
def load(model_dir: Path) -> Callable[..., VllmFormat]:
    def load(**fields: object) -> VllmFormat:
        defaults = {"model": str(model_dir), "dtype": "float32", "max_model_len": 512}
        return VllmTokens(from_fields({**defaults, **fields})).format

    return load


def parse(format: VllmFormat, job: Job, text: str, step: int, prompt: list[int] | None = None) -> ParsedText:
    """What comes of a completion that reaches the parser in steps of so many tokens."""
    prompt = format.render(job.messages or TALK, job.tools, job.template_kwargs) if prompt is None else prompt
    parser, decoder, whole = format.parser(job, format.generation_prompt(prompt)), format.decoder(), ParsedText()
    ids = format.encode(text)
    for at in range(0, len(ids), step):
        final = at + step >= len(ids)
        part = parser.feed(decoder.feed(ids[at : at + step], final=final), ids[at : at + step], final=final)
        whole.content += part.content
        whole.reasoning += part.reasoning
        for piece in part.tool_calls:
            if piece.index == len(whole.tool_calls):
                whole.tool_calls.append(ToolCallPiece(piece.index))
            call = whole.tool_calls[piece.index]
            call.name += piece.name
            call.id += piece.id
            call.arguments += piece.arguments
    return whole


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_two_calls_are_parsed_alike_however_the_tokens_come(load, step):
    parsed = parse(load(tool_call_parser="hermes"), Job(tools=TOOLS), "today\n" + CALLS, step)
    assert parsed.content.strip() == "today" and parsed.reasoning == ""
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [
        ("weather", {"celsius": True}),
        ("forecast", {"celsius": False}),
    ]
    assert {call.id for call in parsed.tool_calls} == {""}, "made-up ids are not the model's"


def test_without_tools_or_parsers_everything_is_content(load):
    assert parse(load(), Job(tools=TOOLS), CALLS, 3).content == CALLS
    assert parse(load(tool_call_parser="hermes"), Job(), "nice", 1).content == "nice"


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_thinking_kept_from_earlier_turns_does_not_end_this_ones(load, name):
    """Parsers that look for `</think>` in a whole prompt find the earlier turn's; ours see the generation prompt."""
    format = load(reasoning_parser=name)
    prompt = format.render(TALK, [], {})
    assert format.encode("</think>")[0] in prompt
    assert format.reasoning_ended(Job(), format.generation_prompt(prompt)) is False
    parsed = parse(format, Job(), "the weather</think>nice", 1, prompt)
    assert (parsed.reasoning, parsed.content) == ("the weather", "nice")


def test_ids_strings_and_text_are_those_of_vllms_own_tokenizer(load):
    format = load()
    own, text = format._tokenizer, "the weather  <|im_end|> \U0001f98a"
    for special in (True, False):
        assert format.encode(text, special=special) == own.encode(text, add_special_tokens=special)
    ids = [*format.render(TALK, [], {}), *format.encode(text)]
    assert format.strings(ids) == own.convert_ids_to_tokens(ids)
    assert format.decode(ids) == own.decode(ids) and "<|im_end|>" in format.decode(ids)
    assert format.decode([]) == ""


def test_the_trap_is_there(load):
    format = load(reasoning_parser="deepseek_r1")
    assert format.reasoning_ended(Job(), format.render(TALK, [], {})) is True


def test_a_template_that_closes_the_thinking_itself_is_seen(load):
    format = load(reasoning_parser="qwen3")
    job = Job(messages=TALK, template_kwargs=NOT_THINKING)
    assert format.reasoning_ended(job, format.generation_prompt(format.render(TALK, [], NOT_THINKING))) is True
    assert parse(format, job, "nice", 1).content == "nice"


def test_default_template_options_are_those_of_the_worker_and_an_agents_win(load):
    format = load(default_chat_template_kwargs=NOT_THINKING)
    text = format.decoder().feed(format.render(TALK, [], {}), final=True)
    assert text.endswith("</think>\n\n")
    assert format.render(TALK, [], {"enable_thinking": True}) != format.render(TALK, [], {})


@pytest.mark.parametrize("key", ["chat_template", "tokenize", "return_dict", "tools"])
def test_an_agent_can_not_reach_the_renderer_through_template_options(load, key):
    with pytest.raises(BadRequest) as caught:
        load().render(TALK, [], {key: "{{ 1 }}"})
    assert caught.value.field == f"chat_template_kwargs.{key}"


def test_rendering_leaves_the_messages_alone(load):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"celsius": true}'}}
    messages = [*TALK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "nice"}]})
    before = json.dumps(messages)
    format = load()
    text = format.decoder().feed(format.render(messages, TOOLS, {}), final=True)
    assert json.dumps(messages) == before
    assert '"arguments": {"celsius": true}' in text and "<think>\nis it\n</think>" in text


def test_what_closes_a_reply_is_a_stop_id_though_the_model_does_not_say_so(load, model_dir, tmp_path):
    """A base model's end of text is not what its chat template closes replies with."""
    folder = tmp_path / "base"
    shutil.copytree(model_dir, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    for name in ("tokenizer_config.json", "config.json"):
        config = json.loads((folder / name).read_text())
        config.update({"eos_token": "<|endoftext|>"} if name.startswith("tok") else {"eos_token_id": 0})
        (folder / name).write_text(json.dumps(config))
    format = load(model=str(folder))
    assert format.stop_ids == {0, *format.encode("<|im_end|>")}


def test_tokens_as_text_and_bytes(load):
    format = load()
    for token_id in format.encode("né <think>"):
        text, raw = format.token_text(token_id)
        assert raw.decode(errors="replace") == text
    assert b"".join(format.token_text(token_id)[1] for token_id in format.encode("né <think>")) == "né <think>".encode()


def test_tokenizers_without_a_table_of_bytes_are_decoded_by_vllm(load):
    format = load()
    ids = format.encode("the né \N{SNOWMAN} <think>weather")
    slow = SlowDecoder(format._tokenizer, format.stop_ids)
    pieces = [slow.feed([token_id]) for token_id in [*ids, *format.encode("<|im_end|>")]]
    assert "".join(pieces) + slow.feed([], final=True) == "the né \N{SNOWMAN} <think>weather"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)

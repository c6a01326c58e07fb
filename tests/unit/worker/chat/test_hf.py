"""A transformers tokenizer as a `ChatFormat`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from steno.contracts.chat import Job, Message
from steno.contracts.errors import BadRequest, ConfigError
from steno_worker.chat.fold import MessageFolding
from steno_worker.chat.hf import HfChatFormat
from tests.unit.worker.chat.families import (
    FAMILIES,
    TOKENIZERS,
    TOOLS,
    byte_level,
    chat_format,
    encoded,
    transformers_tokenizer,
)

HELLO: list[Message] = [{"role": "user", "content": "Hello?"}]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rendering_is_the_tokenizers_own(family: str, kind: str) -> None:
    tokenizer = transformers_tokenizer(family, kind)
    own = tokenizer.apply_chat_template(
        HELLO, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert chat_format(family, kind).render(HELLO, TOOLS, {}) == own


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_strings_and_text_are_the_tokenizers_own(family: str, kind: str) -> None:
    tokenizer, format = transformers_tokenizer(family, kind), chat_format(family, kind)
    text = "Hello?  Привет, \U0001f98a"
    for special in (True, False):
        assert format.encode(text, special=special) == tokenizer.encode(text, add_special_tokens=special)
    ids = [*format.render(HELLO, [], {}), *format.encode(text), min(format.stop_ids)]
    assert format.strings(ids) == tokenizer.convert_ids_to_tokens(ids)
    assert format.decode(ids) == tokenizer.decode(ids)
    assert tokenizer.decode([min(format.stop_ids)]) in format.decode(ids)  # a stop id has its text here
    assert (format.decode([]), format.strings([format.vocab_size]), format.decode([format.vocab_size])) == (
        "",
        [""],
        "",
    )


@pytest.mark.parametrize("key", ["chat_template", "tokenize", "messages", "tools", "return_dict"])
def test_agents_cannot_set_the_renderers_own_words(key: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat_format("chatml").render(HELLO, [], {key: "{{ 1 }}"})
    assert refused.value.field == f"chat_template_kwargs.{key}"


def test_a_template_that_refuses_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="take turns") as refused:
        chat_format("mistral").render([*HELLO, *HELLO], [], {})
    assert refused.value.field == "messages"


def test_parts_are_lines_and_arguments_what_the_template_takes() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    function = {"name": "f", "arguments": '{"a": 1.50, "b": "é"}'}
    call: Message = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "function": function}]}
    for family, written in (("chatml", '{"a": 1.5, "b": "é"}'), ("deepseek", '{"a": 1.50, "b": "é"}')):
        format = chat_format(family)
        text = format.decoder().feed(format.render([{"role": "user", "content": parts}, call], [], {}), final=True)
        assert "one\ntwo" in text and written in text


@pytest.mark.parametrize("family", ["chatml", "deepseek"])
def test_half_a_surrogate_pair_in_arguments_is_rendered_as_a_replacement_character(family: str) -> None:
    """A model can sample it as an escape: no tokenizer takes it as a character."""
    format = chat_format(family)

    def rendered(arguments: str) -> str:
        function = {"name": "f", "arguments": arguments}
        call: Message = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "function": function}]}
        ids = format.render(MessageFolding().apply([*HELLO, call]), [], {})
        return format.decoder().feed(ids, final=True)

    assert "echo \ufffd x" in rendered('{"a": "echo \\ud99c x"}') and "\ufffd" in rendered('{"\\udc00": [1]}')
    assert "\ufffd" not in rendered('{"a": "\\ud83d\\ude80"}'), "a whole pair is a character"
    assert "\\ud99c {" in rendered("\\ud99c {"), "what is no JSON is text"


def test_token_text_and_encode() -> None:
    format = chat_format("llama3")
    stop = min(format.stop_ids)
    assert format.token_text(stop) == ("<|eot_id|>", b"<|eot_id|>")
    half = encoded("llama3", "byte_level", "🚀")[0]
    text, raw = format.token_text(half)
    assert text == "\ufffd" and "🚀".encode().startswith(raw)
    assert format.encode("the user") == encoded("llama3", "byte_level", "the user")


def test_generation_prompt_tells_whether_thinking_is_open() -> None:
    format, job = chat_format("qwen3"), Job(messages=HELLO, tools=TOOLS)
    opened = encoded("qwen3", "byte_level", "<|im_start|>assistant\n<think>\n")
    closed = encoded("qwen3", "byte_level", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert format.parser(job, opened).feed("so", []).reasoning == "so"
    assert format.parser(job, closed).feed("so", []).content == "so"


def model(template: str, **arguments: Any) -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **arguments)


CHATML = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}assistant: "


def test_stop_ids_come_from_config_tokenizer_and_template(tmp_path: Path) -> None:
    tokenizer = model(CHATML, eos_token="<|endoftext|>")
    end, close = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert HfChatFormat(tokenizer).stop_ids == {end, close}
    assert HfChatFormat(model(CHATML, eos_token="<|im_end|>")).stop_ids == {close}
    tokenizer.save_pretrained(tmp_path)
    assert HfChatFormat.load(tmp_path).stop_ids == {end, close}
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [7, {close}]}}')
    loaded = HfChatFormat.load(tmp_path)
    assert loaded.stop_ids == {7, close, end} and loaded.digest == HfChatFormat(tokenizer).digest


def test_a_prompt_is_neither_cut_nor_padded_whatever_the_tokenizers_file_says() -> None:
    plain, told = HfChatFormat(model(CHATML)), model(CHATML)
    told.backend_tokenizer.enable_truncation(4)
    told.backend_tokenizer.enable_padding(length=64)
    format = HfChatFormat(told)
    assert format.render(HELLO, [], {}) == plain.render(HELLO, [], {})
    assert format.encode("one two three four five") == plain.encode("one two three four five")
    assert format.digest == plain.digest


def test_what_cannot_be_a_format_is_refused_at_load() -> None:
    bare = model(CHATML)
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template: take an instruct model, or add chat_template"):
        HfChatFormat(bare)
    with pytest.raises(ConfigError, match="fast tokenizer"):
        HfChatFormat(object())

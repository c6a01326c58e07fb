"""The built-in tool format: what becomes reasoning, content and calls; nothing lost, however the text is cut."""

from __future__ import annotations

import json
import re
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.wire.frames import Delta
from steno_worker.chat.hermes import HermesParser
from tests.unit.worker.chat.test_job import STOP, Told, chat, run, step, tokens

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CALLS = [
    '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>", "b": [1, {"c": "\\"}"}]}}\n</tool_call>',
    '<tool_call>{"arguments": {"x": 1.0}, "name": "g"}</tool_call>',
    '<tool_call>{"name": "h", "arguments": "{\\"y\\": 2}"}</tool_call>',
    '<tool_call>{"name": "i"}</tool_call>',
]
fragments = st.one_of(
    st.sampled_from(MARKERS + CALLS),
    st.sampled_from(
        ["<tool_call>", '{"name": "f", "arguments": {', '"a": ', '"\\', '"', "}", "\n", " ", "<", "</tool", "天"]
    ),
    st.text(max_size=5),
)
documents = st.lists(fragments, max_size=12).map("".join)


class Result:
    """All that a parser gave, put together as a client would."""

    def __init__(self, pieces: list[str], *, tools: bool = True, thinking: bool = False) -> None:
        self.parser = HermesParser(tools=tools, thinking=thinking)
        self.content, self.reasoning = "", ""
        self.calls: list[list[str]] = []
        for index in range(len(pieces) + 1):
            final = index == len(pieces)
            parsed = self.parser.feed("" if final else pieces[index], final=final)
            self.content += parsed.content
            self.reasoning += parsed.reasoning
            for piece in parsed.tool_calls:
                if piece.index == len(self.calls):
                    assert piece.name
                    self.calls.append([piece.name, ""])
                assert piece.index == len(self.calls) - 1
                self.calls[-1][1] += piece.arguments

    def all(self) -> tuple[str, str, list[list[str]], int]:
        return self.content, self.reasoning, self.calls, self.parser.closed_calls


@given(documents, st.lists(st.integers(0, 200)), st.booleans(), st.booleans())
def test_any_cutting_same_result(text: str, cuts: list[int], tools: bool, thinking: bool) -> None:
    places = sorted({0, *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in zip(places, [*places[1:], len(text)], strict=True)]
    whole = Result([text], tools=tools, thinking=thinking).all()
    assert Result(pieces, tools=tools, thinking=thinking).all() == whole
    assert Result(list(text), tools=tools, thinking=thinking).all() == whole


@given(documents)
def test_nothing_but_markers_and_white_space_is_lost(text: str) -> None:
    """Each character of the text is in what came out, but for the markup of calls that were told."""
    result = Result([text])
    given_out = result.content + result.reasoning + "".join(name + arguments for name, arguments in result.calls)
    missing = Counter(re.sub(r"\s", "", text)) - Counter(given_out)
    escapes = Counter("\\" * text.count("\\") if result.calls else "")
    call = '<tool_call>{"name":"","arguments":""}</tool_call>'
    assert not missing - Counter("<think></think>" + call * len(result.calls)) - escapes


@given(st.text().filter(lambda text: "<t" not in text and "</t" not in text))
def test_plain_text_is_content(text: str) -> None:
    assert Result(list(text)).content == text


@given(documents.filter(lambda text: "<think>" not in text and "</think>" not in text))
def test_without_calls_content_is_the_text(text: str) -> None:
    result = Result([text])
    if not result.calls:
        assert result.content == text
    assert Result([text], tools=False).content == text


def test_reasoning_content_and_calls() -> None:
    text = "<think>\nHm.\n\nYes.\n</think>\n\nTwo calls.\n" + "\n".join(CALLS[:2])
    content, reasoning, calls, closed = Result(list(text)).all()
    assert (content, reasoning, closed) == ("Two calls.", "Hm.\n\nYes.", 2)
    assert calls[0] == ["f", '{"a": "</tool_call>", "b": [1, {"c": "\\"}"}]}']
    assert calls[1] == ["g", '{"x": 1.0}']


def test_prompt_may_have_opened_the_reasoning() -> None:
    assert Result(["Hm.\n</think>\n\nYes."], thinking=True).all()[:2] == ("Yes.", "Hm.")
    assert Result(["Hm."], thinking=True).all()[:2] == ("", "Hm.")


@pytest.mark.parametrize(("text", "call"), [(CALLS[2], ["h", '{"y": 2}']), (CALLS[3], ["i", "{}"])])
def test_arguments_as_text_or_absent(text: str, call: list[str]) -> None:
    assert Result([text]).calls == [call]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>get_weather(city='Oslo')</tool_call>",
        'I would\n\n<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call> say.',
        '<tool_call>\n{"name": "f", "argu',
        "<tool_call",
        "<tool_call> {",
    ],
)
def test_malformed_calls_are_content_whole(text: str) -> None:
    assert Result(list(text)).all() == (text, "", [], 0)


def test_a_call_after_a_malformed_one_is_found() -> None:
    content, _, calls, _ = Result(list("<tool_call>oops</tool_call>\n" + CALLS[0])).all()
    assert content == "<tool_call>oops</tool_call>" and calls[0][0] == "f"


def test_arguments_stream_as_they_come() -> None:
    parser, text = HermesParser(), '<tool_call>\n{"name": "f", "arguments": {"text": "one two three"'
    seen = [piece.arguments for char in text for piece in parser.feed(char).tool_calls]
    assert "".join(seen) == '{"text": "one two three"' and max(map(len, seen)) == 1


def test_cut_off_calls_keep_what_was_sampled() -> None:
    assert Result(['<tool_call>\n{"name": "f", "arguments": {"text": "one']).calls == [["f", '{"text": "one']]
    unbalanced = Result(['<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>'])
    assert unbalanced.all() == ("", "", [["f", '{"a": 1}']], 1)
    never_closed = Result(['<tool_call>\n{"name": "f", "arguments": {"a": 1\n</tool_call>'])
    assert never_closed.all() == ("", "", [["f", '{"a": 1\n']], 1)


@pytest.mark.parametrize(
    ("inner", "name", "arguments"),
    [
        ('{"name": "f\\ud83d", "arguments": {"a": 1}}', "f\ufffd", '{"a": 1}'),
        ('{"arguments": {"a": "\\ud83d"}, "name": "\\udc00f"}', "\ufffdf", '{"a": "\\ud83d"}'),
        ('{"name": "f", "arguments": "x\\ud83d 🚀"}', "f", "x\ufffd 🚀"),
        ('{"name": "f", "arguments": "\\ud83d\\ude80"}', "f", "🚀"),
    ],
)
async def test_half_a_surrogate_pair_in_a_call_is_a_replacement_character(
    inner: str, name: str, arguments: str
) -> None:
    """Of the text alone: the ids are recorded as they were sampled."""
    ids = [*tokens(f"<tool_call>{inner}</tool_call>"), STOP]
    out = await run(Told(*(step([token_id]) for token_id in ids[:-1]), step(ids[-1:], "stop")), chat())
    for delta in out.deltas:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=Delta) == delta
    assert ("".join(piece.name for piece in out.pieces), out.arguments) == (name, arguments)
    assert (out.ids, out.finish.reason) == (ids, "tool_calls")


def test_what_follows_the_arguments_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "id": 3}</tool_call>'
    assert Result(list(text)).all() == (', "id": 3}</tool_call>', "", [["f", "{}"]], 0)


@given(
    st.recursive(st.none() | st.booleans() | st.text(), lambda inner: st.dictionaries(st.text(), inner), max_leaves=8)
)
def test_valid_arguments_come_out_as_written(value: object) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert Result(list(text)).all() == ("", "", [["f", arguments]], 1)

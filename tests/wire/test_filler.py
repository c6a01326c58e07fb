"""Of what vendors wrote nothing stays, and of what recognition reads everything does."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.wire.changes import changes
from tests.wire.filler import EXACT_CHARS, MOST_CHARS, fill, without_prose
from tests.wire.fixture import Answer, Exchange, Recording, named, of_agent, read, renamed, write

PROMPT = "You are a careful agent.\nNever guess; look."


@given(st.text(max_size=3000))
def test_filler_depends_on_the_text_alone_and_keeps_its_white_space_and_its_length_class(text: str) -> None:
    filled = fill(text)
    assert filled == fill(text)
    assert (not filled.strip()) == (not text.strip())
    assert filled[: len(filled) - len(filled.lstrip())] == text[: len(text) - len(text.lstrip())]
    assert filled[len(filled.rstrip()) :] == text[len(text.rstrip()) :]
    bare = text.strip()
    assert len(filled.strip()) == len(bare) if len(bare) <= EXACT_CHARS else len(filled.strip()) <= MOST_CHARS


def test_a_billing_header_stays_one() -> None:
    filled = fill("x-anthropic-billing-header: cc_version=2.1; cch=ab12f;\nThe rest of the prompt.")
    header, rest = filled.split("\n", 1)
    assert header.startswith("x-anthropic-billing-header: ") and "cch" not in header
    assert rest == fill("The rest of the prompt.")


def test_prose_goes_and_structure_stays() -> None:
    schema = {"type": "object", "properties": {"args": {"type": "string", "description": "What to say."}}}
    body = {
        "model": "policy",
        "messages": [
            {"role": "system", "content": PROMPT},
            {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "look", "arguments": '{"at": 1}'}}]},
            {"role": "user", "content": [{"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}}]},
        ],
        "tools": [{"name": "look", "description": "Looks.", "input_schema": schema}],
        "metadata": {"session_id": "0f8fad5b-d9cb-469f-a165-70867728950e", "device": "ab" * 32},
    }  # fmt: skip
    bare = without_prose(body, {"I look."})
    text = json.dumps(bare)
    for gone in ("careful", "Go on", "Looks", "What to say", "0f8fad5b", "abab"):
        assert gone not in text
    assert bare["messages"][0] == {"role": "system", "content": fill(PROMPT)}
    assert bare["messages"][1] == body["messages"][1]  # type: ignore[index]
    assert bare["messages"][2]["content"][0]["cache_control"] == {"type": "ephemeral"}
    assert bare["tools"][0]["input_schema"]["properties"]["args"]["type"] == "string"
    assert (bare["model"], bare["tools"][0]["name"]) == ("policy", "look")


def test_of_a_call_that_a_client_rewrote_what_it_wrote_goes_and_how_it_wrote_the_rest_stays() -> None:
    given = {"name": "invalid", "arguments": '{"tool":"look","at":1.0, "error":"There is no such tool."}'}
    [arguments] = [without_prose(given, {"look", "there"})["arguments"]]
    assert arguments == f'{{"tool":"look","at":1.0, "error":"{fill("There is no such tool.")}"}}'
    echoed = {"type": "tool_use", "name": "look", "input": {"where": "there", "why": "A client's word."}}
    assert without_prose(echoed, {"there"})["input"] == {"where": "there", "why": fill("A client's word.")}


def test_ids_of_turns_are_numbers_in_a_fixture_and_ids_again_in_a_replay() -> None:
    text = '{"id": "toolu_0123456789ab_1", "signature": "c3Rlbm86MDEyMzQ1Njc4OWFi", "other": "aaaaaaaaaaaa"}'
    bare = named(text, {"0123456789ab": 7})
    assert json.loads(bare) == {
        "id": "toolu_{{turn 7}}_1", "signature": "{{base64 steno:{{turn 7}}}}", "other": "aaaaaaaaaaaa",
    }  # fmt: skip
    assert without_prose(json.loads(bare), ()) == json.loads(bare)
    assert renamed(bare, {7: "0123456789ab"}.__getitem__) == text


def exchange(**body: object) -> Exchange:
    answer = Answer(None, None, "stop", "Line\u2028separators survive.", "", [("look", "{}")])
    return Exchange("t", "POST", "/{trial}/v1/messages", {"accept": "*/*", "user-agent": ""}, body, 200, [], [], answer)


def test_a_fixture_reads_as_it_was_written(tmp_path: Path) -> None:
    recording = Recording("an-agent", "1.0", [exchange(messages=[{"role": "user", "content": "a"}], tools=[])] * 2)
    write(recording, tmp_path / "one.jsonl")
    back = read(tmp_path / "one.jsonl")
    assert back == recording


def test_what_changed_is_named_by_path() -> None:
    old = Recording("a", "1", [exchange(messages=[{"role": "user", "content": "a"}], stream=True)])
    block = {"type": "new_block", "text": "b"}
    new = Recording("a", "2", [exchange(messages=[{"role": "user", "content": [block]}], tools=[{"name": "look"}])] * 2)
    new.exchanges[0].headers["x-new"] = "1"
    reworded = Recording(
        "a", "3", [exchange(input=[{"role": "user"}, {"type": "additional_tools", "tools": [{"name": "see"}]}])]
    )
    assert any(line.startswith("+ tools: see ") for line in changes(new, reworded))
    assert changes(old, old) == []
    assert changes(old, new) == [
        "+ headers: x-new: 1",
        "+ fields: messages[].user.content[].new_block.text: str",
        "+ fields: messages[].user.content[].new_block.type: str",
        "+ fields: tools[].name: str",
        "- fields: messages[].user.content: str",
        "- fields: stream: bool",
        "- values: stream = True",
        "+ tools: look 310dc6fd",
        "~ t: 1 requests became 2",
    ]


def test_versions_are_in_order_and_agents_whose_names_begin_alike_apart() -> None:
    for path in of_agent("claude-code"):
        assert path.stem.startswith("claude-code-2")
    assert of_agent("claude") == []

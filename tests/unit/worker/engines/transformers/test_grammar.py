"""Grammars: which jobs have one, and that only what they allow can be drawn."""

import json
import random
import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from steno.contracts.chat import Job, ResponseFormat
from steno.contracts.errors import BadRequest
from steno.models import TINY
from steno_worker.engines.transformers.grammar import Grammars, constrains

TOOLS = [
    {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {"deep": {"type": "boolean"}},
                                                                  "required": ["deep"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(TINY, len(tokenizer), frozenset({tokenizer.eos_token_id}))


def follow(grammars: Grammars, tokenizer: Any, job: Job, *, seed: int = 0, limit: int = 400) -> str:
    """A random text of the grammar: any allowed token, the stop id as soon as it is allowed."""
    rng, matcher, ids = random.Random(seed), grammars.matcher(job), []
    while not matcher.done and len(ids) < limit:
        allowed = matcher.allowed(len(tokenizer)).nonzero()[:, 0].tolist()
        token = tokenizer.eos_token_id if tokenizer.eos_token_id in allowed else rng.choice(allowed)
        matcher.accept(token)
        ids.append(token)
    assert ids[-1] == tokenizer.eos_token_id
    return str(tokenizer.decode(ids[:-1]))


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (Job(), False),
        (Job(tools=TOOLS), False),
        (Job(tools=TOOLS, tool_choice="none"), False),
        (Job(tools=TOOLS, tool_choice="required"), True),
        (Job(tools=TOOLS, tool_choice="function:ls"), True),
        (Job(tool_choice="required"), False),
        (Job(response_format=ResponseFormat("json_object")), True),
        (Job(response_format=ResponseFormat("json_schema", schema={})), True),
    ],
)
def test_only_formats_and_forced_calls_have_a_grammar(job: Job, expected: bool) -> None:
    assert constrains(job) is expected


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_is_followed(grammars: Grammars, tokenizer: Any, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    said = json.loads(
        follow(grammars, tokenizer, Job(response_format=ResponseFormat("json_schema", schema=schema)), seed=seed)
    )
    assert said["kind"] in ("a", "b")
    assert 0 <= said["count"] <= 99


@pytest.mark.parametrize("seed", range(5))
def test_a_named_tool_is_called_with_arguments_of_its_schema(grammars: Grammars, tokenizer: Any, seed: int) -> None:
    said = follow(grammars, tokenizer, Job(tools=TOOLS, tool_choice="function:ls"), seed=seed)
    call = json.loads(said.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert call["name"] == "ls"
    assert isinstance(call["arguments"]["deep"], bool)


def test_references_inside_a_tools_schema_are_found(grammars: Grammars, tokenizer: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["here"]}},
    }
    tools = [{"type": "function", "function": {"name": "go", "parameters": parameters}}]
    said = follow(grammars, tokenizer, Job(tools=tools, tool_choice="required"))
    assert json.loads(said.split("\n")[1]) == {"name": "go", "arguments": {"at": "here"}}


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (Job(response_format=ResponseFormat("json_schema", schema={"type": "nonsense"})), "response_format"),
        (Job(response_format=ResponseFormat("json_schema")), "response_format"),
        (Job(tools=TOOLS, tool_choice="function:rm"), "tool_choice"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_field(grammars: Grammars, job: Job, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        grammars.matcher(job)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("asked", "whole"),
    [
        (ResponseFormat("regex", regex=r"[a-c]{3}-\d+(x|yz)"), r"[a-c]{3}-\d+(x|yz)"),
        (ResponseFormat("choice", choice=['say "no"', "yes\n", "\u00fc\U0001f600"]), 'say "no"|yes\n|\u00fc\U0001f600'),
        (ResponseFormat("grammar", grammar='root ::= "<" [ab]+ ">" | "-"'), "<[ab]+>|-"),
        (ResponseFormat("grammar", grammar="start: /[0-9]+/ WORD\nWORD: /[a-z]+/"), "[0-9]+[a-z]+"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_patterns_choices_and_grammars_are_followed(
    grammars: Grammars, tokenizer: Any, asked: ResponseFormat, whole: str, seed: int
) -> None:
    job = Job(response_format=asked)
    assert constrains(job) and re.fullmatch(whole, follow(grammars, tokenizer, job, seed=seed))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ResponseFormat("regex", regex="["), "can't be enforced"),
        (ResponseFormat("regex", regex="a{99999}"), "the sum of its repetitions is above"),
        (ResponseFormat("regex", regex="a" * 70_000), "characters"),
        (ResponseFormat("choice", choice=["a" * 40_000, "b" * 40_000]), "characters"),
        (ResponseFormat("grammar", grammar="no grammar"), "structured_outputs.grammar"),
        (ResponseFormat("grammar", grammar="root ::= " + "(" * 20_000), "structured_outputs.grammar"),
        (ResponseFormat("grammar", grammar="start: nothing"), "can't be enforced"),
        (ResponseFormat("grammar", grammar='start: "a"~1..99999'), "the sum of its repetitions is above"),
        (ResponseFormat("grammar", grammar='start: %json {"maxItems": 100000000}'), "%json"),
    ],
)
def test_what_no_text_can_be_held_to_is_refused_by_field(grammars: Grammars, asked: ResponseFormat, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        grammars.matcher(Job(response_format=asked))
    assert refused.value.field == f"structured_outputs.{asked.type}"

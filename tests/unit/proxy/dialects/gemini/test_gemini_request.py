"""What Gemini's clients send -> the canonical request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.chat import CanonicalRequest, Sampling
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.gemini.contents import sign, signed
from steno_proxy.dialects.gemini.dialect import GeminiCount, GeminiDialect
from steno_proxy.dialects.gemini.schema import json_schema

HI = [{"role": "user", "parts": [{"text": "hi"}]}]
TOOLS = [{"functionDeclarations": [{"name": "f"}, {"name": "g"}, {"name": "h"}]}]


def parse(contents: Any = HI, **body: Any) -> CanonicalRequest:
    return GeminiDialect().parse(json.dumps({"contents": contents, **body}).encode())


def said(*contents: Any) -> list[dict[str, Any]]:
    return parse(list(contents)).job.messages


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def call(name: str, args: Any = None, **more: Any) -> dict[str, Any]:
    beside = {"thoughtSignature": more.pop("signature")} if "signature" in more else {}
    return {"functionCall": {"name": name, "args": args or {}} | more, **beside}


def result(name: str, response: Any, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response} | more}


# -- messages


def test_texts_roles_and_the_system_instruction() -> None:
    request = parse(
        [{"parts": [{"text": "a"}, {"text": "b"}]}, model({"text": "c"})], systemInstruction={"parts": [{"text": "s"}]}
    )
    assert request.job.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
    ]
    assert parse(system_instruction="be brief").job.messages[0] == {"role": "system", "content": "be brief"}
    assert parse({"role": "user", "parts": [{"text": "one"}]}).job.messages == [{"role": "user", "content": "one"}]


def test_an_object_in_place_of_a_list_is_its_only_item() -> None:
    """Google's own samples for curl send such."""
    one = {"role": "user", "parts": {"text": "hi"}}
    request = parse(one, system_instruction={"parts": {"text": "s"}}, tools={"functionDeclarations": {"name": "f"}})
    listed = parse(systemInstruction={"parts": [{"text": "s"}]}, tools=[{"functionDeclarations": [{"name": "f"}]}])
    assert request.job == listed.job


def test_neighbouring_contents_of_the_model_are_one_message_its_texts_joined_as_they_are() -> None:
    chunks = [model({"text": "th", "thought": True}), model({"text": "ought", "thought": True}), model({"text": "a\n"})]
    messages = said(user({"text": "q"}), *chunks, model({"text": " "}), model({"text": "b"}), model({"text": ""}))
    assert messages[1:] == [{"role": "assistant", "content": "a\n b", "reasoning_content": "thought"}]


def test_results_come_right_after_their_calls_whatever_stands_beside_them() -> None:
    messages = said(
        model({"text": "x"}, call("f", {"a": 1}, id="fc_1"), call("g", id="fc_2")),
        user({"text": "note"}, result("g", {"output": "two"}, id="fc_2"), result("f", {"r": [1.0]}, id="fc_1")),
    )
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool", "user"]
    assert [(m["tool_call_id"], m["content"], m["name"]) for m in messages[1:3]] == [
        ("fc_2", "two", "g"),
        ("fc_1", '{"r":[1.0]}', "f"),
    ]
    assert messages[0]["tool_calls"][0] == {
        "id": "fc_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'},
    }  # fmt: skip


def test_without_ids_results_answer_the_calls_of_their_name_in_order() -> None:
    messages = said(
        model(call("f"), call("g"), call("f")),
        user(result("f", {}), result("f", {}), result("g", {}), result("nobody", {})),
        model(call("f")),
        user(result("other", {})),
    )
    first = [each["id"] for each in messages[0]["tool_calls"]]
    assert len(set(first)) == 3
    assert [message.get("tool_call_id") for message in messages[1:5]] == [first[0], first[2], first[1], None]
    assert messages[6]["tool_call_id"] == messages[5]["tool_calls"][0]["id"] not in first


def test_a_signature_of_ours_brings_back_the_id_that_a_client_dropped() -> None:
    ours = "fc_0123456789ab_3"
    urlsafe = sign(ours).replace("+", "-").replace("/", "_")
    for signature in (sign(ours), urlsafe):
        messages = said(model(call("f", signature=signature)), user(result("f", {})))
        assert messages[0]["tool_calls"][0]["id"] == messages[1]["tool_call_id"] == ours
    assert [signed(other) for other in (None, 7, "", "not base64!", sign("else"), sign("fc_\n"), "ÿ", "A" * 999)] == [
        ""
    ] * 8


def test_arguments_that_were_no_object_are_what_they_were() -> None:
    [message] = said(model(call("f", {"__unparsedToolInput": "{broken"})))
    assert message["tool_calls"][0]["function"]["arguments"] == "{broken"


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "plain"}, "plain"),
        ({"result": "plain"}, "plain"),
        ({"error": "broke"}, '{"error":"broke"}'),
        ({"output": {"n": 1}}, '{"output":{"n":1}}'),
        ({"output": "a", "more": 1}, '{"output":"a","more":1}'),
        ({}, "{}"),
    ],
)
def test_what_a_function_returned_is_its_text_or_json(response: Any, text: str) -> None:
    assert said(model(call("f")), user(result("f", response)))[1]["content"] == text


def test_parts_and_tools_of_unknown_types_are_left_out_and_named() -> None:
    request = parse(
        [user({"text": "hi"}, {"executableCode": {"code": "x"}}, {"thoughtSignature": "c2ln"}, {}, {"brand_new": 1})],
        tools=[*TOOLS, {"googleSearch": {}}, {"code_execution": {}}],
    )
    assert request.job.messages == [{"role": "user", "content": "hi"}]
    assert sorted(request.dropped) == ["brand_new", "code_execution", "executableCode", "googleSearch"]


def test_a_request_whose_tools_all_are_googles_is_refused() -> None:
    """Gemini CLI's web search asks in a request of its own: the answer, made up, would be told as what was found."""
    for mode in ("AUTO", "ANY"):
        with pytest.raises(BadRequest) as caught:
            parse(tools=[{"googleSearch": {}}], toolConfig={"functionCallingConfig": {"mode": mode}})
        assert caught.value.field == "tools.0"
        assert caught.value.message == (
            "tools.0: got 'googleSearch': only the provider can run it, and the request has no other tool"
        )
    asked = {"contents": [user({"text": "hi"})], "tools": [{"googleSearch": {}}]}
    assert GeminiCount().parse_count(json.dumps(asked).encode()).job.tools == []


# -- tools and config


def test_declarations_become_functions_with_json_schema() -> None:
    declared = {
        "name": "f", "description": "d",
        "parameters": {
            "type": "OBJECT",
            "properties": {
                "n": {"type": "INTEGER", "nullable": True, "minimum": 1},
                "list": {"type": "ARRAY", "items": {"type": "STRING", "enum": ["a"]}, "min_items": "2"},
                "type": {"anyOf": [{"type": "NUMBER"}, {"type": "NULL"}]},
            },
            "required": ["n"], "propertyOrdering": ["n", "list"],
        },
    }  # fmt: skip
    plain = {"name": "g", "parameters_json_schema": {"type": "object", "properties": {"TYPE": {"type": "string"}}}}
    tools = parse(tools=[{"function_declarations": [declared, plain]}]).job.tools
    assert tools[0] == {
        "type": "function",
        "function": {
            "name": "f", "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": ["integer", "null"], "minimum": 1},
                    "list": {"type": "array", "items": {"type": "string", "enum": ["a"]}, "minItems": 2},
                    "type": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                },
                "required": ["n"],
            },
        },
    }  # fmt: skip
    assert tools[1]["function"] == {"name": "g", "parameters": plain["parameters_json_schema"]}


def test_schemas_keep_what_is_json_schema_already() -> None:
    already = {
        "type": "object",
        "$defs": {"a": {"type": "string"}},
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "additionalProperties": False,
    }
    assert json_schema(already, "s") == already
    assert json_schema({"type": "TYPE_UNSPECIFIED", "nullable": True, "enum": ["a"]}, "s") == {"enum": ["a", None]}
    assert json_schema({"defs": {"a": {"type": "STRING"}}, "ref": "#/defs/a"}, "s") == {
        "$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "choice", "offered"),
    [
        ({}, "auto", "fgh"),
        ({"mode": "AUTO"}, "auto", "fgh"),
        ({"mode": "NONE", "allowedFunctionNames": ["f"]}, "none", "fgh"),
        ({"mode": "any"}, "required", "fgh"),
        ({"mode": "ANY", "allowedFunctionNames": ["g"]}, "function:g", "fgh"),
        ({"mode": "ANY", "allowed_function_names": ["h", "f"]}, "required", "fh"),
        ({"mode": "VALIDATED"}, "auto", "fgh"),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["g"]}, "auto", "g"),
    ],
)
def test_how_functions_are_chosen(config: dict[str, Any], choice: str, offered: str) -> None:
    job = parse(tools=TOOLS, toolConfig={"functionCallingConfig": config}).job
    assert job.tool_choice == choice
    assert "".join(tool["function"]["name"] for tool in job.tools) == offered


@pytest.mark.parametrize("spelt", ["camel", "snake"])
def test_every_field_of_the_config_in_either_spelling(spelt: str) -> None:
    config: dict[str, Any] = {
        "temperature": 0.5, "topP": 0.9, "topK": 40.0, "maxOutputTokens": "100", "stopSequences": ["a", ""], "candidateCount": 3,
        "seed": -7, "presencePenalty": 1, "frequencyPenalty": -1.5, "responseLogprobs": True, "logprobs": 4,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0, "thinkingLevel": "LOW"},
    }  # fmt: skip
    key = "generationConfig"
    if spelt == "snake":
        key = "generation_config"
        config = {"".join(f"_{c.lower()}" if c.isupper() else c for c in name): value for name, value in config.items()}
        config["thinking_config"] = {"include_thoughts": True, "thinking_budget": 0, "thinking_level": "LOW"}
    request = parse(**{key: config})
    assert request.job.sampling == Sampling(
        temperature=0.5, top_p=0.9, top_k=40, max_tokens=100, stop=["a"], seed=-7, presence_penalty=1.0,
        frequency_penalty=-1.5,
    )  # fmt: skip
    assert (request.n, request.job.top_logprobs) == (3, 4)
    assert request.job.template_kwargs == {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
    assert request.kept == {"thoughts": True}
    assert request.asked["topK"] == 40.0 and request.asked["maxOutputTokens"] == "100" and len(request.asked) == 9


def test_without_a_config_everything_is_neutral() -> None:
    request = parse(safetySettings=[{"category": "X"}], labels={"a": "b"}, generationConfig={"unknown": 1})
    assert request.job.sampling == Sampling()
    assert (request.n, request.asked, request.kept, request.job.template_kwargs) == (1, {}, {}, {})
    assert (request.job.top_logprobs, request.job.response_format.type, request.stream) == (None, "text", False)


@pytest.mark.parametrize(
    ("config", "kind", "schema"),
    [
        ({"responseMimeType": "application/json"}, "json_object", None),
        (
            {
                "responseMimeType": "application/json",
                "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
            },
            "json_schema",
            {"type": "object", "properties": {"a": {"type": "string"}}},
        ),
        ({"responseJsonSchema": {"type": "array"}, "responseSchema": {"type": "X"}}, "json_schema", {"type": "array"}),
        ({"responseMimeType": "text/plain", "responseModalities": ["TEXT"]}, "text", None),
    ],
)
def test_formats_of_the_response(config: dict[str, Any], kind: str, schema: Any) -> None:
    found = parse(generationConfig=config).job.response_format
    assert (found.type, found.schema) == (kind, schema)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"contents": []}, "contents"),
        ({"contents": None}, "contents"),
        ({"contents": ["hi"]}, "contents.0"),
        ({"contents": [{"role": "judge", "parts": []}]}, "contents.0.role"),
        ({"contents": [{"role": "user", "parts": "hi"}]}, "contents.0.parts"),
        ({"contents": [user({"text": 7})]}, "contents.0.parts.0.text"),
        ({"contents": [{"role": "user", "parts": {"text": 7}}]}, "contents.0.parts.0.text"),
        ({"contents": [user({"text": "a"}, {"inlineData": {"data": ""}})]}, "contents.0.parts.1.inlineData.mimeType"),
        ({"contents": [user({"file_data": {"fileUri": ""}})]}, "contents.0.parts.0.fileData.fileUri"),
        (
            {"contents": [user(result("f", {}, parts=[{"inlineData": {}}]))]},
            "contents.0.parts.0.functionResponse.parts.0.inlineData.mimeType",
        ),
        ({"contents": [user(call("f"))]}, "contents.0.parts.0.functionCall"),
        ({"contents": [model(result("f", {}))]}, "contents.0.parts.0.functionResponse"),
        ({"contents": [model({"functionCall": {"args": {}}})]}, "contents.0.parts.0.functionCall.name"),
        ({"contents": [model({"functionCall": {"name": "f", "args": []}})]}, "contents.0.parts.0.functionCall.args"),
        ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction.parts.0.inlineData"),
        ({"cachedContent": "cachedContents/x"}, "cachedContent"),
        ({"tools": [{"functionDeclarations": [{"name": ""}]}]}, "tools.0.functionDeclarations.0.name"),
        ({"tools": {"functionDeclarations": {"name": ""}}}, "tools.0.functionDeclarations.0.name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"properties": {"a": 1}}}]}]},
            "tools.0.functionDeclarations.0.parameters.properties.a",
        ),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"const": 2**64}}]}]},
            "tools.0.functionDeclarations.0.parameters",
        ),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "toolConfig.functionCallingConfig.mode"),
        (
            {"tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f", "x"]}}},
            "toolConfig.functionCallingConfig.allowedFunctionNames.1",
        ),
        ({"generationConfig": {"topP": 0}}, "generationConfig.topP"),
        ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"generationConfig": {"temperature": 10**400}}, "generationConfig.temperature"),
        ({"generationConfig": {"maxOutputTokens": 1.5}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"candidateCount": 65}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"stopSequences": ["x"] * 17}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"logprobs": 3}}, "generationConfig.logprobs"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"responseSchema": {"type": 1}}}, "generationConfig.responseSchema.type"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        GeminiDialect().parse(json.dumps({"contents": HI} | body).encode())
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", 10**400, "at most 100"),
        ("temperature", -(10**400), "at least 0"),
        ("topP", -(10**400), "above 0"),
        ("seed", 10**400, f"at most {2**63 - 1}"),
        ("maxOutputTokens", -(10**400), "at least 1"),
    ],
)
def test_an_integer_that_no_float_holds_is_told_its_bound(field: str, value: int, allowed: str) -> None:
    with pytest.raises(BadRequest) as refused:
        GeminiDialect().parse(json.dumps({"contents": HI, "generationConfig": {field: value}}).encode())
    told = f"generationConfig.{field}: got an integer of more than 300 digits, must be {allowed}"
    assert refused.value.message == told


def test_bodies_that_are_none() -> None:
    deep = (
        b'{"contents":[{"parts":[{"functionCall":{"name":"f","args":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}}]}]}"
    )
    schema = b'{"items":' * 900 + b"{}" + b"}" * 900
    tools = (
        b'{"contents":[{"parts":[{"text":""}]}],"tools":[{"functionDeclarations":[{"name":"f","parameters":'
        + schema
        + b"}]}]}"
    )
    for body in (b"", b"[]", b'"x"', b"{", b'{"contents": "hi"}', deep, tools):
        with pytest.raises(BadRequest):
            GeminiDialect().parse(body)
        with pytest.raises(BadRequest):
            GeminiCount().parse_count(body)


def test_results_by_id_and_by_name_answer_each_call_once() -> None:
    called = [{"functionCall": {"id": f"id{i}", "name": name}} for i, name in enumerate("aabac")]
    results = [{"id": "id1"}, {"name": "a"}, {"name": "a"}, {"name": "c"}, {"name": "z"}, {"name": "z"}, {"id": "id1"}]
    said = parse(
        contents=[
            {"role": "model", "parts": called},
            {"role": "user", "parts": [{"functionResponse": one | {"response": {"output": "x"}}} for one in results]},
        ]
    ).job.messages
    assert [message.get("tool_call_id") for message in said[1:]] == ["id1", "id0", "id3", "id4", "id2", None, "id1"]
    assert [message.get("name") for message in said[1:]] == ["a", "a", "a", "c", "z", "z", None]


def test_an_error_shows_the_beginning_of_each_name_above_it() -> None:
    schema = {"properties": {"k" * 100_000: {"properties": {"a": {"items": 1}}}}}
    with pytest.raises(BadRequest) as caught:
        parse(tools=[{"functionDeclarations": [{"name": "f", "parameters": schema}]}])
    shown = f"tools.0.functionDeclarations.0.parameters.properties.{'k' * 80}.properties.a.items"
    assert caught.value.field == shown and caught.value.message == f"{shown}: got 1, must be a schema"


def test_a_count_is_of_contents_or_of_a_whole_request() -> None:
    counter = GeminiCount()
    assert counter.parse_count(json.dumps({"contents": HI}).encode()).job == parse().job
    whole = {"model": "models/x", "contents": HI, "systemInstruction": "s", "tools": TOOLS}
    asked = counter.parse_count(json.dumps({"generateContentRequest": whole}).encode())
    assert asked.job == parse(systemInstruction="s", tools=TOOLS).job
    assert json.loads(counter.count_answer(7))["totalTokens"] == 7


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(
            "contents role parts text thought functionCall functionResponse name args id response tools functionDeclarations"
            " parameters type properties items toolConfig functionCallingConfig mode generationConfig seed topK".split()
        ),
        inner, max_size=4,
    ),
    max_leaves=25,
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(["contents", "tools", "toolConfig", "generationConfig", "systemInstruction"]), JSON)
)
def test_nonsense_is_refused_and_nothing_else_is_raised(body: dict[str, Any]) -> None:
    try:
        request = GeminiDialect().parse(json.dumps(body).encode())
    except BadRequest:
        return
    assert request.job.messages

"""What `/openapi.json` says about the Gemini routes (`operations.py` says how)."""

from __future__ import annotations

from steno_proxy.dialects import bounds
from steno_proxy.dialects.bounds import schema
from steno_proxy.dialects.operations import (
    BOOLEAN,
    EVENTS,
    IMAGE_TYPE,
    NAME,
    OBJECT,
    STRING,
    Schema,
    array,
    json,
    obj,
    one_of,
    operation,
)

_INTEGER: Schema = {"type": "integer"}
_PART = {"minProperties": 1, "maxProperties": 1, "additionalProperties": False} | obj(
    text=STRING,
    inlineData=obj("mimeType data", mimeType=IMAGE_TYPE, data=STRING),
    fileData=obj("fileUri", mimeType=IMAGE_TYPE, fileUri=STRING),
    thought=BOOLEAN,
    thoughtSignature=STRING,
    functionCall=obj("name", id=STRING, name=NAME, args=OBJECT),
    functionResponse=obj(id=STRING, name=STRING, response=OBJECT),
)
_CONTENT = obj("role parts", role=one_of("user", "model"), parts=array(_PART, minItems=1))
_CONTENTS = array(_CONTENT, minItems=1)
_CONFIG = obj(
    temperature=schema(bounds.Temperature),
    topP=schema(bounds.TopP),
    topK=schema(bounds.PlainTopK),
    maxOutputTokens=schema(bounds.Limit),
    stopSequences=array(STRING, maxItems=16),
    candidateCount=schema(bounds.Choices),
    seed=schema(bounds.Seed),
    presencePenalty=schema(bounds.Penalty),
    frequencyPenalty=schema(bounds.Penalty),
    responseMimeType=one_of("text/plain", "application/json"),
    responseLogprobs=BOOLEAN,
    thinkingConfig=obj(includeThoughts=BOOLEAN, thinkingBudget=schema(bounds.ThinkingBudget)),
)
_FUNCTION = obj("name", name=NAME, description=STRING, parametersJsonSchema=OBJECT)
_REQUEST = obj(
    "contents",
    contents=_CONTENTS,
    systemInstruction=obj("parts", parts=array(obj("text", text=STRING))),
    tools=array(obj(functionDeclarations=array(_FUNCTION))),
    generationConfig=_CONFIG,
)
_ERROR = obj("error", error=obj("code message status", code=_INTEGER, message=STRING, status=STRING))
_ANSWER = obj("candidates usageMetadata", candidates=array(), usageMetadata=OBJECT, modelVersion=STRING)


def _operation(name: str, summary: str, content: Schema, answer: str, body: Schema | None = None) -> Schema:
    return operation(name, summary, content, error=_ERROR, body=body, answer=answer)


GENERATE = _operation("gemini_generate_content", "Gemini", json(_ANSWER), "The answer.", _REQUEST)
STREAM = _operation(
    "gemini_stream_generate_content",
    "Gemini, streamed",
    EVENTS | json(array(_ANSWER | {"required": ["candidates"]})),  # usage comes with the last of them only
    "Server-sent events with `alt=sse`, else a JSON array.",
    _REQUEST,
)
COUNT = _operation(
    "gemini_count_tokens",
    "How many tokens a prompt has; never recorded",
    json(obj("totalTokens", totalTokens=_INTEGER)),
    "The count.",
    obj("contents", contents=_CONTENTS),
)
MODELS = _operation(
    "gemini_list_models", "What the workers serve", json(obj("models", models=array())), "Google's list of models."
)

"""`/openapi.json`: FastAPI's document of the control plane, with the agents' routes, keys, addresses and examples.

Clients are generated from it, so: operations have short names that stay (`operation_name`), and a record's schema is that of its
JSON (`contracts/arrays.py`). tests/integration/face/test_generated_client.py generates one and uses it.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from steno_proxy.api.agents import counting, gemini, generation, messages, responses
from steno_proxy.config.settings import ProxySettings

_SCHEMES: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "As OpenAI's clients send a key; any client may."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "As Anthropic's clients do."},
    "x-goog-api-key": {"type": "apiKey", "in": "header", "name": "x-goog-api-key", "description": "As Google's do."},
}
_FREE = frozenset({"healthz", "readyz", "health"})
"""Operations that ask for no key."""

_MESSAGES = [{"role": "user", "content": "Hello"}]
_CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "Hello"}]}]}
EXAMPLES: dict[str, dict[str, Any]] = {
    "register_session": {"trial_id": "my-trial", "metadata": {"task": "sort-a-list"}, "limits": {"max_turns": 50}},
    "register_named_session": {"metadata": {"task": "sort-a-list"}, "limits": {"max_turns": 50}},
    "complete_session": {"reward": 1.0, "metrics": {"tests_passed": 3}},
    "create_group": {"group_id": "my-group", "run_id": "my-run", "task": {"name": "sort-a-list"}, "size": 4},
    "lease_groups": {"run_id": "my-run", "consumer": "trainer-0", "max_groups": 1, "wait_s": 30},
    "create_chat_completion": {"model": "any", "messages": _MESSAGES, "max_tokens": 16},
    "create_completion": {"model": "any", "prompt": "Hello", "max_tokens": 16},
    "create_message": {"model": "any", "messages": _MESSAGES, "max_tokens": 16},
    "count_message_tokens": {"model": "any", "messages": _MESSAGES},
    "create_response": {"model": "any", "input": "Hello", "max_output_tokens": 16},
    "count_response_tokens": {"model": "any", "input": "Hello"},
    "gemini_generate_content": _CONTENTS | {"generationConfig": {"maxOutputTokens": 16}},
    "gemini_stream_generate_content": _CONTENTS | {"generationConfig": {"maxOutputTokens": 16}},
    "gemini_count_tokens": _CONTENTS,
    "tokenize": {"prompt": "Hello"},
    "tokenize_at_root": {"prompt": "Hello"},
    "detokenize": {"tokens": [1, 2, 3]},
    "detokenize_at_root": {"tokens": [1, 2, 3]},
}
"""Operation -> a body that it takes."""


def operation_name(route: APIRoute) -> str:
    return route.name


def document(app: FastAPI, settings: ProxySettings, *, keys: bool, agents_port: int = 0) -> dict[str, Any]:
    """Args: keys: whether keys are asked for. agents_port: where the control plane has a port of its own; else 0."""
    servers = _servers(settings, agents_port)
    found = get_openapi(title=app.title, version=app.version, routes=app.routes, servers=servers)
    for router in (generation, responses, messages, gemini, counting):
        found["paths"] |= _of_anything(router.openapi_paths())
    found["components"]["securitySchemes"] = _SCHEMES
    security: list[dict[str, list[str]]] = [{name: []} for name in _SCHEMES]
    for operations in found["paths"].values():
        for operation in operations.values():
            name = operation["operationId"]
            operation["responses"].pop("422", None)  # FastAPI's own, which no route answers
            if name not in _FREE:
                operation["security"] = security if keys else [{}, *security]
            if isinstance(body := operation.get("requestBody"), dict):
                _without_null(body["content"])
            if name in EXAMPLES:
                operation["requestBody"]["content"]["application/json"]["example"] = EXAMPLES[name]
    return found


def _of_anything(node: Any) -> Any:
    """The agents' operations, with `items` in each array: generators want it, also where an item may be anything."""
    if isinstance(node, list):
        return [_of_anything(value) for value in node]
    if not isinstance(node, dict):
        return node
    known = {key: _of_anything(value) for key, value in node.items()}
    return known | {"items": {}} if known.get("type") == "array" and "items" not in known else known


def _without_null(content: dict[str, Any]) -> None:
    """A body that may be left out is told by `required`; that it may be null as well would only be in the way of generators."""
    for kind in content.values():
        match kind.get("schema"):
            case {"anyOf": [schema, {"type": "null"}]}:
                kind["schema"] = schema


def _servers(settings: ProxySettings, agents_port: int) -> list[dict[str, Any]]:
    """As `common.base_url` has it of a trial's addresses."""
    here = {"url": settings.base_path or "/", "description": "where this document is"}
    agents: dict[str, Any] = {"description": "where agents reach the proxy"}
    if settings.public_url is not None:
        return [here, agents | {"url": settings.public_url}]
    if not agents_port:
        return [here]
    host = {"default": "localhost", "description": "that of this document"}
    return [here, agents | {"url": f"//{{host}}:{agents_port}", "variables": {"host": host}}]

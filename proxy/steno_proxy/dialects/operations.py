"""What the agents' operations in `/openapi.json` have in common, whatever their dialect."""

from __future__ import annotations

from typing import Any

STRING: dict[str, Any] = {"type": "string"}
OBJECT: dict[str, Any] = {"type": "object"}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def json(schema: dict[str, Any]) -> dict[str, Any]:
    """Content of that type."""
    return {"application/json": {"schema": schema}}


def operation(
    name: str,
    summary: str,
    content: dict[str, Any],
    *,
    error: dict[str, Any],
    body: dict[str, Any] | None = None,
    answer: str | None = None,
) -> dict[str, Any]:
    """Args: content: of the answer, by its type. error: the schema of a refusal. answer: what it is, if not the summary."""
    asked = {"requestBody": {"required": True, "content": json(body)}} if body else {}
    return {
        "tags": ["generation"],
        "operationId": name,
        "summary": summary,
        **asked,
        "responses": {
            "200": {"description": answer or summary, "content": content},
            "default": {
                "description": "Refused or failed; `retry-after` where trying again helps.",
                "content": json(error),
            },
        },
    }

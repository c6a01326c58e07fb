"""`POST /{trial_id}/v1/responses/input_tokens`: how long a request's prompt is, without asking for an answer."""

from __future__ import annotations

from typing import Any, ClassVar

from proxy.contracts.canonical import Job
from proxy.contracts.errors import BadRequest, StenoError
from proxy.dialects import openai
from proxy.dialects.openai import to_json
from proxy.dialects.responses import Responses
from proxy.dialects.responses_schema import COUNT


class ResponsesCount:
    """`api.counting.Counter`. Counts what the request holds: recorded conversations are not looked up for it."""

    name: ClassVar[str] = "responses"

    def parse_count(self, body: bytes) -> Job:
        asked = Responses().parse(body)
        for field, given in (("previous_response_id", asked.after), ("input", asked.refers)):
            if given:
                raise BadRequest(f"{field}: what is stored can't be counted; send its items", field=field)
        return asked.job

    def count_answer(self, tokens: int) -> bytes:
        return to_json({"object": "response.input_tokens", "input_tokens": tokens})

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return openai.error_body(error)

    def openapi(self) -> dict[str, Any]:
        return COUNT

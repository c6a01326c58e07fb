"""`POST /{trial_id}/v1/responses/input_tokens`: how long a request's prompt is, without asking for an answer."""

from __future__ import annotations

from typing import Any, ClassVar

from steno.contracts.chat import Job
from steno.contracts.errors import BadRequest, StenoError
from steno_proxy.dialects.openai import common
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.dialects.responses.dialect import Responses
from steno_proxy.dialects.responses.schema import COUNT


class ResponsesCount:
    """`api.counting.Counter`. Counts what the request holds: recorded conversations are not looked up for it."""

    name: ClassVar[str] = "responses"

    def parse_count(self, body: bytes) -> Job:
        asked = Responses().parse(body)
        for field, given in (("previous_response_id", asked.after), ("input", asked.refers)):
            if given:
                raise BadRequest(
                    f"{field} is not supported when tokens are counted: send its items in input", field=field
                )
        return asked.job

    def count_answer(self, tokens: int) -> bytes:
        return to_json({"object": "response.input_tokens", "input_tokens": tokens})

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return common.error_body(error)

    def openapi(self) -> dict[str, Any]:
        return COUNT

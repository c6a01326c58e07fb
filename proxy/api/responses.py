"""`GET` and `DELETE /{trial_id}/v1/responses/{response_id}`: stored responses, for the agent whose trial they are of;
and `POST /{trial_id}/v1/responses/input_tokens`.

The agent's key opens them (I8): it reads back what it was answered, nothing else of the record. Deleting hides a
response from its client; the record of its turn is not the agent's to delete.
"""

from __future__ import annotations

from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from proxy import stored
from proxy.api.counting import Counting
from proxy.api.lookup import look_up
from proxy.contracts.errors import NotFound
from proxy.contracts.records import TRIAL_ID
from proxy.dialects.openai import error_body
from proxy.dialects.responses import turn_of_response
from proxy.dialects.responses_count import ResponsesCount
from proxy.dialects.responses_schema import COUNT, RESPONSE_ID, STORED
from proxy.dialects.responses_stored import deleted_body, stored_body
from proxy.hub import Hub
from proxy.keys import Keyring
from proxy.recorder import Recorder

_PATH = "/v1/responses/{response_id}"
_COUNT = "/v1/responses/input_tokens"


class StoredResponses:
    """The ASGI endpoint."""

    def __init__(self, recorder: Recorder, keys: Keyring) -> None:
        self._recorder = recorder
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def find(trial_id: str) -> bytes:
            answer = self._delete if scope["method"] == "DELETE" else self._get
            return await answer(trial_id, scope["path_params"]["response_id"])

        await look_up(scope, send, self._keys, find, error_body)

    async def _get(self, trial_id: str, response_id: str) -> bytes:
        turn_id = turn_of_response(response_id)
        recording = await self._recorder.look(trial_id)
        turn, kept = await self._answer(recording, turn_id, response_id)
        leading = kept.get("leading", 0)
        instructions = []
        if leading:
            instructions = (await stored.conversation_of(self._recorder, recording, turn_id))[:leading]
        return stored_body(turn, kept, instructions)

    async def _delete(self, trial_id: str, response_id: str) -> bytes:
        turn_id = turn_of_response(response_id)
        recording = await self._recorder.look(trial_id)
        await self._answer(recording, turn_id, response_id)
        await self._recorder.store.hide(trial_id, turn_id)
        return deleted_body(response_id)

    async def _answer(self, recording: Any, turn_id: str, response_id: str) -> Any:
        try:
            return await stored.answer_of(self._recorder, recording, turn_id)
        except NotFound:
            raise NotFound(f"Response with id '{response_id}' not found.", field="response_id") from None


def routes(recorder: Recorder, hub: Hub, keys: Keyring, **bounds: Any) -> list[Route]:
    """bounds: of a body to count."""
    stored_ones = StoredResponses(recorder, keys)
    count = Counting(ResponsesCount(), hub, keys, **bounds)
    return [
        Route(f"/{{trial_id}}{_COUNT}", count, methods=["POST"]),
        Route(f"/{{trial_id}}{_PATH}", stored_ones, methods=["GET", "DELETE"]),
    ]


def openapi_paths() -> dict[str, Any]:
    """What these routes add to `/openapi.json`."""
    trial = {"name": "trial_id", "in": "path", "required": True, "schema": {"type": "string", "pattern": TRIAL_ID}}
    operations = {method: operation | {"parameters": [trial, RESPONSE_ID]} for method, operation in STORED.items()}
    count = {"post": COUNT | {"parameters": [trial]}}
    return {f"/{{trial_id}}{_COUNT}": count, f"/{{trial_id}}{_PATH}": operations}

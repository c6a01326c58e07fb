"""`GET` and `DELETE /{trial_id}/v1/responses/{response_id}`, its `input_items` and `cancel`: stored responses, for the agent
whose trial they are of; and `POST /{trial_id}/v1/responses/input_tokens`.

The agent's key opens them (I8): it reads back what it was answered, nothing else of the record. Deleting hides a
response from its client; the record of its turn is not the agent's to delete.
"""

from __future__ import annotations

from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from steno.contracts.errors import BadRequest, NotFound
from steno.contracts.records import TRIAL_ID
from steno_proxy.api.agents.counting import CountEndpoint
from steno_proxy.api.agents.lookup import look_up
from steno_proxy.auth.keys import Keyring
from steno_proxy.dialects.responses.dialect import ResponsesCount, turn_of_response
from steno_proxy.dialects.responses.schema import CANCEL, COUNT, INPUT_ITEMS, PAGE, RESPONSE_ID, STORED
from steno_proxy.dialects.responses.stored import deleted_body, input_items, page_of, stored_body
from steno_proxy.dialects.responses.tools import ClientTool
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.turns import stored_responses
from steno_proxy.workers.hub import Hub

_PATH = "/v1/responses/{response_id}"
_COUNT = "/v1/responses/input_tokens"


class StoredResponses:
    """The ASGI endpoint."""

    def __init__(self, recorder: Recorder, keys: Keyring) -> None:
        self._recorder = recorder
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def find(trial_id: str) -> bytes:
            response_id = scope["path_params"]["response_id"]
            path, method = scope["path"], scope["method"]
            if path.endswith("/input_items"):
                return await self._input_items(trial_id, response_id, scope["query_string"])
            if path.endswith("/cancel"):
                return await self._cancel(trial_id, response_id)
            return await (self._delete if method == "DELETE" else self._get)(trial_id, response_id)

        await look_up(scope, send, self._keys, find)

    async def _get(self, trial_id: str, response_id: str) -> bytes:
        turn_id = turn_of_response(response_id)
        recording = await self._recorder.look(trial_id)
        turn, kept = await self._answer(recording, turn_id, response_id)
        leading = kept.get("leading", 0)
        instructions = []
        if leading:
            instructions = (await stored_responses.conversation_of(self._recorder, recording, turn_id))[:leading]
        return stored_body(turn, kept, instructions)

    async def _delete(self, trial_id: str, response_id: str) -> bytes:
        turn_id = turn_of_response(response_id)
        recording = await self._recorder.look(trial_id)
        await self._answer(recording, turn_id, response_id)
        await self._recorder.store.hide(trial_id, turn_id)
        return deleted_body(response_id)

    async def _input_items(self, trial_id: str, response_id: str, query: bytes) -> bytes:
        turn_id = turn_of_response(response_id)
        recording = await self._recorder.look(trial_id)
        _, kept = await self._answer(recording, turn_id, response_id)
        said = await stored_responses.conversation_of(self._recorder, recording, turn_id)
        places = {name: ClientTool(*place) for name, place in kept.get("places", {}).items()}
        return page_of(input_items(turn_id, said[kept.get("leading", 0) : -1], places), query)

    async def _cancel(self, trial_id: str, response_id: str) -> bytes:
        """As OpenAI answers for a response that is none of the background's, and here none is."""
        turn_id = turn_of_response(response_id)
        await self._answer(await self._recorder.look(trial_id), turn_id, response_id)
        raise BadRequest(
            f"response_id: {response_id!r} can't be cancelled: only responses with background=true can, and the proxy supports "
            "none; close the connection to cancel a response",
            field="response_id",
        )

    async def _answer(self, recording: Any, turn_id: str, response_id: str) -> Any:
        try:
            return await stored_responses.answer_of(self._recorder, recording, turn_id)
        except NotFound:
            raise NotFound(f"Response with id '{response_id}' not found.", field="response_id") from None


def routes(recorder: Recorder, hub: Hub, keys: Keyring, **bounds: Any) -> list[Route]:
    """bounds: of a body to count."""
    stored_ones = StoredResponses(recorder, keys)
    count = CountEndpoint(ResponsesCount(), hub, keys, **bounds)
    return [
        Route(f"/{{trial_id}}{_COUNT}", count, methods=["POST"]),
        Route(f"/{{trial_id}}{_PATH}", stored_ones, methods=["GET", "DELETE"]),
        Route(f"/{{trial_id}}{_PATH}/input_items", stored_ones, methods=["GET"]),
        Route(f"/{{trial_id}}{_PATH}/cancel", stored_ones, methods=["POST"]),
    ]


def openapi_paths() -> dict[str, Any]:
    """What these routes add to `/openapi.json`."""
    trial = {"name": "trial_id", "in": "path", "required": True, "schema": {"type": "string", "pattern": TRIAL_ID}}
    operations = {method: operation | {"parameters": [trial, RESPONSE_ID]} for method, operation in STORED.items()}
    count = {"post": COUNT | {"parameters": [trial]}}
    listed = {"get": INPUT_ITEMS | {"parameters": [trial, RESPONSE_ID, *PAGE]}}
    cancelled = {"post": CANCEL | {"parameters": [trial, RESPONSE_ID]}}
    path = f"/{{trial_id}}{_PATH}"
    return {
        f"/{{trial_id}}{_COUNT}": count, path: operations, f"{path}/input_items": listed, f"{path}/cancel": cancelled,
    }  # fmt: skip

"""Routes of workers: the WebSocket that they connect to, and the list of them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response, WebSocket

from steno.contracts.worker_view import WorkerPage
from steno_proxy.workers.hub import Hub


def router(reader: Any) -> APIRouter:
    """Args: reader: a dependency (`Depends(...)`) that lets in who may read the control plane. The socket has its own key."""
    routes = APIRouter()

    @routes.get(
        "/workers",
        dependencies=[reader],
        summary="Every worker with a channel to this proxy, by id",
        tags=["workers"],
        response_class=Response,
        responses={200: {"content": {"application/json": {"schema": _inline(msgspec.json.schema(WorkerPage))}}}},
    )
    async def list_workers(request: Request) -> Response:
        hub: Hub = request.app.state.hub
        return Response(msgspec.json.encode(WorkerPage(hub.workers())), media_type="application/json")

    @routes.websocket("/workers/connect")
    async def connect(websocket: WebSocket) -> None:
        await websocket.app.state.hub.serve(websocket)

    return routes


def _inline(schema: dict[str, Any]) -> Any:
    """A schema with its `$defs` put where they are referred to: in an OpenAPI document the references would point nowhere."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(definitions[node["$ref"].rpartition("/")[2]])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(value) for value in node] if isinstance(node, list) else node

    return resolve(schema)

"""Routes of workers: the WebSocket that they connect to, and the list of them."""

from __future__ import annotations

import asyncio
import gzip
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Request, Response, WebSocket

from steno.contracts.errors import NotFound
from steno.contracts.rest import TokenizerList, TokenTexts
from steno.contracts.worker_view import WorkerPage
from steno_proxy.api.common import services
from steno_proxy.workers.hub import Hub

TokenizerKey = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="`tokenizer` of a turn")]


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

    @routes.get(
        "/workers/tokenizers",
        dependencies=[reader],
        response_model=TokenizerList,
        summary="Keys of the tokenizers whose texts are kept: the 64 that a worker had last",
        tags=["workers"],
    )
    async def list_tokenizers(request: Request) -> TokenizerList:
        return TokenizerList(items=await services(request).store.token_texts.keys())

    @routes.get(
        "/workers/tokenizers/{key}",
        dependencies=[reader],
        response_model=TokenTexts,
        summary="The texts of a tokenizer's tokens, kept since a worker brought it; `tokenizer` of a turn is its key",
        tags=["workers"],
    )
    async def read_token_texts(request: Request, key: TokenizerKey) -> Response:
        found = await services(request).store.token_texts.get(key)
        if found is None:
            raise NotFound(f"no worker has sent the token texts of tokenizer {key} yet")
        headers = {"cache-control": "private, max-age=86400, immutable"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(found, headers=headers | {"content-encoding": "gzip"}, media_type="application/json")
        whole = await asyncio.to_thread(gzip.decompress, found)
        return Response(whole, headers=headers, media_type="application/json")

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

"""What `http_protocol.py` is built upon, of uvicorn's own: an upgrade that renames any of it must be read before it is taken."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from steno_proxy.server.http_protocol import BoundedHttp, WithoutUpgrades


async def test_uvicorn_still_has_what_the_protocol_is_built_upon() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    made = BoundedHttp(uvicorn.Config(app, http=BoundedHttp, interface="asgi3"), ServerState(), {})
    made.on_message_begin()
    assert {"parser", "url", "headers", "transport", "flow", "loop"} <= vars(made).keys()
    assert {"_should_upgrade", "_unset_keepalive_if_required", "send_400_response"} <= vars(HttpToolsProtocol).keys()


def test_each_method_that_is_overridden_is_uvicorns() -> None:
    """One of another name would never be called, and nothing else would fail."""
    overridden = {
        name
        for made in (WithoutUpgrades, BoundedHttp)
        for name, value in vars(made).items()
        if inspect.isfunction(value) and name not in {"_read_on", "_stop_looking", "_look_at_head"}
    }
    assert overridden == {
        "connection_lost", "connection_made", "data_received", "handle_websocket_upgrade", "on_body", "on_headers_complete",
        "on_message_complete", "_start_asgi_task",
    }  # fmt: skip
    for name in overridden:
        assert inspect.signature(getattr(HttpToolsProtocol, name)).parameters.keys() == (
            inspect.signature(getattr(BoundedHttp, name)).parameters.keys()
        )


async def test_an_answer_of_uvicorns_has_what_is_read_and_set() -> None:
    """`EndsWithConnection` sets two of these, and `BoundedHttp` another two: new names would only be unused."""
    made = vars(
        RequestResponseCycle(
            scope={"type": "http", "method": "GET", "headers": [], "http_version": "1.0"},  # type: ignore[arg-type]
            transport=asyncio.Transport(), flow=FlowControl(asyncio.Transport()), logger=uvicorn.config.logger,
            access_logger=uvicorn.config.logger, access_log=False, default_headers=[], message_event=asyncio.Event(),
            expect_100_continue=False, keep_alive=False, on_response=lambda: None,
        )
    )  # fmt: skip
    assert {"chunked_encoding", "expected_content_length", "flow", "transport", "scope"} <= made.keys()
    assert {"disconnected", "response_complete", "message_event"} <= made.keys()

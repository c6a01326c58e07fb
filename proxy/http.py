"""uvicorn's HTTP protocol, with a bound on what a request may say outside of its body.

uvicorn has none with httptools: an address, a header or a trailer that never ends would be kept whole, before any key is
looked at.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's head, or of a body's trailers; what uvicorn allows with its other parser. Never looked at within one read of
the socket (256 KiB at most)."""


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection that sends more than MAX_HEAD_BYTES without a head, a body's piece or an end among them."""

    _quiet_bytes = 0
    _came = False

    def data_received(self, data: bytes) -> None:
        self._came = False
        super().data_received(data)
        if self._came:
            self._quiet_bytes = 0
            return
        self._quiet_bytes += len(data)
        if self._quiet_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> Any:
        self._came = True
        return super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._came = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._came = True
        super().on_message_complete()

"""A socket to a proxy is opened, or the log says why there is none."""

from __future__ import annotations

import logging

from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, ProxyError, WebSocketException

logger = logging.getLogger(__name__)
SAY_AGAIN_S = 600.0
"""How often a reason that is known is logged: some names have no proxy on purpose, such as those of a chart that scales."""


class Dial(connect):
    """Follows redirects as websockets does. If one can't be followed (to https://), the error is the HTTP answer itself."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        try:
            return super().process_redirect(exc)
        except (WebSocketException, ValueError):
            return exc


def unreachable(error: Exception) -> str:
    """Why a proxy could not be dialled, in words for the log."""
    if isinstance(error, InvalidStatus) and "Location" in error.response.headers:
        location = error.response.headers.get_all("Location")[0][:200]
        return (
            f"HTTP {error.response.status_code}: this address sends workers on to {location!r}; dial the proxy's control plane "
            "itself, ws://HOST:PORT or wss://HOST:PORT"
        )
    if isinstance(error, InvalidStatus) and 400 <= error.response.status_code < 500:
        return (
            f"HTTP {error.response.status_code}: this address does not accept workers; dial the proxy's control plane, "
            "http://HOST:PORT, with no path except the public URL's prefix"
        )
    if isinstance(error, ProxyError):
        return (
            f"an HTTP proxy stands between (http_proxy, https_proxy, all_proxy), and did not pass it on: {error}; to dial "
            "directly, name this host in no_proxy"
        )
    return str(error) or type(error).__name__


class FailedDials:
    """Attempts to reach one proxy since the last connection. Each reason is logged at once, and again after SAY_AGAIN_S."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.forget()

    def forget(self) -> None:
        """It was reached."""
        self._count = 0
        self._said: dict[str, float] = {}  # reason -> when it was logged last

    def add(self, error: Exception, now: float) -> None:
        self._count += 1
        reason = unreachable(error)
        if reason in self._said and now < self._said[reason] + SAY_AGAIN_S:
            return
        self._said[reason] = now
        attempts = f" ({self._count} attempts so far)" if self._count > 1 else ""
        logger.warning("can't reach %s: %s%s", self._url, reason, attempts)

"""The sockets that the proxy listens on: one for agents, a second one for the control plane where that has a port of its own.

uvicorn would make them too, and end the process in words of its own where it can't.
"""

from __future__ import annotations

import socket

from steno.contracts.errors import CannotListen
from steno_proxy.config.settings import ProxySettings

BACKLOG = 4096
"""Connections waiting to be accepted: a fleet of agents starts all at once. The kernel caps it at net.core.somaxconn."""


def listeners(settings: ProxySettings) -> list[socket.socket]:
    """The agents' and the control plane's, in this order.

    Raises: CannotListen naming the setting.
    """
    found = _listen("port", settings.host, settings.port)
    if settings.control_port is not None:
        try:
            found += _listen("control_port", settings.control_host or settings.host, settings.control_port)
        except CannotListen:
            _close(found)
            raise
    return found


def _listen(field: str, host: str, port: int) -> list[socket.socket]:
    """On each address of the host (`localhost` may have two), on one port."""
    found: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            at = (address[0], found[0].getsockname()[1] if found else port)
            found.append(socket.create_server(at, family=family, backlog=BACKLOG))
    except OSError as error:
        _close(found)
        raise CannotListen(field, host, port, error) from None
    return found


def _close(sockets: list[socket.socket]) -> None:
    for listener in sockets:
        listener.close()

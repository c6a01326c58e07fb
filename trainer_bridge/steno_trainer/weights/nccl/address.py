"""Where workers meet the trainer over NCCL: an address of this machine that all of them reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from steno.contracts.errors import ConfigError
from steno.contracts.worker_view import WorkerView

FIELD = "nccl_address"
LOOPBACK = "127.0.0.1"


def route_to(host: str) -> str:
    """The address of this machine that packets to `host` leave from. Sends nothing. Raises: OSError: no such name, no route."""
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def meeting_address(
    workers: Iterable[WorkerView], proxy: str, given: str | None, *, route: Callable[[str], str] = route_to
) -> str:
    """Args:
        workers: of `GET /workers`; their addresses say whence they dialled the proxy.
        proxy: its URL: a worker that dialled it by loopback is on its machine.
        given: the setting; it is checked, and told as it is.

    Raises: ConfigError (`nccl_address`): loopback with a worker elsewhere; several addresses, none of which is for all; a name
        that means nothing here.
    """
    try:
        away = dict(_elsewhere(workers, urlsplit(proxy).hostname or LOOPBACK, route))
        loopback = given is not None and _is_loopback(socket.getaddrinfo(given, None)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"nccl_address: {given or 'the route to a worker'}: {error}; name an address", field=FIELD
        ) from None
    if given is not None:
        if loopback and away:
            raise ConfigError(
                f"nccl_address {given} is a loopback address, but worker {min(away)} is on another machine: "
                f"it probably reaches this machine by {away[min(away)]}",
                field=FIELD,
            )
        return given
    if len(set(away.values())) > 1:
        found = ", ".join(f"{address} for worker {worker}" for worker, address in sorted(away.items()))
        raise ConfigError(
            f"nccl_address: set one that all workers reach: this machine has several ({found})", field=FIELD
        )
    return next(iter(away.values()), LOOPBACK)


def _elsewhere(workers: Iterable[WorkerView], proxy: str, route: Callable[[str], str]) -> Iterable[tuple[str, str]]:
    """Workers that are on other machines, and this machine's address on the way to each."""
    for worker in workers:
        if worker.address is None:  # a proxy of before; it says nothing of where workers are
            yield worker.id, socket.gethostbyname(socket.gethostname())
            continue
        peer = worker.address or LOOPBACK
        if _is_loopback(peer):
            peer = proxy
        mine = route(_plain(peer))
        if not _is_loopback(mine) and mine != _plain(peer):
            yield worker.id, mine


def _plain(address: str) -> str:
    """Of an IPv4 address that a socket for both families shows as IPv6, the first; of anything else, itself."""
    try:
        mapped = getattr(ipaddress.ip_address(address), "ipv4_mapped", None)
    except ValueError:
        return address
    return str(mapped or address)


def _is_loopback(address: str | int) -> bool:
    try:
        return ipaddress.ip_address(_plain(str(address))).is_loopback
    except ValueError:
        return address == "localhost"

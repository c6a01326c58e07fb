"""Keeps requests to this machine away from the HTTP proxy of a company's network, by `no_proxy`, and leaves out what
httpx can't use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib.util import find_spec
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def reach_loopback_directly(environment: MutableMapping[str, str]) -> None:
    """Name this machine in `no_proxy` where an HTTP proxy is set: the demo, rollouts and the programs that they start (agents)
    ask Steno's proxy here. httpx, websockets, curl, Node and Go read it there. What it names already stays."""
    if not _has_proxy(environment):
        return
    known = ",".join(environment.get(name, "") for name in _spellings("no_proxy"))
    hosts = list(dict.fromkeys(host for host in (part.strip() for part in known.split(",")) if host))
    if "*" not in hosts:
        hosts += [host for host in LOOPBACK if host not in hosts]
    for name in _spellings("no_proxy"):
        environment[name] = ",".join(hosts)


def direct(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What a shell must have so that the programs that are started there reach this URL directly, if it is of this machine and
    an HTTP proxy is set: `no_proxy`, in both spellings."""
    from steno.config.settings import is_loopback  # it brings pydantic, which `steno --help` does without

    if not _has_proxy(environment) or not is_loopback(urlsplit(url).hostname or ""):
        return {}
    changed = dict(environment)
    reach_loopback_directly(changed)
    return {name: changed[name] for name in _spellings("no_proxy")}


def leave_out_socks(environment: MutableMapping[str, str]) -> Iterator[str]:
    """Take out what httpx refuses before it asks for anything: no command would work, nor an agent with a Python SDK.

    Returns: lines for the user, one for each.
    """
    for scheme in ("http", "https", "all"):
        for name in _spellings(f"{scheme}_proxy"):
            kind, given, _ = environment.get(name, "").partition("://")  # without its host: a password may be in it
            if not given or kind.lower() in ("http", "https"):
                continue
            known = kind.lower() in ("socks5", "socks5h")
            if known and find_spec("socksio") is not None:
                continue
            del environment[name]
            why = "needs: pip install socksio" if known else "must be http, https, socks5 or socks5h"
            yield f"{name} is left out: got {kind}://…, {why}"


def mend_no_proxy(environment: MutableMapping[str, str]) -> Iterator[str]:
    """Write what `no_proxy` names as httpx reads it, and take out what it refuses, also where no HTTP proxy is set: no command
    would work.

    Returns: lines for the user, one for each that is left out, where an HTTP proxy is set.
    """
    left_out: dict[str, str] = {}
    for name in _spellings("no_proxy"):
        hosts = [host.strip() for host in environment.get(name, "").split(",")]
        readable = {host: _as_httpx_reads(host) for host in hosts}
        if any(host != read for host, read in readable.items()):
            left_out |= {host: name for host, read in readable.items() if read is None and host not in left_out}
            environment[name] = ",".join(read for host in hosts if (read := readable[host]) is not None)
    for host, name in left_out.items() if _has_proxy(environment) else ():
        yield f"{name}: {host} is left out: must be a name, an address, HOST:PORT or a range of IPv4"


def _as_httpx_reads(host: str) -> str | None:
    """None: it can't."""
    if not (host.isascii() and host.isprintable()):
        return None
    if host.count(":") > 1 and "://" not in host:  # IPv6
        address, _, bits = host.partition("/")
        address = address.removeprefix("[").removesuffix("]")
        return address if bits in ("", "128") and _is_ipv6(address) else None
    try:
        _port = urlsplit(host if "://" in host else f"//{host}").port
    except ValueError:
        return None
    return host


def _is_ipv6(address: str) -> bool:
    from ipaddress import IPv6Address  # most have none

    try:
        IPv6Address(address)
    except ValueError:
        return False
    return True


def _has_proxy(environment: Mapping[str, str]) -> bool:
    return any(environment.get(name) for scheme in ("http", "https", "all") for name in _spellings(f"{scheme}_proxy"))


def _spellings(name: str) -> tuple[str, str]:
    return name, name.upper()

"""HTTP proxies of a company's network, which nothing that runs on this machine may be asked for."""

from __future__ import annotations

from collections.abc import MutableMapping

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def reach_loopback_directly(environment: MutableMapping[str, str]) -> None:
    """Name this machine in `no_proxy` where an HTTP proxy is set: the demo, rollouts and the programs that they start (agents)
    ask Steno's proxy here. httpx, websockets, curl, Node and Go read it there. What it names already stays."""
    if not any(environment.get(name) for scheme in ("http", "https", "all") for name in _spellings(f"{scheme}_proxy")):
        return
    known = ",".join(environment.get(name, "") for name in _spellings("no_proxy"))
    hosts = list(dict.fromkeys(host for host in (part.strip() for part in known.split(",")) if host))
    if "*" not in hosts:
        hosts += [host for host in LOOPBACK if host not in hosts]
    for name in _spellings("no_proxy"):
        environment[name] = ",".join(hosts)


def _spellings(name: str) -> tuple[str, str]:
    return name, name.upper()

"""The address that workers meet the trainer at, as routes and the proxy show it."""

from __future__ import annotations

import re
import socket

import pytest

from steno.contracts.errors import ConfigError
from steno.contracts.worker_view import WorkerView
from steno_trainer.weights.nccl.address import meeting_address, route_to
from tests.support.records.worker_views import worker_view

ROUTES = {"127.0.0.1": "127.0.0.1", "10.0.0.1": "10.0.0.1", "10.0.0.2": "10.0.0.1", "192.168.7.9": "192.168.7.1"}
"""Peer -> this machine's address on the way to it: 10.0.0.1, and 192.168.7.1 on another network."""
HERE, AWAY = "http://127.0.0.1:8000", "http://10.0.0.2:8000"


def worker(name: str, address: str | None) -> WorkerView:
    return worker_view(name, address=address)


def address(*workers: WorkerView, proxy: str = HERE, given: str | None = None) -> str:
    return meeting_address(workers, proxy, given, route=ROUTES.__getitem__)


@pytest.mark.parametrize(
    ("peer", "proxy", "expected"),
    [
        ("127.0.0.1", HERE, "127.0.0.1"),
        ("10.0.0.1", HERE, "127.0.0.1"),  # this machine, by its other name
        ("10.0.0.2", HERE, "10.0.0.1"),
        ("::ffff:10.0.0.2", HERE, "10.0.0.1"),
        ("192.168.7.9", HERE, "192.168.7.1"),
        ("127.0.0.1", AWAY, "10.0.0.1"),  # on the proxy's machine, which is another one
        ("10.0.0.2", AWAY, "10.0.0.1"),
        ("", HERE, "127.0.0.1"),  # over a Unix socket
    ],
)
def test_it_is_on_the_route_to_the_worker(peer: str, proxy: str, expected: str) -> None:
    assert address(worker("w", peer), proxy=proxy) == expected


def test_one_here_and_one_away_meet_where_both_come() -> None:
    assert address(worker("a", "127.0.0.1"), worker("b", "10.0.0.2")) == "10.0.0.1"


def test_several_addresses_are_for_the_operator_to_choose_from() -> None:
    workers = worker("a", "10.0.0.2"), worker("b", "192.168.7.9")
    with pytest.raises(ConfigError, match=re.escape("10.0.0.1 for worker a, 192.168.7.1 for worker b")) as refused:
        address(*workers)
    assert refused.value.field == "nccl_address"
    assert address(*workers, given="10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize("given", ["127.0.0.1", "localhost", "127.8.8.8", "::1"])
def test_loopback_is_refused_by_name_where_a_worker_is_elsewhere(given: str) -> None:
    with pytest.raises(
        ConfigError, match=f"nccl_address {given} is a loopback address, but worker b is on another machine"
    ) as refused:
        address(worker("a", "127.0.0.1"), worker("b", "10.0.0.2"), given=given)
    assert refused.value.field == "nccl_address"
    assert address(worker("a", "127.0.0.1"), given=given) == given
    assert address(given=given) == given, "no worker is there yet"


def test_a_name_that_means_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nccl_address: no-such-host\.invalid: "):
        address(given="no-such-host.invalid")


def test_a_proxy_that_says_nothing_of_addresses_leaves_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.9.9.9")
    assert address(worker("w", None)) == "10.9.9.9"


def test_the_kernel_knows_the_route() -> None:
    assert route_to("127.0.0.1") == "127.0.0.1"

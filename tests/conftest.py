"""Fixtures that any test may ask for. What is needed and missing fails by name; nothing is skipped."""

from __future__ import annotations

import functools
import gc
import os
import ssl
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.support.machine import descriptors
from tests.support.machine.redis_server import RedisServer
from tests.support.plugins import hangs, second_tries, seconds, sections
from tests.support.programs import forked
from tests.support.sources import SOURCES

os.environ["PYTHONPATH"] = SOURCES  # of programs that tests start: they run this checkout, whatever is installed
# Toy tensors gain nothing from threads, and threads that wait for each other take the cores from all else. Before torch's import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more about the machine than about the code. Each run of a revision has the same examples, or a
# change would be blamed for what luck has found: STENO_TEST_RANDOM=1 draws others.
SAME_EXAMPLES = os.environ.get("STENO_TEST_RANDOM") != "1"
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=SAME_EXAMPLES,
)
assert {"_get_local_constants", "_local_constants"} <= vars(providers).keys(), "Hypothesis has other names for them now"
if SAME_EXAMPLES:
    # Hypothesis also draws literals of the loaded code: here not, since these depend on the tests that this process ran before.
    providers._get_local_constants = lambda: providers._local_constants
settings.load_profile("any machine")

descriptors.allow_many()

# Every client that httpx makes would read the system's certificates again, 30 ms of processor time: at each poll of a test.
ssl.create_default_context = functools.cache(ssl.create_default_context)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(second_tries)
    config.pluginmanager.register(seconds)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without looking for garbage, and leaves what was collected out of every later look.

    A million objects are made here, and most stay. Looking at them again and again took a quarter of the processor time of a
    collection, and each process of xdist collects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        forked.tests_are_collected()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module of a section that `-m` leaves out is not imported: all modules together take 20 s of processor time."""
    return sections.left_out(collection_path, config.option.markexpr) or None


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(settings: Any) -> bool:
    hangs.end_after(settings.timeout)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> bool:
    hangs.forget()
    return True


@pytest.fixture(autouse=True)
def transformers_is_as_it_was() -> Iterator[None]:
    """Fails the test that leaves transformers changed. While it loads a model, its `tie_weights` is an empty function, for the
    whole process. Two loads at a time may leave it so: models that later tests load would then lack their heads."""
    yield
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    until = time.monotonic() + 60
    while base is not None and base.tie_weights.__name__ == "empty_func":  # a load may still be under way
        assert time.monotonic() < until, "two models were loaded at a time in this process"
        time.sleep(0.05)


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes into the user's home: a proxy on Redis has its archive there by default. Programs inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real redis-server for the whole run. Use trial ids of your own; do not kill or flush it (make one for that)."""
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture(scope="session")
def redis_cluster_url() -> Iterator[str]:
    """A real cluster: one node that owns every slot."""
    server = RedisServer(cluster=True)
    yield server.url
    server.close()

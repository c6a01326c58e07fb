"""The cache of conversations' ends: right about what it holds, bounded, and never in the way of the store."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

from steno_proxy.config.settings import ProxySettings
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.path_cache import PathCache
from steno_proxy.store.interface import TokenPath
from steno_proxy.store.memory.store import MemoryStore

REPLY = {"role": "assistant", "content": "x"}


def path(n_bytes: int) -> TokenPath:
    return TokenPath(bytes(n_bytes), REPLY)


def test_a_turn_takes_the_place_of_what_it_goes_on_from() -> None:
    paths = PathCache()
    paths.put("t", 1.0, "one", path(40), None)
    paths.put("t", 1.0, "two", path(80), "one")
    assert paths.get("t", 1.0, "one") is None
    assert paths.get("t", 1.0, "two") == path(80) and paths.held_bytes < 80 + 2000
    paths.put(
        "t", 1.0, "three", path(10**8), "two"
    )  # too large to be kept, and what it goes on from is no end any more
    assert paths.held_bytes == 0


def test_the_least_recently_used_go_first() -> None:
    paths = PathCache(max_bytes=450_000)
    for number in range(4):
        paths.put("t", 1.0, f"{number}", path(100_000), None)
    paths.get("t", 1.0, "0")
    paths.put("t", 1.0, "4", path(100_000), None)
    assert paths.get("t", 1.0, "0") is not None and paths.get("t", 1.0, "1") is None
    assert 400_000 < paths.held_bytes <= 450_000


def test_one_that_would_push_out_the_others_is_not_kept() -> None:
    paths = PathCache(max_bytes=400)
    paths.put("t", 1.0, "one", path(101), None)
    assert paths.get("t", 1.0, "one") is None and paths.held_bytes == 0


def test_a_trial_whose_name_is_in_use_again_finds_nothing_of_the_one_before() -> None:
    paths = PathCache()
    paths.put("t", 1.0, "one", path(40), None)
    assert paths.get("t", 2.0, "one") is None


def test_short_paths_and_long_replies_weigh_what_they_hold() -> None:
    tracemalloc.start()
    try:
        paths = PathCache(max_bytes=2 * 2**20)
        for number in range(20_000):
            reply = {"role": "assistant", "content": "x" * 100, "reasoning_content": f"{number}" * 100}
            paths.put(f"trial-{number}", 1.0, f"{number:012x}", TokenPath(bytes(40), reply), None)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert paths.held_bytes <= 2 * 2**20 and held < 3 * 2**20


async def test_by_default_the_newest_paths_of_three_hundred_long_conversations_are_held() -> None:
    """Of 100,000 tokens each. Else nearly every turn of theirs would read the whole path from the store again."""
    cache = Recorder(MemoryStore(), cache_bytes=ProxySettings().tree_cache_bytes, implicit=False)
    long, tree, recordings = path(4 * 100_000), SimpleNamespace(ids=["one"]), list[Any]()
    for number in range(300):
        recordings.append(SimpleNamespace(trial_id=f"t{number}", session=SimpleNamespace(created_at=1.0)))
        cache.keep_path(recordings[-1], "one", long, None)
    for recording in recordings:
        assert await cache.path(recording, 0, tree) == long  # type: ignore[arg-type]  # the store has none

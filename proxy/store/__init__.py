"""Where sessions rest. `make_store` is all that the rest of the proxy needs to know of the implementations."""

from __future__ import annotations

from proxy.store.base import SessionStore


def make_store(redis_url: str | None) -> SessionStore:
    """The store for a URL (redis://, rediss://, unix://, redis+cluster://, rediss+cluster://); None: in this process's memory.

    Not connected yet: `await store.open()`. Raises ConfigError for another scheme.
    """
    if redis_url is None:
        from proxy.store.memory import MemoryStore

        return MemoryStore()
    from proxy.store.redis import RedisStore  # redis-py is imported only where it is used

    return RedisStore(redis_url)

"""Texts of tokens in Redis: the `TokenTextsStore` protocol for any number of replicas. The schema is schema.py."""

from __future__ import annotations

from steno_proxy.store.redis.link.redis_link import RedisLink, Script
from steno_proxy.store.redis.schema import TOKEN_TEXTS, TOKEN_TEXTS_SEEN
from steno_proxy.store.token_texts import MOST_BYTES, MOST_TOKENIZERS


class RedisTokenTexts:
    """Every call is one round trip and may be repeated."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._script = Script("token_texts")

    async def keys(self) -> list[str]:
        [found] = await self._link.ask(("HKEYS", TOKEN_TEXTS))
        return sorted(key.decode() for key in found)

    async def get(self, key: str) -> bytes | None:
        [found] = await self._link.ask(("HGET", TOKEN_TEXTS, key))
        return found  # type: ignore[no-any-return]

    async def keep(self, key: str, piece: bytes) -> None:
        if len(piece) <= MOST_BYTES:
            await self._seen(key, piece)

    async def touch(self, key: str) -> bool:
        return await self._seen(key, b"")

    async def _seen(self, key: str, piece: bytes) -> bool:
        args = [key, MOST_TOKENIZERS, MOST_BYTES, piece]
        return bool(await self._link.run(self._script, [TOKEN_TEXTS, TOKEN_TEXTS_SEEN], args))

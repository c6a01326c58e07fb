"""HTTP to a vLLM server: the routes that give token ids, and no more. Over aiohttp, which LiteLLM brings.

LiteLLM itself would leave the ids out. An answer with an error status becomes an error of ours (`engines/upstream_errors.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from steno.contracts.errors import ConfigError, EngineFailed, StenoError
from steno_worker.engines.upstream_errors import translate

CONNECT_S = 10.0
SESSION = "x-session-id"
"""Header with the trial: a router in front of several servers can keep a conversation at the one that has it in its cache."""
MAX_LINE_BYTES = 8 * 2**20
"""The first event of a stream repeats the whole prompt's ids: at 1,000,000 tokens some 7 MB."""
_DATA, _DONE = b"data:", b"[DONE]"
_decode = msgspec.json.Decoder().decode


class VllmServer:
    """Args: api_base: as LiteLLM takes it, up to /v1. key: "" where none is asked for. timeout_s: of silence.

    Raises: ConfigError: no URL.
    """

    def __init__(self, api_base: str | None, key: str, timeout_s: float) -> None:
        parts = urlsplit(api_base or "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("api_base: a vLLM server needs its URL, http://HOST:PORT/v1", field="api_base")
        self.context_tokens = 0  # for overflows whose text has no numbers; known once the model is
        self._root = (api_base or "").rstrip("/").removesuffix("/v1")
        self._key = key
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=self._timeout,
            headers={"authorization": f"Bearer {self._key}"} if self._key else {},
            read_bufsize=MAX_LINE_BYTES // 2,  # aiohttp's longest line is twice that
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str) -> Any:
        """Raises: StenoError."""
        return await self._whole("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Raises: StenoError."""
        return await self._whole("POST", path, body)

    async def stream(self, path: str, body: Mapping[str, Any], trial_id: str) -> AsyncGenerator[dict[str, Any], None]:
        """Events of a streamed answer, without the last `[DONE]`. Closing it closes the connection, which cancels in the server.

        Args: trial_id: said in `SESSION`; "": of no trial.
        Raises: StenoError: also for an error event, and for a stream that ends without `[DONE]`.
        """
        try:
            async with self._request("POST", path, body, {SESSION: trial_id} if trial_id else {}) as answer:
                await self._check(answer)
                async for line in answer.content:
                    if not line.startswith(_DATA):
                        continue
                    data = line[len(_DATA) :].strip()
                    if data == _DONE:
                        return
                    event = _decode(data)
                    if "error" in event:
                        raise self._refused(_code(event), event, {})
                    yield event
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._unreachable(error) from error
        raise EngineFailed("the vLLM server's stream ended before the completion did")

    async def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            async with self._request(method, path, body) as answer:
                await self._check(answer)
                return _decode(await answer.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._unreachable(error) from error

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str] | None = None
    ) -> Any:
        if self._session is None:
            raise EngineFailed("the engine is not started")
        data = None if body is None else msgspec.json.encode(body)
        headers = {**(headers or {}), **({"content-type": "application/json"} if body is not None else {})}
        return self._session.request(method, self._root + path, data=data, headers=headers, allow_redirects=False)

    async def _check(self, answer: aiohttp.ClientResponse) -> None:
        if answer.status == 200:
            return
        raw = await answer.read()
        try:
            body = _decode(raw)
        except ValueError:
            body = raw[:1000].decode(errors="replace")
        raise self._refused(answer.status, body, {name.lower(): value for name, value in answer.headers.items()})

    def _refused(self, status: int, body: Any, headers: dict[str, str]) -> StenoError:
        return translate(_ServerRefusal(status, body, headers), context_tokens=self.context_tokens, key=self._key)

    def _unreachable(self, error: Exception) -> StenoError:
        what = str(error) or type(error).__name__
        if isinstance(error, asyncio.TimeoutError):
            return EngineFailed("the vLLM server did not answer in time")
        return EngineFailed(f"the vLLM server can't be reached, or broke off: {what}")


class _ServerRefusal(Exception):
    """An answer with an error status, in the shape that `translate` reads."""

    def __init__(self, status: int, body: Any, headers: dict[str, str]) -> None:
        error = body.get("error", body) if isinstance(body, dict) else body
        message = error.get("message") if isinstance(error, dict) else error
        super().__init__(str(message or f"status {status}"))
        self.message = str(self)
        self.status_code = status
        self.litellm_response_headers = headers


def _code(event: Mapping[str, Any]) -> int:
    code = event["error"].get("code") if isinstance(event["error"], dict) else None
    return code if isinstance(code, int) else 500

"""The link to Redis: one client for a server or a cluster, the scripts, and a bound on how long anything may take.

Nothing here knows what is stored. Every failure of Redis, of the network or of time becomes `StoreUnavailable`; the next call
tries again with a fresh connection, so that the store recovers by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator, Sequence
from hashlib import sha1
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError, NoScriptError, RedisClusterException, RedisError

from proxy.contracts.errors import ConfigError, StoreUnavailable
from proxy.store.redis_batch import Batches, Command

log = logging.getLogger(__name__)

T = TypeVar("T")
SCRIPTS = Path(__file__).parent / "lua"
MAX_CONNECTIONS = 64  # commits under way at once; more wait for their turn rather than open sockets
CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0  # a server that is alive answers in well under a millisecond; an AOF fsync may stall for a second
CALL_TIMEOUT_S = 5.0  # one whole call: waiting for a connection, connecting, one retry, the reply


class Script:
    """A Lua script, run by its digest and sent whole only to a server that does not have it yet."""

    def __init__(self, name: str) -> None:
        self.source = (SCRIPTS / f"{name}.lua").read_text()
        self.sha = sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class RedisLink:
    """`url`: redis://, rediss://, unix://, or redis+cluster:// and rediss+cluster:// (any node of the cluster).

    Cancel-safe: redis-py drops a connection whose reply was not read to its end.
    """

    def __init__(
        self,
        url: str,
        *,
        max_connections: int = MAX_CONNECTIONS,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        scheme = urlsplit(url).scheme
        if scheme not in ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster"):
            raise ConfigError(
                f"the Redis URL's scheme is {scheme!r}; redis, rediss, unix or redis+cluster were expected"
            )
        self.cluster = scheme.endswith("+cluster")
        self._url = url.replace("+cluster", "", 1) if self.cluster else url
        self._slots = asyncio.Semaphore(max_connections)
        self._max_connections = max_connections
        self._reply_timeout_s = reply_timeout_s
        self._call_timeout_s = call_timeout_s
        self._client: Any = None
        self._batches: Batches | None = None

    @property
    def client(self) -> Any:
        """redis-py's client, made on first use. Every command on it goes through `call`."""
        if self._client is None:
            options: dict[str, Any] = {
                "socket_timeout": self._reply_timeout_s,
                "socket_connect_timeout": CONNECT_TIMEOUT_S,
                "protocol": 2,
                # Once more over a fresh connection, for one that died while idle; every write here may be repeated. A reply
                # that did not come in time is not asked for again: whoever waits should hear of it within the bound.
                "retry": Retry(ConstantBackoff(0.02), 1, supported_errors=(ConnectionError,)),
            }
            if self.cluster:
                self._client = RedisCluster.from_url(self._url, max_connections=self._max_connections + 8, **options)
            else:
                self._client = Redis.from_url(self._url, max_connections=self._max_connections + 8, **options)
        return self._client

    async def close(self) -> None:
        if self._batches is not None:
            batches, self._batches = self._batches, None
            await batches.close()
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def call(self, command: Awaitable[T]) -> T:
        """Await a command of `client`. Raises StoreUnavailable within the bound."""
        with _answering():
            async with asyncio.timeout(self._call_timeout_s), self._slots:
                return await command

    async def ask(self, *commands: Command) -> list[Any]:
        """The replies to a few commands on one slot, in one round trip that others may share. Raises StoreUnavailable within the
        bound, also where one of them was refused."""
        if self.cluster:
            pipe = self.client.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            replies: list[Any] = await self.call(pipe.execute())
            return replies
        with _answering():
            return await self._shared(commands)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script. Raises StoreUnavailable within the bound."""
        rest = (len(keys), *keys, *args)
        if self.cluster:
            return await self.call(self._run_alone(script, rest))
        with _answering():
            try:
                return (await self._shared([("EVALSHA", script.sha, *rest)]))[0]
            except NoScriptError:  # a fresh server, or one that was restarted: EVAL leaves the script there
                return (await self._shared([("EVAL", script.source, *rest)]))[0]

    async def _run_alone(self, script: Script, rest: tuple[Any, ...]) -> Any:
        try:
            return await self.client.evalsha(script.sha, *rest)
        except NoScriptError:
            return await self.client.eval(script.source, *rest)

    async def _shared(self, commands: Sequence[Command]) -> list[Any]:
        if self._batches is None:
            self._batches = Batches(self.client, self._call_timeout_s)
        return await self._batches.submit(commands)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """What a Redis that does not do as asked raises, as StoreUnavailable."""
    try:
        yield
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        raise _unavailable(error) from error
    except RuntimeError as error:
        # uvloop's word for writing to a connection that the server has closed this very moment.
        if "handler is closed" not in str(error):
            raise
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> StoreUnavailable:
    log.warning("Redis did not do as asked: %s: %s", type(error).__name__, error)
    return StoreUnavailable(f"the session store does not answer ({type(error).__name__})")

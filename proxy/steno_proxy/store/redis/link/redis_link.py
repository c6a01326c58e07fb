"""The link to Redis: one client for a server, a cluster or what Sentinels name; the scripts; a bound on how long anything takes.

Nothing here knows what is stored. Every failure of Redis, of the network or of time becomes `StoreUnavailable`; the next call
tries again with a fresh connection, so that the store recovers by itself. The same holds for a primary that became a replica, or
has fewer replicas than are waited for: the next call connects anew, to whatever the address or the Sentinels name by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from hashlib import sha1
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import ConnectionError, NoScriptError, ReadOnlyError, RedisClusterException, RedisError

from steno.contracts.errors import StoreUnavailable
from steno_proxy.config.redis_url import RedisUrl, read_redis_url
from steno_proxy.store.redis.link.batch import Batches, Command
from steno_proxy.store.redis.link.greeting import refusal
from steno_proxy.store.redis.link.patience import LoopTimeout
from steno_proxy.store.redis.link.wait import NotReplicated, ReplicaWait, write_and_wait

log = logging.getLogger(__name__)

T = TypeVar("T")
SCRIPTS = Path(__file__).parent.parent / "lua"
MAX_CONNECTIONS = 64  # commits under way at once; more wait for their turn rather than open sockets
SENTINEL_TIMEOUT_S = 1.0  # for each of them; they are asked one after the other
REPLY_TIMEOUT_S = 2.0  # a server that is alive answers in well under a millisecond; an AOF fsync may stall for a second
CALL_TIMEOUT_S = 5.0  # one whole call: waiting for a connection, connecting, one retry, the reply
SAY_AGAIN_S = 10.0  # the same failure is logged so often: while Redis is away every request meets it
LEAVE_EVERY_S = 1.0  # connections are given up at most so often: many calls report one failover at once


class Script:
    """A Lua script, run by its digest and sent whole only to a server that does not have it yet. Those
    marked `allow-oom` (ends, the archive, accounts of runs, policies) run on a full Redis too: else nothing would make room."""

    def __init__(self, name: str) -> None:
        self.source = (SCRIPTS / f"{name}.lua").read_text()
        self.sha = sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class RedisLink:
    """Runs commands and scripts on Redis, each within a bound of time. Raises: StoreUnavailable, and nothing else.

    Args: url: see `read_redis_url`. wait: for replicas, at each write; its time is added to the bounds.

    Cancel-safe: redis-py drops a connection whose reply was not read to its end.
    """

    def __init__(
        self,
        url: str,
        *,
        wait: ReplicaWait | None = None,
        max_connections: int = MAX_CONNECTIONS,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._url = read_redis_url(url)
        self.cluster = bool(self._url.nodes)
        self._wait = wait
        self._slots = asyncio.Semaphore(max_connections)
        self._max_connections = max_connections
        waited_s = wait.timeout_s if wait else 0.0
        self._reply_timeout_s = reply_timeout_s + waited_s
        self._call_timeout_s = call_timeout_s + waited_s
        self._plain = not (self._url.nodes or self._url.sentinels)
        self._sentinel: Any = None
        self._client: Any = None
        self._batches: dict[bool, Batches] = {}  # by whether replicas are waited for
        self._left_at = -LEAVE_EVERY_S

    @property
    def waits(self) -> bool:
        """Whether writes wait for replicas."""
        return self._wait is not None

    @property
    def client(self) -> Any:
        """redis-py's client, made on first use. Every command on it goes through `call`."""
        if self._client is None:
            options: dict[str, Any] = {
                # redis-py's own timeouts run out while this process is busy, so of one server ours count (`patience.py`).
                "socket_timeout": None if self._plain else self._reply_timeout_s,
                "socket_connect_timeout": None if self._plain else self._reply_timeout_s,
                "protocol": 2,
                "max_connections": self._max_connections + 8,
                # Once more over a fresh connection, for one that died while idle; every write here may be repeated. A reply
                # that did not come in time is not asked for again: whoever waits should hear of it within the bound.
                "retry": Retry(ConstantBackoff(0.02), 1, supported_errors=(ConnectionError,)),
            }
            if self._url.sentinels:
                self._client = self._primary(self._url, options)
            elif self._url.nodes:
                nodes = [ClusterNode(host, port) for host, port in self._url.nodes]
                self._client = RedisCluster(startup_nodes=nodes, **(options | self._url.options))
            else:
                self._client = Redis.from_url(self._url.url, **options)
        return self._client

    def _primary(self, url: RedisUrl, options: dict[str, Any]) -> Any:
        """A client of whatever the Sentinels name at the time of each connection."""
        asking = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S, "protocol": 2}
        once = {"retry": Retry(NoBackoff(), 0)}  # the next Sentinel is asked instead
        sentinels: Any = Sentinel  # untyped
        self._sentinel = sentinels(list(url.sentinels), sentinel_kwargs=asking | once | url.sentinel_options)
        return self._sentinel.master_for(url.service, **(options | url.options))

    async def close(self) -> None:
        batches, self._batches = self._batches, {}
        for each in batches.values():
            await each.close()
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()
        if self._sentinel is not None:
            sentinel, self._sentinel = self._sentinel, None
            await sentinel.aclose()

    async def rest(self) -> None:
        """Close the connections that nobody uses now; what comes next opens one."""
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            if self.cluster:
                for node in self.client.get_nodes():
                    await node.disconnect_free_connections()
            else:
                await self.client.connection_pool.disconnect(inuse_connections=False)

    async def ping(self) -> None:
        """Raises StoreUnavailable, with Redis' own words if it refuses the connection."""
        try:
            await self.call(self.client.ping())
        except StoreUnavailable as error:
            lost = isinstance(error.__cause__, (ConnectionError, RedisClusterException))
            if lost and (said := await refusal(self._url)):
                raise StoreUnavailable(f"the session store refuses connections from this proxy: {said}") from error
            raise

    async def call(self, command: Awaitable[T]) -> T:
        """Await a command of `client`. Raises StoreUnavailable within the bound."""
        return await self._answered(self._bounded(command))

    async def ask(self, *commands: Command) -> list[Any]:
        """The replies to a few commands that read, on one slot, in one round trip that others may share. Raises StoreUnavailable
        within the bound, also where one of them was refused."""
        if not self.cluster:
            return await self._answered(self._shared(commands))
        pipe = self.client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = await self.call(pipe.execute())
        return replies

    async def write(self, *command: Any) -> Any:
        """The reply to one command, which writes to the key that is its first argument. Raises StoreUnavailable within the bound,
        also where too few replicas have it in time."""
        return await self._answered(self._sent(command, command[1], True))

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any], *, writes: bool = True) -> Any:
        """Run a script. Raises StoreUnavailable as `write` does.

        Args: writes: False: nothing that is promised to anybody, so replicas are not waited for.
        """
        return await self._answered(self._run(script, keys[0], (len(keys), *keys, *args), writes))

    async def _run(self, script: Script, key: str, rest: tuple[Any, ...], writes: bool) -> Any:
        try:
            return await self._sent(("EVALSHA", script.sha, *rest), key, writes)
        except NoScriptError:  # a fresh server, or one that was restarted: EVAL leaves the script there
            return await self._sent(("EVAL", script.source, *rest), key, writes)

    async def _sent(self, command: Command, key: str, writes: bool) -> Any:
        if not self.cluster:
            return (await self._shared([command], writes))[0]
        if writes and self._wait is not None:
            return await self._bounded(write_and_wait(self.client, key, command, self._wait))
        return await self._bounded(self.client.execute_command(*command))

    async def _bounded(self, command: Awaitable[T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        try:
            async with LoopTimeout(self._call_timeout_s), self._slots, self._patience():
                return await command
        finally:
            # redis-py writes within `asyncio.wait_for`, which loses a cancellation before Python 3.12; what comes then may be an
            # error of a server that is away.
            if task.cancelling() > cancelled:
                raise asyncio.CancelledError

    def _patience(self) -> AbstractAsyncContextManager[None]:
        """For one round trip, a connection for it included. Sentinels and clusters are asked several things, each bounded."""
        return LoopTimeout(self._reply_timeout_s) if self._plain else contextlib.nullcontext()

    async def _shared(self, commands: Sequence[Command], writes: bool = False) -> list[Any]:
        """Where writes wait for replicas, reads have round trips of their own; else both share them."""
        waited = writes and self._wait is not None
        batches = self._batches.get(waited)
        if batches is None:
            batches = Batches(
                self.client, self._call_timeout_s, self._wait if waited else None, patience=self._patience
            )
            self._batches[waited] = batches
        return await batches.submit(commands)

    async def _answered(self, command: Awaitable[T]) -> T:
        """What a Redis that does not do as asked raises, as StoreUnavailable."""
        asked = self._client
        try:
            return await command
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            if isinstance(error, (ReadOnlyError, NotReplicated)):
                await self._leave()
            elif self.cluster and asked is not None:
                await self._find_anew(asked, error)
            raise _unavailable(error) from error
        except RuntimeError as error:
            # uvloop's word for writing to a connection that the server has closed this very moment.
            if "handler is closed" not in str(error):
                raise
            raise _unavailable(error) from error

    async def _leave(self) -> None:
        """Connect anew for what comes next: what we speak to may not be the primary any more."""
        now = asyncio.get_running_loop().time()
        if self.cluster or now < self._left_at + LEAVE_EVERY_S:
            return
        self._left_at = now
        pool = self.client.connection_pool
        await pool.update_active_connections_for_reconnect()
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            await pool.disconnect(inuse_connections=False)

    async def _find_anew(self, client: Any, error: Exception) -> None:
        """Drop the client if it finds no node of the cluster: the next call asks the nodes of the URL. redis-py has replaced
        their names by addresses that the cluster told, and all of these may have changed (pods that were made anew). If these do
        not even refuse a connection, the time is over before all were asked, and the client then has no default node."""
        lost = isinstance(error, RedisClusterException) or client.get_default_node() is None
        if not lost or self._client is not client:
            return
        self._client = None
        with contextlib.suppress(RedisError, RedisClusterException, OSError, TimeoutError):
            await client.aclose()


class _Failures:
    """What was logged last, and when."""

    text, at = "", 0.0

    @classmethod
    def say(cls, error: Exception) -> None:
        text, now = f"{type(error).__name__}: {error}", time.monotonic()
        if text != cls.text or now >= cls.at + SAY_AGAIN_S:
            cls.text, cls.at = text, now
            log.warning("a Redis command failed: %s", text)


def _unavailable(error: Exception) -> StoreUnavailable:
    _Failures.say(error)
    if isinstance(error, NotReplicated):
        return StoreUnavailable(f"the session store did not replicate a write: {error}")
    return StoreUnavailable(f"the session store does not answer ({type(error).__name__})")

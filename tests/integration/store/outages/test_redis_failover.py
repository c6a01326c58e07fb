"""A primary dies and a replica takes its place: what was acknowledged under WAIT is there (I3); without it, it need not be."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from steno.contracts.errors import StoreUnavailable
from steno.contracts.records import Turn
from steno_proxy.store.redis.link.wait import ReplicaWait
from steno_proxy.store.redis.schema import trial_keys
from steno_proxy.store.redis.store import RedisStore
from tests.support.contracts.policy import spec
from tests.support.contracts.store import StoreContract
from tests.support.machine.redis_server import PATIENT, RedisSentinel, RedisServer
from tests.support.machine.tcprelay import TcpRelay
from tests.support.records.recordings import row, session, turn
from tests.support.waiting import insist

PATIENCE_S = 180.0  # for elections on a busy machine: a Sentinel that stood still for 2 s does nothing for 30 s
GOSSIP = ("--cluster-node-timeout", "2000")  # nodes hear of each other sooner
ONE = ReplicaWait(1, 5.0)
HASTY = ReplicaWait(1, 0.3)


class Pair:
    """A primary with a replica, the network between them, and one address in front."""

    def __init__(self, primary: RedisServer, replica: RedisServer, between: TcpRelay, front: TcpRelay) -> None:
        self.primary, self.replica, self.between, self.front = primary, replica, between, front

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.front.port}/0"

    def fail_over(self) -> None:
        """The primary is dead; its replica is the primary now, and the address leads to it."""
        self.primary.kill()
        self.replica.promote()
        self.front.target_port = self.replica.port
        self.front.cut()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    with contextlib.ExitStack() as servers:
        primary, replica = (servers.enter_context(contextlib.closing(RedisServer())) for _ in range(2))
        async with TcpRelay("127.0.0.1", primary.port) as between, TcpRelay("127.0.0.1", primary.port) as front:
            await asyncio.to_thread(replica.follow, between.port)
            yield Pair(primary, replica, between, front)


@contextlib.asynccontextmanager
async def opened(url: str, wait: ReplicaWait | None) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, wait=wait, **PATIENT)
    yield store
    await store.close()


class Load:
    """Agents of one trial each, every turn said again until it is acknowledged."""

    def __init__(self, store: RedisStore, trials: int = 6) -> None:
        self.store = store
        self.acknowledged: dict[str, list[Turn]] = {f"agent-{number}": [] for number in range(trials)}
        self._over = False

    async def agent(self, trial_id: str) -> None:
        await insist(lambda: self.store.register(session(trial_id)), PATIENCE_S)
        said = self.acknowledged[trial_id]
        while not self._over:
            one = turn(len(said), seed=sum(trial_id.encode()), text_bytes=50)
            commit = partial(self.store.commit, trial_id, one, row(one), now=1.0)
            assert await insist(commit, PATIENCE_S) == len(said)
            said.append(one)

    async def until(self, more: int) -> None:
        """Wait for so many more turns of each."""
        wanted = {trial_id: len(said) + more for trial_id, said in self.acknowledged.items()}
        deadline = time.monotonic() + PATIENCE_S
        while any(len(said) < wanted[trial_id] for trial_id, said in self.acknowledged.items()):
            assert time.monotonic() < deadline, "turns are not acknowledged any more"
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        agents = asyncio.gather(*map(self.agent, self.acknowledged))
        try:
            yield
        finally:
            self._over = True
            await agents

    async def check(self) -> None:
        for trial_id, said in self.acknowledged.items():
            found = await insist(partial(self.store.turns, trial_id))
            assert found == said, trial_id


async def test_behind_one_address_nothing_acknowledged_is_lost(pair: Pair) -> None:
    with contextlib.closing(RedisServer()) as another:
        async with opened(pair.url, ONE) as store:
            load = Load(store)
            async with load.going():
                await load.until(20)
                pair.fail_over()
                await asyncio.to_thread(another.follow, pair.replica.port)
                await load.until(5)
            await load.check()


async def test_without_waiting_a_failover_loses_what_was_acknowledged(pair: Pair) -> None:
    """The control: it is WAIT that keeps the promise, not luck."""
    async with opened(pair.url, None) as store:
        await store.register(session("lost"))
        first, second = turn(0), turn(1)
        await store.commit("lost", first, row(first), now=1.0)
        await asyncio.to_thread(pair.replica.until, lambda info: _has(pair.replica, "lost", 1))
        pair.between.pause()
        await store.commit("lost", second, row(second), now=1.0)
        pair.fail_over()
        assert await insist(lambda: store.turns("lost")) == [first]


def _knows(server: RedisServer, trial_id: str) -> bool:
    with server.client() as client:
        return bool(client.exists(trial_keys(trial_id).doc))


def _has(server: RedisServer, trial_id: str, turns: int) -> bool:
    with server.client() as client:
        return int(client.llen(trial_keys(trial_id).turns)) == turns


async def test_what_no_replica_has_is_an_error_and_may_be_said_again(pair: Pair) -> None:
    async with opened(pair.url, HASTY) as store:
        await insist(lambda: store.register(session("stalled")))
        one, later = turn(0), turn(1)
        pair.between.pause()
        for _ in range(3):  # said again, it changes nothing, and is on no replica yet all the same
            with pytest.raises(StoreUnavailable, match="0 replicas have the write, 1 are required"):
                await store.commit("stalled", one, row(one), now=1.0)
        assert await store.turns("stalled") == [one], "who only reads is answered"
        with pytest.raises(StoreUnavailable, match="did not replicate a write"):
            await store.complete("stalled", status="completed", reward=1.0, end_reason="harness", metrics={}, now=2.0)
        pair.between.resume()
        assert await insist(lambda: store.commit("stalled", one, row(one), now=1.0)) == 0
        assert _has(pair.replica, "stalled", 1), "acknowledged is replicated"
        await insist(
            lambda: store.complete("stalled", status="completed", reward=1.0, end_reason="harness", metrics={}, now=2.0)
        )
        pair.fail_over()
        assert (await insist(lambda: store.session("stalled"))).reward == 1.0
        assert await store.turns("stalled") == [one]
        assert later not in await store.turns("stalled")


async def test_a_turn_that_no_replica_has_is_nothing_to_go_on_from(pair: Pair) -> None:
    """I2: another proxy would continue it, and a failover would leave the new turn without its beginning."""
    async with opened(pair.url, HASTY) as store, opened(pair.url, HASTY) as other:
        first, second = turn(0), turn(1)
        await insist(lambda: store.register(session("begun")))
        await insist(lambda: store.commit("begun", first, row(first), now=1.0))
        assert len((await insist(lambda: other.tail("begun", 0))).rows) == 1
        pair.between.pause()
        with pytest.raises(StoreUnavailable, match="0 replicas have the write, 1 are required"):
            await store.commit("begun", second, row(second), now=1.0)
        with pytest.raises(StoreUnavailable, match="0 replicas have the write, 1 are required"):
            await other.tail("begun", 1)
        with pytest.raises(StoreUnavailable, match="0 replicas have the write, 1 are required"):
            await other.tail("begun", 0, known=1)
        for start, known in ((2, 0), (1, 1), (0, 2)):
            rows = (await other.tail("begun", start, known=known)).rows
            assert len(rows) == known, "who has nothing new to learn does not wait"
        pair.between.resume()
        assert len((await insist(lambda: other.tail("begun", 0))).rows) == 2


async def test_an_update_that_no_replica_has_is_told_to_nobody(pair: Pair) -> None:
    """I10: what a proxy hears of it, workers hear at once; after a failover nobody would know which version they serve."""
    async with opened(pair.url, HASTY) as store, opened(pair.url, HASTY) as other:
        update = spec()
        await insist(lambda: store.register(session("warm")))
        pair.between.pause()
        with pytest.raises(StoreUnavailable, match="0 replicas have the write, 1 are required"):
            await store.policies.post(update, now=1.0)
        [head] = await other.policies.heads()
        assert head.posted == update.update_id
        with pytest.raises(StoreUnavailable, match="0 replicas have the write, 1 are required"):
            await other.policies.update(update.update_id)
        pair.between.resume()
        assert (await insist(lambda: other.policies.update(update.update_id))).version == update.version
        pair.fail_over()
        assert (await insist(lambda: store.policies.heads())) == [head]


async def test_a_primary_that_was_demoted_is_left(pair: Pair) -> None:
    """Nobody closes the connections: it answers READONLY on them, for good."""
    async with opened(pair.url, None) as store:
        one = turn(0)
        await store.register(session("demoted"))
        await asyncio.to_thread(pair.replica.until, lambda info: _knows(pair.replica, "demoted"))
        pair.replica.promote()
        await asyncio.to_thread(pair.primary.follow, pair.replica.port)
        pair.front.target_port = pair.replica.port
        with pytest.raises(StoreUnavailable, match="ReadOnlyError"):
            await store.commit("demoted", one, row(one), now=1.0)
        assert await insist(lambda: store.commit("demoted", one, row(one), now=1.0)) == 0
        assert _has(pair.replica, "demoted", 1)


async def test_a_primary_whose_replica_was_promoted_is_left(pair: Pair) -> None:
    """Cut off, it still takes itself for the primary; nobody has what it writes."""
    async with opened(pair.url, HASTY) as store:
        one = turn(0)
        await insist(lambda: store.register(session("alone")))
        pair.replica.promote()
        pair.front.target_port = pair.replica.port
        with contextlib.closing(RedisServer()) as another:
            await asyncio.to_thread(another.follow, pair.replica.port)
            assert await insist(lambda: store.commit("alone", one, row(one), now=1.0)) == 0
            assert _has(pair.replica, "alone", 1) and _has(another, "alone", 1)


# -- Sentinel


@pytest.fixture
def watched() -> Iterator[tuple[str, RedisServer, list[RedisServer], list[RedisSentinel]]]:
    """A URL of three Sentinels, their primary and its two replicas."""
    with contextlib.ExitStack() as processes:
        servers = [processes.enter_context(contextlib.closing(RedisServer())) for _ in range(3)]
        for replica in servers[1:]:
            replica.follow(servers[0].port)
        sentinels = [processes.enter_context(contextlib.closing(RedisSentinel(servers[0].port))) for _ in range(3)]
        for sentinel in sentinels:
            sentinel.knows("steno", others=2, replicas=2)
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        yield f"redis+sentinel://{hosts}/steno/0", servers[0], servers[1:], sentinels


async def test_what_asks_a_server_that_is_away_again_and_again_can_be_cancelled() -> None:
    """As a proxy that is told to stop ends its sweeps. redis-py loses cancellations, and then says that the server is away."""

    async def ask(store: RedisStore) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                await store.now()

    with contextlib.closing(RedisServer()) as server, contextlib.closing(RedisSentinel(server.port)) as sentinel:
        store = RedisStore(
            f"redis+sentinel://127.0.0.1:{sentinel.port}/steno/0", reply_timeout_s=0.5, call_timeout_s=1.0
        )
        sentinel.knows("steno", others=0, replicas=0)
        await insist(store.open)
        await asyncio.gather(*(insist(store.now) for _ in range(8)))
        server.pause()
        for steps in range(1, 33):
            task = asyncio.create_task(ask(store))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task}, timeout=60)
            assert task.cancelled(), f"after {steps} steps of the event loop"
        server.resume()
        await store.close()


def role_of(server: RedisServer) -> str:
    with server.client() as client:
        return str(client.info("replication")["role"])


async def test_sentinels_name_the_new_primary(
    watched: tuple[str, RedisServer, list[RedisServer], list[RedisSentinel]],
) -> None:
    url, primary, replicas, sentinels = watched
    async with opened(url, ONE) as store:
        await store.open()
        load = Load(store)
        async with load.going():
            await load.until(20)
            sentinels[0]._process.kill()  # the first that the URL names: two are enough
            primary.kill()
            await load.until(10)
        await load.check()
    deadline = time.monotonic() + PATIENCE_S
    while sorted(map(role_of, replicas)) != ["master", "slave"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


# -- Cluster


@pytest.fixture
def cluster() -> Iterator[tuple[RedisServer, RedisServer]]:
    """A node with every slot, and its replica."""
    with contextlib.ExitStack() as servers:
        primary = servers.enter_context(contextlib.closing(RedisServer(cluster=True, options=GOSSIP)))
        replica = servers.enter_context(contextlib.closing(RedisServer(cluster=True, slots=False, options=GOSSIP)))
        _replicate(replica, primary)
        yield primary, replica


def _replicate(replica: RedisServer, primary: RedisServer) -> None:
    """`replica` joins the cluster of `primary`, follows it, and is known to it."""

    def nodes(client: Any) -> str:
        return str(client.execute_command("CLUSTER", "NODES"))

    deadline = time.monotonic() + PATIENCE_S
    with replica.client() as one, primary.client() as other:
        bus = int(other.config_get("cluster-port")["cluster-port"])
        own, node = (client.execute_command("CLUSTER", "MYID").decode() for client in (one, other))
        asked_at = 0.0
        while node not in nodes(one) or own not in nodes(other):
            assert time.monotonic() < deadline, "they have not met"
            if time.monotonic() > asked_at + 3.0:  # a handshake is forgotten after 2 s
                asked_at = time.monotonic()
                one.execute_command("CLUSTER", "MEET", "127.0.0.1", primary.port, bus)
            time.sleep(0.05)
        one.execute_command("CLUSTER", "REPLICATE", node)
        while str(replica.port) not in str(other.execute_command("CLUSTER", "SLOTS")):
            assert time.monotonic() < deadline, "the primary knows no replica"
            time.sleep(0.05)
    replica.until(lambda info: info["role"] == "slave" and info["master_link_status"] == "up")


async def test_in_a_cluster_nothing_acknowledged_is_lost(cluster: tuple[RedisServer, RedisServer]) -> None:
    primary, replica = cluster
    with contextlib.closing(RedisServer(cluster=True, slots=False, options=GOSSIP)) as another:
        async with opened(primary.url, ONE) as store:
            load = Load(store)
            async with load.going():
                await load.until(20)
                primary.kill()
                with replica.client() as client:
                    client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
                await asyncio.to_thread(_replicate, another, replica)
                await load.until(5)
            await load.check()


# -- the same promises as ever


@pytest.fixture(scope="module", params=["server", "cluster"])
def replicated(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with contextlib.ExitStack() as servers:
        in_cluster = request.param == "cluster"
        options = GOSSIP if in_cluster else ()
        primary = servers.enter_context(contextlib.closing(RedisServer(cluster=in_cluster, options=options)))
        replica = servers.enter_context(
            contextlib.closing(RedisServer(cluster=in_cluster, slots=False, options=options))
        )
        if in_cluster:
            _replicate(replica, primary)
        else:
            replica.follow(primary.port)
        yield primary


class TestWaitingStore(StoreContract):
    @pytest.fixture
    async def store(self, replicated: RedisServer) -> AsyncIterator[RedisStore]:
        with replicated.client() as client:
            client.flushall()
        async with opened(replicated.url, ReplicaWait(1, 30.0)) as store:
            yield store

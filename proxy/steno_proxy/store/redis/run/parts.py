"""The parts of a run that a decision sees, and what it makes of them: `RunAccount` over what was read from Redis.

What a decision looks at is noted, and compared by `run_write.lua` with what is there when it writes. What it was not given it
asks for (`NotRead`). How records are written is docs/recording-format.md: JSON with fields of one letter. Fields that only
other releases know are written as they were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from steno.contracts.lenient import read_json
from steno.contracts.records import Group
from steno_proxy.store.redis.schema import RunKeys
from steno_proxy.store.runs.account import (
    NOT_SETTLED,
    REQUEST_TTL_S,
    TAKEN_S,
    GroupState,
    GroupStatus,
    RegisteredTrainer,
    RunAccount,
    TrialAccount,
    in_order,
)

T = TypeVar("T")
R = TypeVar("R", GroupStatus, TrialAccount)

CHUNK = 1000
"""Arguments of one command: Lua has room for some thousands."""
_KEYS = {name: number for number, name in enumerate(RunKeys._fields, 1)}
_FIRST_REQUEST = len(_KEYS) + 1
_TRAINER = ("name", "epoch", "at")


def read(kind: type[R], raw: bytes) -> R:
    """A record of a run, from its JSON; fields that only other releases know stay in `other`."""
    kept = msgspec.json.decode(raw)
    other = {name: value for name, value in kept.items() if name not in kind.__struct_encode_fields__}
    return msgspec.convert({**kept, "other": other}, kind, strict=False)


def to_json(record: GroupStatus | TrialAccount) -> str:
    """The JSON of a record. Times are texts: Lua, in which older releases write them, would cut them."""
    kept = msgspec.to_builtins(record)
    other = kept.pop("other", {})
    return _json({name: repr(value) if isinstance(value, float) else value for name, value in kept.items()} | other)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _read_trainer(raw: list[bytes | None]) -> RegisteredTrainer:
    name, epoch, at = raw
    return RegisteredTrainer((name or b"").decode(), int(epoch or 0), float(at or 0))


def _seen(raw: bytes | None) -> str | bool:
    """As cmsgpack gives it to Lua, which has no types for bytes and for what is not there."""
    return False if raw is None else raw.decode()


@dataclass
class RunQuery:
    """The parts of a run that are to be read, as run_read.lua takes them.

    groups: name -> how many more of its trials end now: if these may complete the group, its record and trials are read too;
    WHOLE: in any case; STATE: never. due: at most so many groups past their deadline. most, least: all groups that can be leased
    and were leased or passed over before, and at most `most` new ones; the records and trials of the new ones, if there are
    `least` groups in all. leased: all leased groups. at: the time that counts; None: the server's.
    """

    groups: dict[str, int] = field(default_factory=dict)
    trials: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    trainer: bool = False
    requests: list[str] = field(default_factory=list)
    due: int = 0
    most: int = 0
    least: int = 0
    leased: bool = False
    at: float | None = None

    def __bool__(self) -> bool:
        return self != RunQuery()

    def add(self, other: RunQuery) -> None:
        for name, ends in other.groups.items():
            self.groups[name] = self.groups.get(name, 0) + ends
        self.trials += other.trials
        self.taken += other.taken
        self.trainer, self.leased = self.trainer or other.trainer, self.leased or other.leased
        self.due = max(self.due, other.due)
        if other.most:
            self.least = min(self.least, other.least) if self.most else other.least
            self.most += other.most


WHOLE, STATE = 1 << 30, -1


class NotRead(Exception):
    """A decision looks at something that was not read."""

    def __init__(self, query: RunQuery) -> None:
        self.query = query


class ReadParts:
    """What was read so far, and the names of the last reply that had some."""

    def __init__(self) -> None:
        self.now: float | None = None
        self.parts: dict[str, dict[str, Any]] = {
            part: {} for part in ("groups", "docs", "trials", "taken", "trainer", "requests", "past")
        }
        self.due: list[str] = []
        self.returned: list[str] = []
        self.fresh: list[str] = []
        self.leased: list[str] = []
        self.next: list[float] = []

    def add(self, query: RunQuery, reply: list[Any]) -> None:
        now, *hashes, trainer, requests, due, returned, fresh, leased, next_due, next_end = reply
        self.now = float(now)
        for part, flat in zip(self.parts.values(), hashes, strict=False):
            part.update(zip(map(bytes.decode, flat[::2]), flat[1::2], strict=True))
        if trainer:
            self.parts["trainer"][""] = trainer if any(trainer) else None
        self.parts["requests"].update(zip(query.requests, requests, strict=True))
        if query.due or query.most or query.leased:
            names = ([name.decode() for name in some] for some in (due, returned, fresh, leased))
            self.due, self.returned, self.fresh, self.leased = names
            self.next = [float(at) for at in (next_due, next_end) if at]


class ReadHash(MutableMapping[str, T]):
    """One hash of a run, as far as it was read. seen: what was looked at. put: what was changed; None: removed.

    Args: ask: for what was not read.
    """

    def __init__(self, raw: dict[str, Any], decode: Callable[[Any], T], ask: Callable[[list[str]], RunQuery]) -> None:
        self._raw = raw
        self._decode = decode
        self._ask = ask
        self._decoded: dict[str, T | None] = {}
        self.seen: dict[str, Any] = {}
        self.put: dict[str, T | None] = {}

    def read(self, names: Sequence[str]) -> None:
        """Raises NotRead, where some were not."""
        if more := [name for name in names if name not in self._raw and name not in self.put]:
            raise NotRead(self._ask(more))

    def peek(self, name: str) -> T | None:
        """As it is, without noting that it was looked at."""
        return self.put[name] if name in self.put else self._before(name)

    def _before(self, name: str) -> T | None:
        if name not in self._decoded:
            self.read([name])
            raw = self._raw[name]
            self._decoded[name] = None if raw is None else self._decode(raw)
        return self._decoded[name]

    def before(self, name: str) -> T | None:
        """As it was read; None also where nobody looked."""
        return self._before(name) if name in self.seen else None

    def __getitem__(self, name: str) -> T:
        value = self.peek(name)
        if name not in self.put:
            self.seen[name] = self._raw[name]
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: T) -> None:
        self.put[name] = value

    def __delitem__(self, name: str) -> None:
        self.put[name] = None

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove an entry without reading it; returns None."""
        self.put[name] = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.put)

    def __len__(self) -> int:
        return len(self.put)


class RedisRun(RunAccount):
    """A run as a decision sees it: the parts that were read, and what the decision changed.

    Args: found: what was read; decisions run on it once. totals, ledger: what is to be added.
    """

    def __init__(self, found: ReadParts) -> None:
        super().__init__()

        def part(name: str, decode: Callable[[Any], T], ask: Callable[[list[str]], RunQuery]) -> ReadHash[T]:
            return ReadHash(found.parts[name], decode, ask)

        def groups(names: list[str]) -> RunQuery:
            return RunQuery(groups=dict.fromkeys(names, STATE))

        def whole(names: list[str]) -> RunQuery:
            return RunQuery(groups=dict.fromkeys(names, WHOLE))

        self.groups: ReadHash[GroupStatus] = part("groups", partial(read, GroupStatus), groups)
        self.records: ReadHash[Group] = part("docs", partial(read_json, Group), whole)
        self.trials: ReadHash[TrialAccount] = part(
            "trials", partial(read, TrialAccount), lambda names: RunQuery(trials=names)
        )
        self.taken: ReadHash[float] = part("taken", float, lambda names: RunQuery(taken=names))
        self.trainers: ReadHash[RegisteredTrainer] = part("trainer", _read_trainer, lambda _: RunQuery(trainer=True))
        self.requests: ReadHash[list[tuple[str, str]]] = part(
            "requests", msgspec.json.decode, lambda names: RunQuery(requests=names)
        )
        self.past: ReadHash[GroupStatus] = part("past", partial(read, GroupStatus), groups)
        self._found = found
        found.returned.sort(key=lambda name: in_order(self.groups.peek(name)))
        self._queued = dict.fromkeys([*found.returned, *found.fresh])
        self._settled: list[tuple[str, float]] = []
        self._saw_leased = False  # the names in `found`

    # -- RunAccount

    def due(self, now: float) -> list[str]:
        return [
            name
            for name in self._found.due
            if (status := self.groups.peek(name)) and status.state is GroupState.RUNNING
        ]

    def waiting(self, now: float) -> Iterator[str]:
        put = (name for name, status in self.groups.put.items() if status is not None and status.queued)
        if more := [name for name in put if name not in self._queued]:
            statuses = {
                name: status for name in (*self._queued, *more) if (status := self.groups.peek(name)) is not None
            }
            self._queued = dict.fromkeys(sorted(statuses, key=lambda name: in_order(statuses[name])))
        for name in self._queued:
            status = self.groups.peek(name)
            if status is not None and status.waits(now):
                yield name

    def leased(self) -> list[str]:
        self._saw_leased = True
        batch = (name for name, status in self.groups.put.items() if status and status.state is GroupState.LEASED)
        return list(dict.fromkeys([*self._found.leased, *batch]))

    def next_at(self, now: float) -> float | None:
        put = [status.expires_at for status in self.groups.put.values() if status is not None and status.queued]
        return min((at for at in (*self._found.next, *put) if at is not None), default=None)

    def next_order(self) -> str:
        return ""

    def whole(self, names: Sequence[str]) -> None:
        self.records.read(names)

    def settle(self, member: str, now: float) -> None:
        """What was counted need not be remembered for longer than TAKEN_S, like all that was settled before."""
        self._settled.append((member, now))

    # -- what is written

    def got_ready(self) -> bool:
        """Whether a group can be leased that could not."""
        return any(
            status is not None
            and status.state is GroupState.READY
            and ((before := self.groups.before(name)) is None or before.state is not GroupState.READY)
            for name, status in self.groups.put.items()
        )

    def plan(self, requests: Sequence[str]) -> tuple[bytes, bool]:
        """For run_write.lua, and whether it writes anything. Args: requests: in the order of their keys."""
        hashes: dict[str, tuple[ReadHash[Any], Callable[[Any], str]]] = {
            "groups": (self.groups, to_json), "docs": (self.records, Group.model_dump_json), "trials": (self.trials, to_json),
            "past": (self.past, to_json),
        }  # fmt: skip
        seen: list[Any] = []
        for key, part in (*((key, part) for key, (part, _) in hashes.items()), ("taken", self.taken)):
            for some in _chunks([(name, _seen(raw)) for name, raw in part.seen.items()]):
                seen.append(("ZMSCORE" if key == "taken" else "HMGET", _KEYS[key], *zip(*some, strict=True)))
        for raw in self.trainers.seen.values():
            seen.append(("HMGET", _KEYS["trainer"], _TRAINER, [_seen(value) for value in raw or [None] * 3]))
        if self._saw_leased:
            seen.append(("ZRANGE", _KEYS["leased"], (0, -1), self._found.leased))
        for name, raw in self.requests.seen.items():
            seen.append(("MGET", _FIRST_REQUEST + requests.index(name), (), (_seen(raw),)))

        writes: list[Any] = []

        def write(command: str, key: str | int, *arguments: Any) -> None:
            writes.append((command, key if isinstance(key, int) else _KEYS[key], arguments))

        ready, left = self._queue(write)
        for key, (part, encode) in hashes.items():
            put = [(name, value) for name, value in part.put.items() if key != "groups" or name not in ready]
            for some in _chunks([word for name, value in put if value is not None for word in (name, encode(value))]):
                write("HSET", key, *some)
            for some in _chunks([name for name, value in put if value is None]):
                write("HDEL", key, *some)
        for some in _chunks([word for name, at in self.taken.put.items() for word in (_score(at), name)]):
            write("ZADD", "taken", *some)
        for trainer in filter(None, self.trainers.put.values()):
            heard_at = repr(trainer.heard_at) if trainer.heard_at else "0"
            write("HSET", "trainer", "name", trainer.name, "epoch", trainer.epoch, "at", heard_at)
        for name, held in self.requests.put.items():
            write("SET", _FIRST_REQUEST + requests.index(name), _json(held), "EX", round(REQUEST_TTL_S))
        for member, now in self._settled:
            write("ZADD", "taken", "XX", repr(now), member)
        for now in {now for _, now in self._settled}:
            write("ZREMRANGEBYSCORE", "taken", "-inf", repr(now - TAKEN_S))
        if self.over is not None:
            write("HSET", "totals", "rollouts:over", int(self.over))
        for key, counts in (("totals", self.totals), ("ledger", self.ledger)):
            for name, by in counts.items():
                write("HINCRBY", key, name, by)
        plan = {"seen": seen, "ready": list(ready.values()), "writes": writes, "left": left}
        return msgspec.msgpack.encode(plan), bool(ready or writes)

    def _queue(self, write: Callable[..., None]) -> tuple[dict[str, Any], list[str]]:
        """Moves groups in `due`, `ready` and `leased` to where they belong now. Returns `ready` by name, and `left`."""
        ready: dict[str, Any] = {}
        left: list[str] = []
        claims: dict[str, list[GroupStatus]] = {}
        for name, after in self.groups.put.items():
            before = self.groups.before(name)
            ran = before is not None and before.state is GroupState.RUNNING
            runs = after is not None and after.state is GroupState.RUNNING
            queued = before if before is not None and before.queued else None
            if runs and not ran and (group := self.records[name]).deadline_s is not None:
                write("ZADD", "due", repr(group.created_at + group.deadline_s), name)
            elif ran and not runs:
                write("ZREM", "due", name)
            if after is not None and after.queued:
                leased = after.state is GroupState.LEASED
                again = leased and (before is None or before.granted != after.granted)
                if not after.order:
                    ready[name] = (name, to_json(after), after.consumer if leased else False)
                elif again:
                    claims.setdefault(after.consumer, []).append(after)
                if leased:
                    write("ZADD", "leased", repr(after.expires_at), name)
                elif queued is not None and queued.state is GroupState.LEASED:
                    write("ZADD", "leased", 0, name)
                if again and queued is not None:
                    left.append(queued.consumer)
            elif queued is not None:
                write("XACK", "ready", "trainers", queued.order)
                write("XDEL", "ready", queued.order)
                write("ZREM", "leased", name)
                left.append(queued.consumer)
        for consumer, statuses in claims.items():
            for some in _chunks(sorted(statuses, key=in_order)):
                orders = [status.order for status in some]
                write("XCLAIM", "ready", "trainers", consumer, 0, *orders, "FORCE", "JUSTID", "LASTID", orders[-1])
        return ready, list(dict.fromkeys(filter(None, left)))


def _score(at: float | None) -> str:
    return "+inf" if at == NOT_SETTLED else repr(at)


def _chunks(items: list[Any]) -> list[list[Any]]:
    return [items[at : at + CHUNK // 2] for at in range(0, len(items), CHUNK // 2)]

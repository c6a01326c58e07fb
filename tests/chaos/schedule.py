"""What a seed does to a deployment, drawn up front: who asks what, and which fault comes when. Pure.

Times are seconds from the start of the seed. Agents and faults name replicas, workers and links by number.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

REPLICAS, WORKERS = 3, 3
OTHERS = 2
"""Workers after those, of another model and its policy."""
MODELS = ("chaos", "other")
ANY = "any"
"""A name that no model has: it means the default policy's model, the first of MODELS."""
FAULTS_WITHIN_S = 2.5
FAULTS = {
    # kind: (weight, seconds that it lasts at least, at most); what it is done to is drawn from the kind's first word
    "worker-kill": (4, 0.0, 1.0),  # SIGKILL, and started again so much later
    "worker-stop": (2, 0.2, 2.5),  # SIGSTOP; longer than silence_s + resume_grace_s: its streams are lost
    "worker-drain": (1, 0.0, 0.5),  # SIGTERM
    "replica-kill": (3, 0.0, 0.5),
    "replica-stop": (1, 0.2, 2.0),
    "replica-drain": (1, 0.0, 0.3),
    "replica-clock": (1, 0.5, 2.0),  # its wall clock jumps ahead, and back
    "link-cut": (3, 0.0, 0.0),  # between a worker and a replica
    "link-half": (1, 0.0, 0.0),
    "link-stall": (2, 0.2, 3.0),
    "link-slow": (1, 0.2, 1.0),
    "agents-cut": (2, 0.0, 0.0),  # all connections of agents to a replica
    "agents-slow": (1, 0.2, 1.0),
    "agents-bytes": (1, 0.0, 0.0),  # cut once so many more bytes have passed
    "store-cut": (2, 0.0, 0.0),  # between a replica and Redis
    "store-stall": (1, 0.2, 1.5),
    "redis-kill": (2, 0.0, 0.5),
    "redis-stop": (1, 0.2, 1.5),
    "redis-pause": (1, 0.2, 1.0),  # CLIENT PAUSE
    "redis-full": (1, 0.2, 1.0),  # maxmemory, noeviction
    "redis-disk": (1, 0.2, 0.6),  # its disk is full: with appendfsync always it gives up
    "policy-update": (3, 0.0, 0.0),
}
OTHER = {
    # as FAULTS; most seeds have one of these, for any worker or link, also of the other model's workers
    "worker-kill": (3, 0.0, 1.0),
    "worker-stop": (3, 0.2, 3.0),
    "worker-drain": (1, 0.0, 0.5),
    "link-cut": (2, 0.0, 0.0),
    "link-stall": (2, 0.2, 3.0),
    "policy-other": (3, 0.0, 0.0),
}
LONG = {
    # as FAULTS; one in each seed of a longer run
    "worker-freeze": (2, 20.0, 60.0),  # SIGSTOP
    "replica-freeze": (1, 20.0, 60.0),
}

LATER = {
    # as FAULTS; at most one in a seed, drawn by another generator, so that a seed keeps the faults it had before
    "link-lose": (3, 0.0, 0.0),  # connections that carry nothing any more and never end
    "agents-lose": (2, 0.0, 0.0),
    "store-lose": (2, 0.0, 0.0),
    "redis-misconf": (
        2,
        0.2,
        1.0,
    ),  # its disk is full, with appendfsync everysec: it refuses to write, and goes on later
}
PACKETS = {
    # as LATER
    "link-drop": (3, 0.2, 3.0),  # no packet passes, and no connection comes about
    "link-deaf": (2, 0.2, 3.0),  # the worker hears nothing, and is heard
    "link-loss": (2, 0.5, 2.0),  # some packets are lost, and come again
    "agents-drop": (2, 0.2, 3.0),
    "agents-deaf": (1, 0.2, 3.0),
    "agents-loss": (1, 0.5, 2.0),
    "store-drop": (2, 0.2, 3.0),
    "store-deaf": (1, 0.2, 3.0),
    "store-loss": (1, 0.5, 2.0),
}
FAILOVERS = {
    # as LATER; the Redis of a schedule that has one is a primary with a replica, and Sentinels that wait for a second
    "failover-kill": (2, 2.0, 5.0),
    "failover-stop": (2, 2.0, 5.0),  # SIGSTOP: when it continues, it still takes itself for the primary
    "failover-cut": (2, 2.0, 5.0),  # nothing reaches it
    "failover-ask": (1, 0.0, 0.0),  # an operator has the Sentinels do it
}
DURABLE = frozenset(("redis-kill", "redis-disk"))
"""Faults by which Redis loses writes unless it has appendfsync always."""


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    target: int = 0  # worker, replica; of a link: worker * REPLICAS + replica
    lasts_s: float = 0.0
    amount: int = 0  # bytes, of agents-bytes

    def __str__(self) -> str:
        of = {"link": f"w{self.target // REPLICAS}-r{self.target % REPLICAS}", "worker": f"w{self.target}"}
        where = (
            ""
            if self.kind.split("-")[0] in ("redis", "failover", "policy")
            else of.get(self.kind.split("-")[0], f"r{self.target}")
        )
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.at_s:5.2f} s  {self.kind:<14} {where:<6}{lasts}" + (
            f" after {self.amount} B" if self.amount else ""
        )


@dataclass(frozen=True)
class Agent:
    """One trial.

    client: `raw` marks its retries as SDKs do and may go to another replica with each request; `sdk` is the official one. format:
    one of `clients/formats.py`. streams: which of its turns are streamed. forks: a turn after which it asks something of its
    own, without history. slow: it reads with pauses. end: how the session ends. gone_after_s: by `end`: after so long a
    `gone` agent leaves, and its harness completes the session; a `cut-short` session is completed then, and a `deleted-early`
    one deleted, whatever is in flight.
    models: the name that each of its turns asks for.
    """

    start_s: float
    turns: int
    client: str
    replicas: tuple[int, ...]
    streams: tuple[bool, ...]
    end: str = "completed"
    gone_after_s: float = 0.0
    forks: int = -1
    slow: bool = False
    format: str = "chat"
    models: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = "".join("s" if stream else "-" for stream in self.streams)
        on = "".join(map(str, self.replicas))
        extra = (f" after {self.gone_after_s:.2f} s" if self.gone_after_s else "") + (" slow" if self.slow else "")
        fork = f" forks after {self.forks}" if self.forks >= 0 else ""
        fork += f" asks {', '.join(self.models)}" if set(self.models) - {ANY} else ""
        return f"{self.start_s:5.2f} s  {self.client} {self.format} {self.turns} turns {how} on {on}, {self.end}{extra}{fork}"


@dataclass(frozen=True)
class Schedule:
    seed: int
    agents: tuple[Agent, ...]
    faults: tuple[Fault, ...]
    group_size: int = 2
    trainer: tuple[str, ...] = ()  # what it does with each lease in turn: ack, release, lapse, late, extend
    deadlines: tuple[float | None, ...] = ()  # seconds, of each group that has one
    second: str = ""  # another trainer: `beside` the first, or its `successor`, which takes the run over
    second_at_s: float = 0.0

    @property
    def watched(self) -> bool:
        """It is for a deployment whose Redis can fail over."""
        return any(fault.kind in FAILOVERS for fault in self.faults)

    def __str__(self) -> str:
        redis = ", Redis is watched by Sentinels" if self.watched else ""
        lines = [f"seed {self.seed}{redis}: groups of {self.group_size}, the trainer will {', '.join(self.trainer)}"]
        due = [f"group {number} is due after {after} s" for number, after in enumerate(self.deadlines) if after]
        lines += [f"  {', '.join(due)}"] if due else []
        lines += [f"  {self.second_at_s:5.2f} s  a second trainer: {self.second}"] if self.second else []
        lines += [f"  agent {number}  {agent}" for number, agent in enumerate(self.agents)]
        return "\n".join(lines + [f"  fault {number}  {fault}" for number, fault in enumerate(self.faults)])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


FORMATS = {"chat": 3, "messages": 3, "responses": 2, "gemini": 2}
"""Name: weight."""


def draw(seed: int, *, only: tuple[int, ...] | None = None, long: bool = False) -> Schedule:
    """Draw a seed's schedule. Args: only: keep only the faults with these numbers (to find which of them make the seed fail).
    long: add one fault of LONG."""
    dice, more, rare = (random.Random(name) for name in (seed, f"more of {seed}", f"rarer of {seed}"))
    agents = tuple(_agent(dice, more) for _ in range(dice.randint(4, 8)))
    faults = sorted((_fault(dice) for _ in range(dice.randint(2, 6))), key=lambda fault: fault.at_s)
    faults = sorted([*faults, *_later(more, faults)], key=lambda fault: fault.at_s)
    faults = sorted([*faults, *_rarer(rare, faults)], key=lambda fault: fault.at_s)
    trainer = tuple(dice.choices(["ack", "release", "lapse", "late"], [6, 1, 1, 1], k=8))
    others, frozen = random.Random(f"others of {seed}"), random.Random(f"frozen of {seed}")
    faults += [_fault(others, OTHER)] if others.random() < 0.7 else []
    faults = sorted([*faults, *([_fault(frozen, LONG)] if long else [])], key=lambda fault: fault.at_s)
    agents = tuple(replace(agent, models=_models(others, agent.turns)) for agent in agents)
    second = others.choices(["", "beside", "successor"], [2, 1, 1])[0]
    second_at_s = round(others.uniform(0.5, 4.0), 2) if second else 0.0
    kept = faults if only is None else [faults[number] for number in only if number < len(faults)]
    trainer = tuple("extend" if how == "ack" and more.random() < 0.2 else how for how in trainer)
    size = dice.choice((1, 2, 2, 3))
    groups = range(0, len(agents), size)
    due = tuple(round(more.uniform(1.0, 4.0), 2) if more.random() < 0.25 else None for _ in groups)
    return Schedule(seed, agents, tuple(kept), size, trainer, due, second, second_at_s)


def _models(dice: random.Random, turns: int) -> tuple[str, ...]:
    """Most stay with one; some go over to another in the middle of their conversation."""
    first = dice.choices([ANY, *MODELS], [4, 1, 2])[0]
    if dice.random() < 0.75:
        return (first,) * turns
    after = dice.randrange(turns)
    return (first,) * after + (dice.choice(MODELS),) * (turns - after)


def _agent(dice: random.Random, more: random.Random) -> Agent:
    """more: draws the properties that were added later, so that a seed keeps its earlier ones."""
    turns = dice.randint(2, 5)
    client = dice.choices(["raw", "sdk"], [4, 1])[0]
    home, hops = dice.randrange(REPLICAS), dice.random() < 0.6
    end = dice.choices(["completed", "gone", "cut-short", "deleted", "deleted-early"], [8, 1, 1, 1, 1])[0]
    streamed = dice.random() < 0.7
    spoken = more.choices(list(FORMATS), list(FORMATS.values()))[0]
    helped = client == "sdk" and spoken in ("messages", "responses")  # the SDK puts a stream together by itself
    return Agent(
        start_s=round(dice.uniform(0.0, 1.0), 2),
        turns=turns,
        client=client,
        replicas=tuple(dice.randrange(REPLICAS) if hops else home for _ in range(turns)),
        streams=tuple(
            (client == "raw" and streamed and dice.random() < 0.8) or (helped and more.random() < 0.5)
            for _ in range(turns)
        ),
        end=end,
        gone_after_s=round(dice.uniform(0.3, 2.0), 2) if end in ("gone", "cut-short", "deleted-early") else 0.0,
        forks=dice.randrange(turns) if dice.random() < 0.2 else -1,
        slow=dice.random() < 0.15,
        format=spoken,
    )


def _later(more: random.Random, faults: list[Fault]) -> list[Fault]:
    fault = _fault(more, LATER)
    if more.random() < 0.6 or (fault.kind == "redis-misconf" and DURABLE & {one.kind for one in faults}):
        return []
    return [fault]


def _rarer(dice: random.Random, faults: list[Fault]) -> list[Fault]:
    drawn = [_fault(dice, kinds) for kinds, share in ((PACKETS, 0.4), (FAILOVERS, 0.15)) if dice.random() < share]
    unsynced = any(fault.kind == "redis-misconf" for fault in faults)
    return [fault for fault in drawn if not (unsynced and fault.kind in FAILOVERS)]


def _fault(dice: random.Random, kinds: dict[str, tuple[int, float, float]] = FAULTS) -> Fault:
    kind = dice.choices(list(kinds), [weight for weight, _, _ in kinds.values()])[0]
    _, least, most = kinds[kind]
    if kinds is OTHER:
        return _other(dice, kind, least, most)
    among = {"worker": WORKERS, "link": WORKERS * REPLICAS, "redis": 1, "failover": 1, "policy": 1}.get(
        kind.split("-")[0], REPLICAS
    )
    return Fault(
        at_s=round(dice.uniform(0.1, FAULTS_WITHIN_S), 2),
        kind=kind,
        target=dice.randrange(among),
        lasts_s=round(dice.uniform(least, most), 2),
        amount=dice.randint(200, 20_000) if kind == "agents-bytes" else 0,
    )


def _other(dice: random.Random, kind: str, least: float, most: float) -> Fault:
    worker, replica = dice.randrange(WORKERS + OTHERS), dice.randrange(REPLICAS)
    target = {"worker": worker, "link": worker * REPLICAS + replica, "policy": 0}[kind.split("-")[0]]
    return Fault(round(dice.uniform(0.1, FAULTS_WITHIN_S), 2), kind, target, round(dice.uniform(least, most), 2))

"""Which worker a turn goes to, and to which of its models: sticky by trial, bounded by load. Pure.

First it finds the cards that may serve the turn: those that the model name means, and, if the prompt begins with recorded ids,
have the tokenizer of these ids (I2). Then it chooses one of their workers.

Sticky, since a trial's turns share their prefix and the worker that served the last one has it in its cache. Rendezvous
hashing needs no shared state: all replicas of the proxy agree, and a worker that joins or leaves moves only its own trials.
Bounded after Mirrokni et al., "Consistent Hashing with Bounded Loads" (arXiv:1608.01350): a worker above its fair share
times a factor passes the trial to the next in its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

from steno.contracts.chat import IMAGES
from steno.contracts.errors import NoWorker, TooManyRequests
from steno.contracts.records import tokenizer_key
from steno.contracts.wire.frames import ModelCard

DEFAULT_POLICY = "default"
"""The policy that a model name means which no worker's card has, if some worker serves this policy, or has served it."""
LOAD_FACTOR = 1.25
"""How far over its share of all streams a worker may go before stickiness yields."""
SLACK_STREAMS = 8
"""Loads below this are never called uneven: a lost prefix cache costs more than a batch of eight."""


def at_hand(max_streams: int) -> int:
    """How many turns a worker is given beyond those it runs, so that it need not wait for the next. The others wait at the proxy,
    where trials take turns and workers can still be chosen."""
    return max(1, max_streams // 8)


BUSY = (
    "every worker is busy: each has as many requests as its max_streams allows; queue_s says how long a request waits"
)


class NoTokenizer(NoWorker):
    """Workers are there, but none has the tokenizer of the recorded ids."""


class ServingWorker(Protocol):
    """A worker as `offers` needs it: the models that it serves."""

    @property
    def models(self) -> list[ModelCard]: ...


class Candidate(Protocol):
    """A worker as `choose` needs it. `load`: streams on the worker now, whoever sent them. `max_streams`: how many it runs at
    once."""

    @property
    def id(self) -> str: ...
    @property
    def load(self) -> int: ...
    @property
    def max_streams(self) -> int: ...


ServerT = TypeVar("ServerT", bound=ServingWorker)
CandidateT = TypeVar("CandidateT", bound=Candidate)


def offers(workers: Iterable[ServerT], model: str, *, has_default: bool = False) -> list[tuple[ServerT, ModelCard]]:
    """The cards that a model name means, each with its worker: those of exactly that name; else those of the default policy,
    since agents name models of their usual provider; else all. `placement.py` handles names of models whose workers are away.

    Args: has_default: some model is of the default policy, even if its workers are away: then the last "else" does not apply.
    """
    every = [(worker, card) for worker in workers for card in worker.models]
    named = [offer for offer in every if offer[1].name == model]
    usual = named or [offer for offer in every if offer[1].policy == DEFAULT_POLICY]
    return usual if usual or has_default else every


def of_images(offered: Sequence[tuple[ServerT, ModelCard]]) -> list[tuple[ServerT, ModelCard]]:
    """The offers whose models take images in messages."""
    return [offer for offer in offered if IMAGES in offer[1].capabilities]


def of_tokenizer(
    offered: Sequence[tuple[ServerT, ModelCard]], tokenizer: bytes | None
) -> list[tuple[ServerT, ModelCard]]:
    """The offers whose tokenizer has this key (`records.tokenizer_key`); None: all. An unknown tokenizer is only equal to an
    unknown one."""
    if tokenizer is None:
        return list(offered)
    return [offer for offer in offered if tokenizer_key(offer[1].tokenizer_digest) == tokenizer]


def score(trial_id: str, worker_id: str) -> int:
    """The rendezvous weight: uniform over 64 bits, the same on every replica."""
    return int.from_bytes(blake2b(f"{trial_id}\0{worker_id}".encode(), digest_size=8).digest(), "big")


def choose(trial_id: str, workers: Sequence[CandidateT], *, full_too: bool = False) -> CandidateT:
    """The worker for a turn of this trial.

    The first in the trial's order that has room and no more than its share; else the first with room; else, all being full,
    the least loaded for its size, where the turn is at hand when another ends.

    Args: full_too: it goes to one of them however many wait there.
    Raises: NoWorker: none given.  TooManyRequests: all have as many at hand as they may.
    """
    if not workers:
        raise NoWorker("no connected worker can serve this request")
    if len(workers) > 1:
        workers = sorted(workers, key=lambda worker: score(trial_id, worker.id), reverse=True)
    room = [worker for worker in workers if worker.load < worker.max_streams]
    if not room:
        least = min(workers, key=lambda worker: worker.load / worker.max_streams)
        if not full_too and least.load >= least.max_streams + at_hand(least.max_streams):
            raise TooManyRequests(BUSY)
        return least
    per_slot = (
        LOAD_FACTOR * (sum(worker.load for worker in workers) + 1) / sum(worker.max_streams for worker in workers)
    )
    for worker in room:
        if worker.load < max(SLACK_STREAMS, per_slot * worker.max_streams):
            return worker
    return room[0]

"""What one completion takes of a worker, and which of the workers there are gets it. Pure.

The choice among those that can is `routing.py`; here is which ones can: the model that was asked for, the tokenizer that recorded
ids are of (I2), and for a completion that another worker began, a policy that has not gone back (I9, I10).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from proxy.contracts.canonical import NO_IMAGES, Job, has_images
from proxy.contracts.errors import BadRequest, NoWorker
from proxy.contracts.frames import TAKEOVER, Generate, ModelCard, Shown
from proxy.routing import NoTokenizer, choose, of_images, of_tokenizer, offers

FIRST_LINEAGE = "base"
"""Of the weights that a run begins with: any other lineage is newer."""


class Away(NoWorker):
    """No worker can take this now, but one may in a while: it has lost its socket, or has yet to come."""


@dataclass(slots=True)
class Order:
    """One completion to be sampled.

    attempt: from 0; (turn_id, attempt) fences it (I9). model: the name that was asked for.
    tokenizer: what prefix_ids are of (`records.tokenizer_key`); None: there are none.
    sampled_ids, shown, begun_by, version: of a completion that has begun elsewhere, what `Generate` says of it, the card of who
        began it, and the policy version that sampled last; prefix_ids is the whole prompt then.
    avoid: processes whose engine has failed an attempt, and channels that were lost under one. beside: it goes to a full worker
        too, since it has had a place, or another choice of its request has.
    known_bytes: `size_bytes`, once it has been refused for them.
    """

    trial_id: str
    turn_id: str
    job: Job
    attempt: int = 0
    model: str = ""
    prefix_ids: bytes = b""
    prefix_messages: int = 0
    prefix_finish: str = ""
    tokenizer: bytes | None = None
    sampled_ids: bytes = b""
    shown: Shown | None = None
    begun_by: ModelCard | None = None
    version: str = ""
    avoid: frozenset[str] = frozenset()
    beside: bool = False
    known_bytes: int = 0

    def generate(self, card: ModelCard, window_tokens: int) -> Generate:
        """Its frame, but for the stream's number."""
        return Generate(
            0, self.turn_id, self.attempt, self.trial_id, self.job, self.prefix_ids, self.prefix_messages,
            self.prefix_finish, window_tokens, card.name, self.sampled_ids, self.shown,
        )  # fmt: skip

    def size_bytes(self) -> int:
        """Of its frame, within some hundred bytes. Encodes it. Raises BadRequest: it can't be."""
        try:
            return len(msgspec.msgpack.encode(self.job)) + len(self.prefix_ids) + len(self.sampled_ids)
        except (RecursionError, OverflowError) as error:
            raise BadRequest(f"can't be sent to a worker: {error}") from None

    def fits(self, card: ModelCard) -> bool:
        """Whether such a model can go on with what was begun."""
        if self.begun_by is None:
            return True
        return (
            TAKEOVER in card.capabilities
            and (card.policy, card.synthetic) == (self.begun_by.policy, self.begun_by.synthetic)
            and not is_older(card.policy_version, self.version)
            and card.context_tokens > (len(self.prefix_ids) + len(self.sampled_ids)) // 4
        )


class Worker(Protocol):
    """As far as placing goes. process, channel: name this boot of it, and this channel of that boot. eligible: it takes new turns
    now. draining: it never will again. suspect: others come first."""

    @property
    def id(self) -> str: ...
    @property
    def process(self) -> str: ...
    @property
    def channel(self) -> str: ...
    @property
    def models(self) -> list[ModelCard]: ...
    @property
    def load(self) -> int: ...
    @property
    def max_streams(self) -> int: ...
    @property
    def eligible(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def suspect(self) -> bool: ...
    def serves(self, card: ModelCard) -> bool: ...


WorkerT = TypeVar("WorkerT", bound=Worker)


def place(order: Order, workers: Iterable[WorkerT], *, is_model: bool = False) -> tuple[WorkerT, ModelCard]:
    """The worker for an order, and which of its models.

    A worker that is away, and may come back within its grace, still has its say in what a name and a prefix mean: else a short
    absence would send a trial to another model for good.

    Args: is_model: the order's model is one that some worker has served: no other is taken for it, whoever is away.
    Raises: NoTokenizer: the prefix can be given to none of them (of a first attempt only). Away. NoWorker. TooManyRequests: all
        have as much as they may. BadRequest: there are images, and what is served takes none.
    """
    offered = [offer for offer in offers(workers, order.model) if not offer[0].draining]
    if is_model:
        offered = [offer for offer in offered if offer[1].name == order.model]
        if not offered:
            raise Away(f"no worker serves the model {order.model!r} now; `steno models retire` ends the wait for it")
    if has_images(order.job.messages):
        every, offered = offered, of_images(offered)
        if every and not offered:
            raise BadRequest(f"messages: {NO_IMAGES}", field="messages")
    same = of_tokenizer(offered, order.tokenizer)
    if offered and not same and not order.attempt:
        raise NoTokenizer("no worker has the tokenizer that this conversation was recorded with")
    able: dict[WorkerT, ModelCard] = {}
    for worker, card in same:
        avoided = worker.process in order.avoid or worker.channel in order.avoid
        if worker.eligible and worker.serves(card) and not avoided and order.fits(card):
            able.setdefault(worker, card)
    if not able:
        if same or order.attempt:
            raise Away("no worker that can serve this is there now")
        raise NoWorker("no worker is connected that can serve this")
    # A suspect worker is better than none, and worse than waiting for one that is only busy.
    trusted = [worker for worker in able if not worker.suspect]
    worker = choose(order.trial_id, trusted or list(able), full_too=order.beside)
    return worker, able[worker]


def is_older(version: str, than: str) -> bool:
    """Whether `version`, `<lineage>/<step>`, is known to be older. Lineages are begun by resumed trainers, and nothing here knows
    their order, except that the first is `base`."""
    if version == than or not than:
        return False
    (lineage, _, step), (other, _, other_step) = version.rpartition("/"), than.rpartition("/")
    if lineage == other and step.isdigit() and other_step.isdigit():
        return int(step) < int(other_step)
    return lineage == FIRST_LINEAGE

"""Decides which workers can take a completion, and which one gets it. Pure.

`routing.py` chooses among the workers that can. This module finds them: they serve the model that was asked for, and have the
tokenizer of the recorded ids (I2). A completion that another worker began needs the same policy, at no older version (I9, I10).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from steno.contracts.chat import NO_IMAGES, Job, has_images, needs
from steno.contracts.errors import BadRequest, NoWorker
from steno.contracts.wire.frames import TAKEOVER, TOKENIZES, Generate, ModelCard, Shown
from steno_proxy.workers.routing import DEFAULT_POLICY, NoTokenizer, choose, of_images, of_tokenizer, offers

RETURNS_IDS = "return_token_ids"
FIRST_LINEAGE = "base"
"""The lineage of the weights that a run begins with; any other lineage is newer."""


class WorkersAway(NoWorker):
    """No worker can take this completion now, but one may soon: it has lost its socket, or has yet to come."""


class PromptPrefix(NamedTuple):
    """Recorded ids that a prompt begins with, as the worker is given them (I2).

    ids: int32 LE, b"" for none. messages: how many messages of the job they cover. finish: the finish reason of the turn whose
    completion ends them. tokenizer: key of their tokenizer (`records.tokenizer_key`); None: no ids, so any tokenizer will do.
    """

    ids: bytes = b""
    messages: int = 0
    finish: str = ""
    tokenizer: bytes | None = None


NO_PREFIX = PromptPrefix()


@dataclass(slots=True)
class Order:
    """One completion to be sampled.

    attempt: from 0; (turn_id, attempt) fences it (I9). model: the name that was asked for.
    sampled_ids, shown: of a completion that another worker began, as in `Generate`. begun_by: the card of the model that began
        it. last_version: the policy version that sampled last. In this case the prefix is the whole prompt.
    avoid: processes whose engine has failed an attempt, and channels that were lost during one. full_too: it may go to a full
        worker, since it, or another choice of its request, has had a place.
    refused_bytes: its `size_bytes`, once a channel had no room for it; else 0. returns_ids: the client has asked for token ids.
    """

    trial_id: str
    turn_id: str
    job: Job
    attempt: int = 0
    model: str = ""
    prefix: PromptPrefix = NO_PREFIX
    sampled_ids: bytes = b""
    shown: Shown | None = None
    begun_by: ModelCard | None = None
    last_version: str = ""
    avoid: frozenset[str] = frozenset()
    full_too: bool = False
    refused_bytes: int = 0
    returns_ids: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """The fields of the request that the model must honour."""
        needed = needs(self.job)
        return needed | {RETURNS_IDS} if self.returns_ids else needed

    def generate(self, card: ModelCard, window_tokens: int) -> Generate:
        """Return its `Generate` frame; the channel sets the stream's number."""
        return Generate(
            0, self.turn_id, self.attempt, self.trial_id, self.job, self.prefix.ids, self.prefix.messages,
            self.prefix.finish, window_tokens, card.name, self.sampled_ids, self.shown,
        )  # fmt: skip

    def size_bytes(self) -> int:
        """The size of its frame, within some hundred bytes. Encodes the job. Raises: BadRequest: the job can't be encoded."""
        try:
            return len(msgspec.msgpack.encode(self.job)) + len(self.prefix.ids) + len(self.sampled_ids)
        except (RecursionError, OverflowError) as error:
            raise BadRequest(f"the request can't be sent to a worker: {error}") from None

    def fits(self, card: ModelCard) -> bool:
        """Whether a model with this card can go on with what another model began; True if none did."""
        if self.begun_by is None:
            return True
        return (
            TAKEOVER in card.capabilities
            and (card.policy, card.synthetic) == (self.begun_by.policy, self.begun_by.synthetic)
            and not is_older(card.policy_version, self.last_version)
            and card.context_tokens > (len(self.prefix.ids) + len(self.sampled_ids)) // 4
        )


class PlaceableWorker(Protocol):
    """A worker as `place` needs it. process, channel: name this boot of it, and this channel of that boot. eligible: it takes
    new turns now. draining: it never will again. suspect: others come first."""

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


WorkerT = TypeVar("WorkerT", bound=PlaceableWorker)


def place(
    order: Order, workers: Iterable[WorkerT], *, is_model: bool = False, has_default: bool = False
) -> tuple[WorkerT, ModelCard]:
    """Choose the worker for an order, and one of its models.

    A worker that is away, but may come back within its grace, still counts for what a model name and a prefix mean: else a short
    absence would send a trial to another model for good.

    Args: is_model: some worker has served a model of the order's name: no other model is taken for it, even with all its workers
            away. has_default: some worker has served a model of the default policy: a name that no model has means this policy.
    Raises: NoTokenizer: it is a first attempt, and no worker has the prefix's tokenizer. WorkersAway. NoWorker.
        TooManyRequests: all workers are full. BadRequest: there are images, and the models that are meant take none; or the
            request has a field that none of them honours (as with older workers).
    """
    offered = [offer for offer in offers(workers, order.model, has_default=has_default) if not offer[0].draining]
    if is_model:
        offered = [offer for offer in offered if offer[1].name == order.model]
        if not offered:
            raise WorkersAway(
                f"no worker serves the model {order.model!r} now; start one, or give the model up with `steno models retire`"
            )
    elif has_default and not offered:
        raise WorkersAway(no_default(order.model))
    if has_images(order.job.messages):
        every, offered = offered, of_images(offered)
        if every and not offered:
            raise BadRequest(f"messages: {NO_IMAGES}", field="messages")
    if needed := order.needs:
        every, offered = offered, [offer for offer in offered if not lacks(offer[1], needed)]
        if every and not offered:
            field = min(lacks(every[0][1], needed))
            raise BadRequest(f"{field} is not supported by the served model", field=field)
    same = of_tokenizer(offered, order.prefix.tokenizer)
    if offered and not same and not order.attempt:
        raise NoTokenizer("no worker has the tokenizer that this conversation was recorded with")
    able: dict[WorkerT, ModelCard] = {}
    for worker, card in same:
        avoided = worker.process in order.avoid or worker.channel in order.avoid
        if worker.eligible and worker.serves(card) and not avoided and order.fits(card):
            able.setdefault(worker, card)
    if not able:
        if same or order.attempt:
            other = "other " if order.avoid else ""
            raise WorkersAway(f"no {other}worker that can serve this request is connected now")
        if not offered:
            raise NoWorker(
                "no worker is connected: start one (steno worker --proxy URL), or wait until it has loaded its model"
            )
        raise NoWorker("no connected worker can serve this request")
    # A suspect worker is better than none, and worse than waiting for one that is only busy.
    trusted = [worker for worker in able if not worker.suspect]
    worker = choose(order.trial_id, trusted or list(able), full_too=order.full_too)
    return worker, able[worker]


def to_tokenize(
    trial_id: str, job: Job, workers: Iterable[WorkerT], model: str, *, is_model: bool, has_default: bool = False
) -> tuple[WorkerT, ModelCard]:
    """Choose the worker that tokenizes a job as a model does, and return it with its card of that model.

    Args: is_model, has_default: as for `place`.
    Raises: NoWorker. BadRequest: no worker of this model can tokenize, or there are images.
    """
    found = offers(workers, model, has_default=has_default)
    meant = [offer for offer in found if not is_model or offer[1].name == model]
    if not meant and is_model:
        raise NoWorker(f"no worker serves the model {model!r} now")
    if not meant:
        raise NoWorker(no_default(model) if has_default else "no worker is connected")
    said = [offer for offer in meant if TOKENIZES in offer[1].capabilities]
    if not said:
        raise BadRequest(
            "the model can't be tokenized here: its workers are of an older release, or its upstream gives text and no token ids"
        )
    if has_images(job.messages):
        raise BadRequest(f"messages: {NO_IMAGES}", field="messages")
    able = {worker: card for worker, card in reversed(said) if worker.eligible}
    if not able:
        raise NoWorker("no worker that can tokenize is there now")
    worker = choose(trial_id, list(able), full_too=True)
    return worker, able[worker]


def no_default(model: str) -> str:
    """The error message for a name that means the default policy, since no model has it, while no worker serves that policy."""
    return (
        f"no worker serves the policy {DEFAULT_POLICY!r} now, which the model name {model!r} means; "
        "start one, or give up all models of that policy with `steno models retire`"
    )


def lacks(card: ModelCard, needed: frozenset[str]) -> frozenset[str]:
    """Return which of the needed fields a model does not honour. The proxy itself gives token ids to clients, so that only a
    text-only model lacks RETURNS_IDS."""
    lacking = needed.difference(card.fields)
    return lacking if card.text_only else lacking - {RETURNS_IDS}


def is_older(version: str, than: str) -> bool:
    """Whether `version`, `<lineage>/<step>`, is known to be older. Lineages are begun by resumed trainers, and nothing here knows
    their order, except that the first is `base`."""
    if version == than or not than:
        return False
    (lineage, _, step), (other, _, other_step) = version.rpartition("/"), than.rpartition("/")
    if lineage == other and step.isdigit() and other_step.isdigit():
        return int(step) < int(other_step)
    return lineage == FIRST_LINEAGE

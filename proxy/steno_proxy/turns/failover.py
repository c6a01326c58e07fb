"""Continues a turn on another worker after its worker was lost or gave up, unseen by the agent (I9).

    nothing sampled yet                      the same order, to another worker
    sampled, resumable                       prompt + completion so far, to a worker that can take it over
    sampled, not resumable, nothing told     what there is goes on record as a turn of its own, and the order starts again
    sampled, not resumable, told             it breaks, as its dialect breaks

Every attempt has a number, and a stream of its own on a channel that is not the lost one: nothing of an earlier attempt can come
in with a later one's. An engine that is full has not failed: what was sampled waits for it, `queue_s` at most. Owns the choice
among these four; `placement.py` knows who can take what, `choice.py` writes the record.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import msgspec

from steno.contracts.errors import (
    BadRequest,
    BodyTooLarge,
    EngineFailed,
    NoWorker,
    StenoError,
    TooManyRequests,
    WorkerLost,
)
from steno_proxy import metrics
from steno_proxy.tracing.seen import TurnMove
from steno_proxy.turns.choice import FullEngines, OpenChoice
from steno_proxy.turns.continuation import Plan
from steno_proxy.turns.transcript import ChoiceTranscript
from steno_proxy.workers.hub import Hub
from steno_proxy.workers.placement import Order
from steno_proxy.workers.routing import NoTokenizer
from steno_proxy.workers.stream import Stream

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
"""Of one turn, so that a request that crashes engines does not reach all of them. A takeover that a full engine refused is not
counted."""
PASSING = (WorkerLost, EngineFailed, NoWorker, TooManyRequests)
"""Failures that another worker may not have."""
PAUSE_S, MOST_PAUSE_S = 0.01, 5.0
"""How long to wait at least, and at most, before engines that were full are asked again. Doubled from one time to the next."""


async def go_on(hub: Hub, choice: OpenChoice, plan: Plan, error: StenoError, *, untold: bool, at: float) -> None:
    """Give the choice another stream in place of the one that failed.

    Args: plan: the request's, from before any worker had a say. untold: nobody has been told anything of this choice. at: when
    the stream failed, Unix seconds.
    Raises: `error`, where it can't go on.
    """
    transcript, order, lost_worker = choice.transcript, choice.order, choice.stream.worker_id
    # Every worker has the same upstream, which may charge for each request: after its failure, the client decides on a retry.
    if choice.stream.card.text_only and not isinstance(error, WorkerLost):
        raise error
    how, full = _how(transcript, untold=untold), isinstance(error, TooManyRequests)
    shed = full and how == "moved"
    refused = full and how == "taken_over" and not choice.stream.received_tokens
    choice.failures += not refused
    if how == "not_resumable":
        raise _broken(how, choice, error, "it is not resumable, and its client has got a part of the answer already")
    if choice.failures >= MAX_ATTEMPTS:
        if shed:  # nothing is lost, and no worker was
            raise error
        raise _broken("no_worker", choice, error, f"{MAX_ATTEMPTS} attempts have failed")
    avoid = order.avoid
    if not full:
        # A worker that was lost may be well: only its channel is over, and it may be the only one. An engine that failed fails
        # again.
        avoid |= {choice.stream.channel if isinstance(error, WorkerLost) else choice.stream.process}
    if not (shed or refused):
        choice.full = FullEngines()
    # A turn that ran had its place already; one that a full engine sent away has none yet.
    order = dataclasses.replace(
        order, attempt=order.attempt + 1, avoid=avoid, full_too=order.full_too or not shed, refused_bytes=0
    )
    if how == "moved":
        transcript.started = None
        choice.plan = plan
    elif how == "taken_over":
        assert transcript.started is not None
        order.job = msgspec.structs.replace(order.job, sampling=transcript.started.law)
        prompt_ids = b"".join((choice.plan.prefix.ids, transcript.started.new_ids))
        order.prefix = order.prefix._replace(ids=prompt_ids, tokenizer=choice.tokenizer)
        order.sampled_ids, order.shown = bytes(transcript.ids), transcript.shown()
        order.begun_by, order.last_version = order.begun_by or choice.stream.card, transcript.last_version
    else:
        await choice.restart(error, plan)
    try:
        # Only a turn that would lose tokens waits. If it has none yet, its client can send the request again.
        if how == "taken_over" and isinstance(error, WorkerLost):
            stream = await hub.place(order, urgent=True)
        elif isinstance(error, TooManyRequests):
            stream = await _placed_beside(hub, choice, order, error, wait=how == "taken_over")
        else:
            stream = hub.open(order)
    except (NoWorker, NoTokenizer, TooManyRequests, BadRequest, BodyTooLarge) as refusal:
        if shed:  # nothing is lost, and no worker was
            raise error from refusal
        raise _broken("no_worker", choice, error, refusal.message) from refusal
    words = "turn %s is resumed: attempt %d, %s after %d tokens"
    log.info(words, order.turn_id, order.attempt, how, transcript.tokens)
    if not refused:  # else this move was counted already, when it left the worker before
        metrics.FAILOVERS.labels(how).inc()
        choice.facts.moves.append(TurnMove(at, how, error.code, transcript.tokens, lost_worker))
    choice.moved(order, stream)


def _how(transcript: ChoiceTranscript, *, untold: bool) -> str:
    """Which of the four cases in the module's docstring holds, as `steno_proxy_failovers_total` names them."""
    if transcript.is_empty():
        return "moved"
    if transcript.started is not None and transcript.started.resumable and not transcript.text_only:
        return "taken_over"
    return "restarted" if untold else "not_resumable"


def _broken(how: str, choice: OpenChoice, error: StenoError, why: str) -> StenoError:
    """Count and log that the turn is given up. Returns: `error`, to be raised."""
    metrics.FAILOVERS.labels(how).inc()
    log.warning("turn %s can't be resumed after %s: %s", choice.order.turn_id, error.code, why)
    return error


async def _placed_beside(hub: Hub, choice: OpenChoice, order: Order, error: TooManyRequests, *, wait: bool) -> Stream:
    """Place the order at a worker whose engine did not say that it is full; else, after a pause, at any of them again.

    Args: wait: it may pause. It gives up `queue_s` after the first engine was full, as queued requests do.
    Raises: as `Hub.place`.
    """
    full, now, most_s = choice.full, asyncio.get_running_loop().time, hub.settings.queue_s
    full.processes |= {choice.stream.process}
    full.since = now() if full.since is None else full.since
    try:
        return hub.open(dataclasses.replace(order, avoid=order.avoid | full.processes))
    except (NoWorker, TooManyRequests):
        if not wait:
            raise
    left_s = full.since + most_s - now()
    if left_s <= 0:
        raise TooManyRequests(f"no engine had room within {most_s:g} s (queue_s)")
    full.pause_s = min(max(error.retry_after_s or 0.0, 2 * full.pause_s, PAUSE_S), MOST_PAUSE_S)
    full.processes = frozenset()
    await asyncio.sleep(min(full.pause_s, left_s))
    try:
        async with asyncio.timeout(max(0.0, full.since + most_s - now())):  # at its end they are asked once more
            return await hub.place(order, urgent=True)
    except TimeoutError:
        raise NoWorker(f"no worker could take over this turn within {most_s:g} s (queue_s)") from None

"""Continues a turn on another worker after its worker was lost or gave up, unseen by the agent (I9).

    nothing sampled yet                      the same order, to another worker
    sampled, resumable                       prompt + completion so far, to a worker that can take it over
    sampled, not resumable, nothing told     what there is goes on record as a turn of its own, and the order starts again
    sampled, not resumable, told             it breaks, as its dialect breaks

Every attempt has a number, and a stream of its own on a channel that is not the lost one: nothing of an earlier attempt can come
in with a later one's. Owns the choice among these four; `placement.py` knows who can take what, `choice.py` writes the record.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time

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
from steno_proxy.turns.choice import OpenChoice
from steno_proxy.turns.continuation import Plan
from steno_proxy.workers.hub import Hub
from steno_proxy.workers.placement import Order
from steno_proxy.workers.routing import NoTokenizer
from steno_proxy.workers.stream import Stream

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 5
"""Of one turn. A request that ends every engine it meets must not meet them all."""
PASSING = (WorkerLost, EngineFailed, NoWorker, TooManyRequests)
"""Failures that another worker may not have."""
FULL_S = 5.0
"""How long to wait at most before an engine that was full is asked again."""


async def go_on(hub: Hub, choice: OpenChoice, plan: Plan, error: StenoError, *, untold: bool) -> None:
    """Give the choice another stream in place of the one that failed.

    Args: plan: the request's, from before any worker had a say. untold: nobody has been told anything of this choice.
    Raises: `error`, where it can't go on.
    """
    transcript, order = choice.transcript, choice.order
    attempt = order.attempt + 1
    if attempt >= MAX_ATTEMPTS:
        raise error
    # Its upstream is the same behind every worker, and may be paid by the request: what fails there is the client's to repeat.
    if choice.stream.card.text_only and not isinstance(error, WorkerLost):
        raise error
    # A worker that was lost may be well: only its channel is over, and it may be the only one. An engine that failed fails again.
    lost, lost_worker = isinstance(error, WorkerLost), choice.stream.worker_id
    failed, avoid = order.avoid, order.avoid | {choice.stream.channel if lost else choice.stream.process}
    shed = transcript.is_empty() and isinstance(error, TooManyRequests)
    # A turn that ran had its place already; one that a full engine sent away has none yet.
    order = dataclasses.replace(
        order, attempt=attempt, avoid=avoid, full_too=order.full_too or not shed, refused_bytes=0
    )
    if transcript.is_empty():
        how = "moved"
        transcript.started = None
        choice.plan = plan
    elif transcript.started is not None and transcript.started.resumable and not transcript.text_only:
        how = "taken_over"
        order.job = msgspec.structs.replace(order.job, sampling=transcript.started.law)
        prompt_ids = b"".join((choice.plan.prefix.ids, transcript.started.new_ids))
        order.prefix = order.prefix._replace(ids=prompt_ids, tokenizer=choice.tokenizer)
        order.sampled_ids, order.shown = bytes(transcript.ids), transcript.shown()
        order.begun_by, order.last_version = order.begun_by or choice.stream.card, transcript.last_version
    elif untold:
        how = "restarted"
        await choice.restart(error, plan)
    else:
        metrics.FAILOVERS.labels("not_resumable").inc()
        raise error
    try:
        # Only what would lose something is worth waiting for. A request that has nothing yet is its client's to send again.
        if how == "taken_over" and isinstance(error, WorkerLost):
            stream = await hub.place(order, urgent=True)
        elif how == "taken_over" and isinstance(error, TooManyRequests):
            stream = await _placed_beside(hub, order, failed, error)
        else:
            stream = hub.open(order)
    except (NoWorker, NoTokenizer, TooManyRequests, BadRequest, BodyTooLarge) as refusal:
        if shed:  # nothing is lost, and no worker was
            raise error from refusal
        metrics.FAILOVERS.labels("no_worker").inc()
        log.warning("turn %s can't be resumed after %s: %s", order.turn_id, error.code, refusal.message)
        raise error from refusal
    metrics.FAILOVERS.labels(how).inc()
    choice.facts.moves.append(TurnMove(time.time(), how, error.code, transcript.tokens, lost_worker))
    log.info("turn %s is resumed: attempt %d, %s after %d tokens", order.turn_id, attempt, how, transcript.tokens)
    choice.moved(order, stream)


async def _placed_beside(hub: Hub, order: Order, failed: frozenset[str], full: TooManyRequests) -> Stream:
    """At another worker than the one whose engine is full, or there again a moment later if it is the only one.

    Args: failed: what the order avoided before. Raises: as `Hub.place`.
    """
    try:
        return hub.open(order)
    except (NoWorker, TooManyRequests):
        await asyncio.sleep(min(full.retry_after_s or 0.0, FULL_S))
        order.avoid = failed
        return await hub.place(order, urgent=True)

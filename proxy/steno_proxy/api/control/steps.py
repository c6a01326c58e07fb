"""What trainers tell of their steps: numbers of a run, and annotations of turns. The admin key posts; a run's key reads its own
run's steps, and a reader all (I8). Annotations are read with the turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from steno.contracts.errors import BadRequest, Gone, NotFound
from steno.contracts.runs.training_steps import (
    AnnotationPost,
    AnnotationsKept,
    PostedAnnotation,
    TrainingStep,
    TrainingStepPage,
)
from steno_proxy.api.common import ERRORS, Epoch, encoded, encoded_items, services
from steno_proxy.api.control.runs import RunId, of_admin, read_by_run
from steno_proxy.store.interface import SessionStore

STEPS_AT_ONCE = 100
"""Steps of a page, made JSON in 2 ms."""
router = APIRouter(tags=["runs"], responses=ERRORS)


@router.post(
    "/runs/{run_id:path}/steps",
    dependencies=of_admin,
    response_model=TrainingStep,
    summary="The numbers of a training step, from any trainer (the same step again: values of the same name are replaced); a "
    "registered one that was superseded is refused (409)",
)
async def post_step(request: Request, run_id: RunId, step: TrainingStep, epoch: Epoch = None) -> Response:
    store = services(request).store
    if epoch is not None:
        await store.runs.check_epoch(run_id, epoch)
    if step.at is None:
        step = step.model_copy(update={"at": store.clock()})
    return encoded(request, await store.runs.keep_step(run_id, step))


@router.get(
    "/runs/{run_id:path}/steps",
    dependencies=read_by_run,
    response_model=TrainingStepPage,
    summary="The steps of a run, in order, as its trainer posted them",
)
async def read_steps(
    request: Request,
    run_id: RunId,
    start: Annotated[int, Query(ge=0, le=2**53, description="first step")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    found = await services(request).store.runs.steps(run_id, start=start, limit=limit + 1)
    more = found[limit].step if len(found) > limit else None
    return await encoded_items(request, TrainingStepPage(items=found[:limit], next_start=more), STEPS_AT_ONCE)


@router.post(
    "/runs/{run_id:path}/annotations",
    dependencies=of_admin,
    response_model=AnnotationsKept,
    summary="Post what a trainer measured for the tokens of turns (two bytes per token): it is read with the turns and kept as "
    "long as they are",
)
async def post_annotations(request: Request, run_id: RunId, post: AnnotationPost, epoch: Epoch = None) -> Response:
    store = services(request).store
    if epoch is not None:
        await store.runs.check_epoch(run_id, epoch)
    kept, gone = 0, []
    for trial_id, items in groupby(sorted(post.items, key=lambda each: each.trial_id), lambda each: each.trial_id):
        some = list(items)
        try:
            await _check(store, run_id, trial_id, some)
            await store.annotate(trial_id, {each.turn_id: each.of_turn() for each in some})
        except (NotFound, Gone):  # deleted, or in the archive: there is nothing to write it beside
            gone.append(trial_id)
        else:
            kept += len(some)
    return encoded(request, AnnotationsKept(kept=kept, gone=gone))


async def _check(store: SessionStore, run_id: str, trial_id: str, items: Sequence[PostedAnnotation]) -> None:
    """Raises: BadRequest: not a turn of this run's trial, or other tokens than it has. NotFound, Gone."""
    tail = await store.tail(trial_id, 0)
    if tail.session.run_id != run_id:
        raise BadRequest(
            f"trial_id: {trial_id} is of run {tail.session.run_id!r}, and annotations of run {run_id!r} were posted",
            field="items.trial_id",
        )
    tokens = {row.turn_id: row.completion_tokens for row in tail.rows}
    for each in items:
        if each.turn_id not in tokens:
            raise BadRequest(f"turn_id: trial {trial_id} has no turn {each.turn_id!r}", field="items.turn_id")
        there, given = tokens[each.turn_id], len(each.differences) // 2
        if there is not None and there != given:
            raise BadRequest(
                f"differences: got {given} numbers for turn {each.turn_id} of trial {trial_id}, which has {there} completion "
                "tokens",
                field="items.differences",
            )

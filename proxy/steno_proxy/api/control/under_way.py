"""`GET /ui/sessions/{trial_id}/live`: the end of what is being sampled for a session, at this replica.

A viewer polls it and gets what there is at that moment: nothing is kept for viewers, nothing is pushed, and no stream knows of
them. A response holds only the end of each text, so its cost does not grow with the text.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import BaseModel

from steno.contracts.records import TRIAL_ID
from steno_proxy.api.common import encoded, known_query, reader, services

MOST_LETTERS = 4000
"""Of each text, its newest."""
MOST_ANSWERS = 8
"""At once; the newest."""

router = APIRouter(include_in_schema=False)


class CallSoFar(BaseModel):
    name: str
    arguments: str


class LiveAnswer(BaseModel):
    """tokens: sampled so far. cut: there was more before what is shown. calls: the last one."""

    turn_id: str
    queued: float
    tokens: int
    reasoning: str
    content: str
    calls: list[CallSoFar]
    cut: bool


class LiveAnswers(BaseModel):
    """older: turn ids of the other answers that are being sampled."""

    items: list[LiveAnswer]
    older: list[str]


@router.get("/ui/sessions/{trial_id}/live", dependencies=[Depends(reader), Depends(known_query)])
async def what_is_being_said(request: Request, trial_id: Annotated[str, Path(pattern=TRIAL_ID)]) -> Response:
    found = services(request).recorder.under_way(trial_id, MOST_LETTERS)
    older = [answer.turn_id for answer in found[:-MOST_ANSWERS]]
    items = [
        LiveAnswer(
            turn_id=answer.turn_id,
            queued=answer.queued,
            tokens=answer.tokens,
            reasoning=answer.reasoning,
            content=answer.content,
            calls=[CallSoFar(name=name, arguments=arguments) for name, arguments in answer.calls],
            cut=answer.cut,
        )
        for answer in found[-MOST_ANSWERS:]
    ]
    return encoded(request, LiveAnswers(items=items, older=older))

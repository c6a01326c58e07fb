"""Who runs a group's trials, where several launchers work on one run: bodies of `POST /groups/{group_id}/claims`.

A launcher claims a trial before it runs it, and again, by the same call, while it does. A claim that is not renewed in time can
be taken over, and the trial's key changes then: what the first one still runs is on no record. What a launcher posts names the
epoch of its claim (`Completion.claim`), and is refused once another one has the trial.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from steno.contracts.records import TRIAL_ID
from steno.contracts.rest import Trial

LAUNCHER = r"^[A-Za-z0-9._-]{1,60}$"
CLAIM_S = 60.0
"""How long a launcher's claim lasts unless it is renewed."""


class ClaimRequest(BaseModel):
    """launcher: names the claimant; the same again renews. trial_ids: of the group. gone: launchers that are known to have ended,
    and whose claims need not run out. Who names itself there takes over from itself: what it ran is lost, and the trial's key
    changes."""

    model_config = ConfigDict(extra="forbid")
    launcher: str = Field(pattern=LAUNCHER)
    trial_ids: list[Annotated[str, Field(pattern=TRIAL_ID)]] = Field(min_length=1, max_length=4096)
    ttl_s: float = Field(CLAIM_S, ge=1, le=86400, allow_inf_nan=False)
    gone: list[Annotated[str, Field(pattern=LAUNCHER)]] = Field(default_factory=list, max_length=256)


class Claim(BaseModel):
    """What became of a claim.

    epoch: of the claim that holds, this one or another's; one more at each take-over; 0: there is none.
    granted: the trial is the asking launcher's to run; or to score, where it has ended and awaits its reward. Not granted:
        another one has it (`launcher`, for `left_s` seconds unless it renews), or the trial has ended; one that was deleted has
        the status `deleted`.
    past_deadline: its group is to be trained, and its deadline has passed: what the trial brings from now on is `late`, and
        nobody trains it.
    trial: as on record, with the key that is good now.
    """

    model_config = ConfigDict(extra="forbid")
    granted: bool
    epoch: int
    launcher: str | None = None
    left_s: float = 0.0
    past_deadline: bool = False
    trial: Trial


class ClaimList(BaseModel):
    """In the order in which the trials were named."""

    items: list[Claim]

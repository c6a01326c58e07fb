"""Claims trials at the proxy, so that of several launchers of a run only one runs each trial."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from steno.client.client import AsyncClient
from steno.contracts.errors import BadRequest, Gone, NotFound, StenoError
from steno.contracts.rest import Trial
from steno.contracts.runs.claims import CLAIM_S, Claim, ClaimRequest
from steno_rollouts.outcome import deleted, has_no_end
from steno_rollouts.trials.containers.launcher import Launcher

log = logging.getLogger(__name__)

RENEWED = 3
"""How often a claim is renewed within the time that it lasts."""
GROUPS_AT_ONCE = 32
"""Groups whose claims are renewed together: one after the other, hundreds of them may take longer than a claim lasts."""


class Taken(NamedTuple):
    """The answer to a claim.

    trial: as on record. epoch: of the claim; None: the proxy has no claims. mine: these rollouts run it. past_deadline: its
    group's deadline has passed, so that its reward does not count any more."""

    trial: Trial
    epoch: int | None
    mine: bool
    past_deadline: bool = False


class Claims:
    """Claims of one launcher. Args: ttl_s: how long one lasts unless it is renewed."""

    def __init__(self, client: AsyncClient, launcher: Launcher | None = None, ttl_s: float = CLAIM_S) -> None:
        self._client = client
        self._launcher = launcher or Launcher.here()
        self._ttl_s = ttl_s
        self._held: dict[str, str] = {}
        self._known = True

    async def take(self, group_id: str, trial: Trial) -> Taken:
        """Claim a trial. One whose launcher ran on this machine and is gone is taken over at once."""
        trial_id = trial.session.trial_id
        claim = await self._asked(group_id, trial, [])
        if claim is not None and not claim.granted and claim.launcher and self._launcher.knows_gone(claim.launcher):
            claim = await self._asked(group_id, trial, [claim.launcher])
        if claim is None:
            return Taken(trial, None, mine=True)
        if claim.granted:
            self._held[trial_id] = group_id
        return Taken(claim.trial, claim.epoch, claim.granted, claim.past_deadline)

    async def anew(self, group_id: str, trial: Trial) -> Taken:
        """Claim a held trial once more. A lost attempt at it may still run: the key of that attempt is not valid any more."""
        trial_id = trial.session.trial_id
        claim = await self._asked(group_id, trial, [self._launcher.name])
        if claim is None:
            return Taken(trial, None, mine=True)
        if not claim.granted:
            self.over(trial_id)
        return Taken(claim.trial, claim.epoch, claim.granted)

    def over(self, trial_id: str) -> None:
        """Let go of a trial that has ended, or that another launcher has: its claim is not renewed any more."""
        self._held.pop(trial_id, None)

    @contextlib.asynccontextmanager
    async def kept(self, lost: Callable[[str], None]) -> AsyncIterator[None]:
        """Renew the held claims while the block runs. Args: lost: called with each trial that another launcher has taken over."""
        keeping = asyncio.create_task(self._keep(lost))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})

    async def _keep(self, lost: Callable[[str], None]) -> None:
        lasted = 0.0
        while True:
            await asyncio.sleep(max(0.0, self._ttl_s / RENEWED - lasted))
            began = asyncio.get_running_loop().time()
            groups: dict[str, list[str]] = {}
            for trial_id, group_id in self._held.items():
                groups.setdefault(group_id, []).append(trial_id)
            held = list(groups.items())
            for start in range(0, len(held), GROUPS_AT_ONCE):
                some = held[start : start + GROUPS_AT_ONCE]
                await asyncio.gather(*(self._renew(group_id, trial_ids, lost) for group_id, trial_ids in some))
            lasted = asyncio.get_running_loop().time() - began

    async def _renew(self, group_id: str, trial_ids: list[str], lost: Callable[[str], None]) -> None:
        request = ClaimRequest(launcher=self._launcher.name, trial_ids=trial_ids, ttl_s=self._ttl_s)
        try:
            claims = await self._client.claim(group_id, request)
        except StenoError as error:  # it is asked again soon; whoever has taken a trial over by then keeps it
            log.warning("claims of group %s were not renewed: %s", group_id, error.message)
            return
        for trial_id, claim in zip(trial_ids, claims, strict=True):
            if not claim.granted and trial_id in self._held:
                self.over(trial_id)
                if has_no_end(claim.trial.session):
                    log.warning("trial %s: launcher %s has taken it over", trial_id, claim.launcher)
                    lost(trial_id)

    async def _asked(self, group_id: str, trial: Trial, gone: list[str]) -> Claim | None:
        """None: the proxy is of a release that knows of no claims."""
        if not self._known:
            return None
        named = {"gone": gone} if gone else {}
        request = ClaimRequest(
            launcher=self._launcher.name, trial_ids=[trial.session.trial_id], ttl_s=self._ttl_s, **named
        )
        try:
            (claim,) = await self._client.claim(group_id, request)
        except Gone:  # a proxy of an older release says so of a trial that was deleted
            return Claim(granted=False, epoch=0, trial=trial.model_copy(update={"session": deleted(trial.session)}))
        except (BadRequest, NotFound):
            await self._client.group(group_id)  # or it is the group that is not there
            log.info("the proxy is of a release that knows of no claims: run one launcher at a time")
            self._known = False
            return None
        return claim

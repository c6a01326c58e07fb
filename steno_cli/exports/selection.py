"""Which sessions are exported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from steno.client.client import Client
from steno.contracts.errors import ConfigError, NotFound
from steno.contracts.records import Session
from steno_cli.terminal.output import console

TEXT_ONLY = "text_only sessions, which have no token ids"


class Purpose(StrEnum):
    """Of the groups whose trials are exported."""

    TRAIN = "train"
    EVAL = "eval"
    ALL = "all"


@dataclass(frozen=True)
class Selection:
    """A session is exported if it matches all that is set.

    min_reward: sessions without a reward do not match. best_of_group: of each group's matching sessions only the one with the
        highest reward, of equal ones the oldest; sessions without a group or a reward do not match. purpose: of its group; a
        session without a group is of purpose train. None: train, or all of a group that is named.
    Sessions that score others anew (`Session.rescore_of`) have those turns once more, and match only where a run or a group is
    named.
    """

    status: str | None = None
    group_id: str | None = None
    run_id: str | None = None
    end_reason: str | None = None
    min_reward: float | None = None
    best_of_group: bool = False
    purpose: Purpose | None = None

    def trial_ids(self, client: Client, *, with_token_ids: bool = False) -> list[str]:
        """Oldest first. Only ids are kept in memory. with_token_ids: without those that are `text_only`."""
        matching = self._matching(client, with_token_ids)
        if not self.best_of_group:
            return [session.trial_id for session in matching]
        best: dict[tuple[str | None, str], tuple[float, str]] = {}
        for session in matching:
            if session.group_id is None or session.reward is None:
                continue
            group = session.run_id, session.group_id
            if group not in best or session.reward > best[group][0]:
                best[group] = session.reward, session.trial_id
        return [trial_id for _, trial_id in best.values()]

    def _matching(self, client: Client, with_token_ids: bool) -> Iterator[Session]:
        wanted = self.purpose or (Purpose.TRAIN if self.group_id is None else Purpose.ALL)
        anywhere = self.run_id is None and self.group_id is None
        purposes = _Purposes(client)
        others, again, text_only = 0, 0, 0
        for session in self._of_any_purpose(client):
            if anywhere and session.rescore_of is not None:
                again += 1
            elif wanted is not Purpose.ALL and purposes.of(session) != wanted:
                others += 1
            elif with_token_ids and "text_only" in session.marks:
                text_only += 1
            else:
                yield session
        if self.purpose is None:
            tell_left_out(others, "sessions of evaluation groups; --purpose eval or all exports them")
        tell_left_out(again, "sessions that score others anew; --run or --group exports them")
        tell_left_out(text_only, TEXT_ONLY)

    def _of_any_purpose(self, client: Client) -> Iterator[Session]:
        for session in client.sessions(status=self.status, group_id=self.group_id, run_id=self.run_id, limit=1000):
            if self.end_reason is not None and session.end_reason != self.end_reason:
                continue
            if self.min_reward is not None and (session.reward is None or session.reward < self.min_reward):
                continue
            yield session


def tell_left_out(count: int, what: str) -> None:
    """On standard error: how many sessions that the filters match are not exported, if any, and which."""
    if count:
        console(stderr=True).print(f"left out: {count} {what}", soft_wrap=True)


class _Purposes:
    """Of groups, by id. Each run's list is asked for once, and each group that it leaves out once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, str] = {}
        self._listed: set[str | None] = set()

    def of(self, session: Session) -> str:
        """Raises: ConfigError: the session's group is not on record."""
        if session.group_id is None:
            return Purpose.TRAIN
        if session.group_id not in self._known and session.run_id not in self._listed:
            self._listed.add(session.run_id)
            self._known |= {place.group_id: place.purpose for place in self._client.groups(session.run_id)}
        if session.group_id not in self._known:
            self._known[session.group_id] = self._asked(session.group_id)
        return self._known[session.group_id]

    def _asked(self, group_id: str) -> str:
        try:
            return self._client.group(group_id).purpose
        except NotFound:
            raise ConfigError(
                f"--purpose: group {group_id} is not on record, so its purpose is unknown and may be eval: name trials "
                "or a group, or give --purpose all",
                field="purpose",
            ) from None

"""Repeated creation of a group: when it is the same group, and which trials it then has."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from steno.contracts.errors import Conflict, Gone
from steno.contracts.records import Group, Session

_MAY_DIFFER = {"created_at", "trial_ids"}
"""What a repeated call makes anew: its own clock, and trial ids where the caller left them to us."""


def same_group(recorded: Group, asked: Group) -> None:
    """Check that a group which is created again asks for the same. Raises: Conflict: it does not."""
    both = recorded.withheld and asked.withheld  # older releases kept none, nor does a proxy without keys
    exclude = _MAY_DIFFER if both else {*_MAY_DIFFER, "withheld"}
    before, now = recorded.model_dump(exclude=exclude), asked.model_dump(exclude=exclude)
    if differ := sorted(name for name, value in before.items() if now[name] != value):
        raise Conflict(f"group {recorded.group_id} is registered already, with other values of: {', '.join(differ)}")


def with_recorded_ids(recorded: Group, sessions: Sequence[Session]) -> list[Session]:
    """The sessions of a repeated call under the trial ids of the first: an interrupted creation is finished, not doubled.

    Raises Conflict when there are not as many.
    """
    if len(sessions) != len(recorded.trial_ids):
        raise Conflict(f"group {recorded.group_id} is registered already, with {len(recorded.trial_ids)} trials")
    return [
        session.model_copy(update={"trial_id": trial_id})
        for session, trial_id in zip(sessions, recorded.trial_ids, strict=True)
    ]


def check_member(group_id: str, trial_id: str, found: str | None) -> None:
    """Check that a session which is there already is the group's own. Args: found: its group. Raises: Conflict: it is not."""
    if found != group_id:
        whose = "in no group" if found is None else f"of group {found}"
        raise Conflict(
            f"group_id: group {group_id} can't have trial {trial_id}: a session {whose} has this id",
            field="group_id",
        )


async def there(registering: Awaitable[Any]) -> Gone | None:
    """Register one session of a group. Returns: None: it is on record; else the error that it was deleted, which must not stop
    the registration of the group's other sessions."""
    try:
        await registering
    except Gone as error:
        return error
    return None

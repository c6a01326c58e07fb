"""The Lease that says that a launcher lives: one per launcher in the namespace, renewed by its keeper."""

from __future__ import annotations

from datetime import UTC, datetime

from .api import AlreadyThere, Api, Changed, NotThere
from .errors import ApiRefused
from .manifest import LAUNCHER, label, lease, lease_name

TRIES = 5


class LauncherLease:
    """Several keepers of one launcher may hold it."""

    def __init__(self, launcher: str, lease_s: float) -> None:
        self._launcher = launcher
        self._lease_s = lease_s
        self._version: str | None = None

    async def hold(self, api: Api) -> None:
        """Make it, or renew it. Raises: ApiRefused, ApiUnavailable."""
        for _ in range(TRIES):
            wanted = lease(self._launcher, self._lease_s, datetime.now(UTC), self._version)
            try:
                made = await (api.create_lease(wanted) if self._version is None else api.replace_lease(wanted))
                self._version = made["metadata"]["resourceVersion"]
                return
            except NotThere:
                self._version = None
            except (AlreadyThere, Changed):  # by another keeper, or by this one, whose answer was lost
                found = await api.leases(f"{LAUNCHER}={label(self._launcher)}")
                self._version = found[0]["metadata"]["resourceVersion"] if found else None
        raise ApiRefused(f"lease {lease_name(self._launcher)} was changed by others, {TRIES} times in a row")

    async def drop(self, api: Api) -> None:
        """Raises: ApiRefused, ApiUnavailable."""
        self._version = None
        await api.delete_lease(lease_name(self._launcher))

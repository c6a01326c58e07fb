"""Finds launchers that renew their leases no more. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping

LEASE_S = 60.0
"""As long as a claim at the proxy."""
RENEWED = 3
"""How often a lease is renewed within that, and how often leases are looked at."""


class Heartbeats:
    """Counts looks at the leases, not seconds: while the cluster can't be asked, no launcher can renew its lease."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[str, int]] = {}

    def gone(self, versions: Mapping[str, str]) -> list[str]:
        """Launchers whose lease was not renewed for as long as it lasts. Args: versions: of each one's lease; "": it has none."""
        heard = {}
        for launcher, version in versions.items():
            earlier, looks = self._heard.get(launcher, (version, -1))
            heard[launcher] = (version, looks + 1 if version == earlier else 0)
        self._heard = heard
        return [launcher for launcher, (_, looks) in heard.items() if looks > RENEWED]

    def forget(self) -> None:
        """Begin to count anew: a look at the leases failed."""
        self._heard.clear()

"""What the API says where a ResourceQuota refuses. Values in, values out."""

from __future__ import annotations

import re
from decimal import Decimal

_FULL = re.compile(
    r"exceeded quota: (?P<name>[^,\s]+), requested: (?P<asked>\S+), used: \S+, limited: (?P<limited>\S+)"
)
_NO_ROOM = re.compile(r"exceeded quota: |status unknown for quota: ")
"""The second: of a quota that was only just made, as long as nothing has been counted for it."""
_QUANTITY = re.compile(r"(?P<number>[+-]?[\d.]+(?:[eE][+-]?\d+)?)(?P<unit>[numkKMGTPE]i?|)")
_UNITS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1), "k": Decimal(10) ** 3,
    **{unit: Decimal(10) ** (3 * power) for power, unit in enumerate("MGTPE", 2)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}  # fmt: skip


def no_room_now(words: str) -> bool:
    """Whether a quota refuses what it may allow later. Another refusal of a quota (an amount that must be named, say) stays."""
    return bool(_NO_ROOM.search(words))


def never_fits(words: str) -> str | None:
    """The quota's name where one alone asks for more than the quota has in all. None: it does not, or the words do not say."""
    found = _FULL.search(words)
    if found is None:
        return None
    limited = _amounts(found["limited"])
    asked = _amounts(found["asked"])
    return found["name"] if any(amount > limited.get(what, amount) for what, amount in asked.items()) else None


def _amounts(text: str) -> dict[str, Decimal]:
    """Of `requests.cpu=2,requests.memory=1Gi`; one that can't be read is left out."""
    found = {}
    for each in text.split(","):
        what, _, amount = each.partition("=")
        if (read := _QUANTITY.fullmatch(amount)) is not None and read["unit"] in _UNITS:
            found[what] = Decimal(read["number"]) * _UNITS[read["unit"]]
    return found

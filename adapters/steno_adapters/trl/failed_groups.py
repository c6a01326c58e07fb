"""Ends a trainer whose groups bring nothing to train: where agents are broken TRL would wait, or step on, without end. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from steno.contracts.errors import StenoError

STOP_AFTER = 16
"""Groups in a row. A hard task may fail in all of its trials, and so may a few; not so many different ones."""


class NothingToTrain(StenoError):
    """So many groups in a row had no row that can be trained. No route's error."""

    code = "nothing_to_train"


class FailedGroups:
    """Counts groups that fail in a row. Failed groups end sooner than good ones, and groups of a killed launcher fail as soon as
    the next launcher begins: so the bound is raised by the number of groups that ran when the first of them failed.

    Args: stop_after: so many groups in a row are too many; 0: no number is.
    """

    def __init__(self, stop_after: int) -> None:
        self._stop_after = stop_after
        self._in_a_row = 0
        self._ran = 0

    def trainable(self) -> None:
        """A group had a row."""
        self._in_a_row = 0

    def failed(self, groups: int, why: Iterable[str], ran: int = 0) -> None:
        """So many more had none.

        Args: why: of the last ones, if it is known. ran: groups that ran before they failed.
        Raises: NothingToTrain: they are too many.
        """
        if not self._in_a_row:
            self._ran = ran
        self._in_a_row += groups
        if self._stop_after and self._in_a_row >= self._stop_after + self._ran:
            reasons = "; ".join(why) or "the log of the program that runs the trials says why"
            raise NothingToTrain(
                f"{self._in_a_row} groups in a row had no row to train ({reasons}); mend that and start again "
                f"(stop_after_failed_groups: {self._stop_after})"
            )

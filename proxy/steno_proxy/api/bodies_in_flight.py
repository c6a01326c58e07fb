"""Limits the bytes of request bodies in flight in this process, per trial and in total.

A request's messages are in memory from its first byte to the end of its answer, as objects, in a frame and on their way to the
store; its body is what can be counted before. Bodies up to FREE_BYTES are not counted, so that those who send large ones never
keep out those who do not.
"""

from __future__ import annotations

from collections.abc import Callable

from steno.contracts.errors import BodyTooLarge, TooManyRequests

FREE_BYTES = 1 << 18
RETRY_AFTER_S = 2.0
"""What refused requests are told. Seconds; a large body is there for as long as it is answered."""


class BodiesInFlight:
    """Args:
    most_bytes: of all bodies. trial_bytes: of one trial's.
    on_free: called when a counted body is no longer in flight.
    """

    def __init__(self, most_bytes: int, trial_bytes: int, on_free: Callable[[int], None] = lambda size: None) -> None:
        self.most_bytes = most_bytes
        self.trial_bytes = trial_bytes
        self.bytes = 0
        self.on_free = on_free
        self._trials: dict[str, int] = {}

    def hold(self, trial_id: str) -> BodyShare:
        return BodyShare(self, trial_id)

    def of_trial(self, trial_id: str) -> int:
        return self._trials.get(trial_id, 0)

    def add(self, trial_id: str, size: int) -> None:
        self.bytes += size
        held = self._trials.get(trial_id, 0) + size
        if held:
            self._trials[trial_id] = held
        else:
            self._trials.pop(trial_id, None)


class BodyShare:
    """One request's share. `close` gives it back, once."""

    __slots__ = ("_inflight", "_size", "_trial_id")

    def __init__(self, inflight: BodiesInFlight, trial_id: str) -> None:
        self._inflight = inflight
        self._trial_id = trial_id
        self._size = 0

    def grow(self, size: int) -> None:
        """The body is, or has become, so many bytes.

        Raises: BodyTooLarge: more than may be with nothing else in flight. TooManyRequests: more than fits beside the others.
        """
        if size <= FREE_BYTES or size <= self._size:
            return
        all_of_them, more = self._inflight, size - self._size
        trial = all_of_them.of_trial(self._trial_id)
        for whose, held, most, setting in (
            ("this trial's", trial, all_of_them.trial_bytes, "trial_inflight_bytes"),
            ("all trials'", all_of_them.bytes, all_of_them.most_bytes, "max_inflight_bytes"),
        ):
            if size > most:
                raise BodyTooLarge(f"the body is at least {size} bytes; {setting} is {most}")
            if held + more > most:
                raise TooManyRequests(
                    f"{whose} bodies in flight are {held} bytes, this one is at least {size}; {setting} is {most}",
                    retry_after_s=RETRY_AFTER_S,
                )
        all_of_them.add(self._trial_id, more)
        self._size = size

    def close(self) -> None:
        if self._size:
            size, self._size = self._size, 0
            self._inflight.add(self._trial_id, -size)
            self._inflight.on_free(size)

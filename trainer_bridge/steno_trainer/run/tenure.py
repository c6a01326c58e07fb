"""A trainer's hold of its run: taken over at the start, kept by heartbeats from a thread of its own, given up at the end.

It is taken before the checkpoint is read: the trainer before this one can then acknowledge nothing more, so every acknowledged
group is in the checkpoint. A trainer that is superseded has lost its run to another one, and must not be started
again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, Self

from steno.contracts.errors import BadRequest, StenoError, Superseded, TrainerAlive
from steno.contracts.runs.leases import HEARTBEAT_S, Tenure

log = logging.getLogger(__name__)

AGAIN_S = 2.0
"""Between attempts to take over while the proxy is away."""
LEAVE_S = 3.0
"""How long the proxy has for a call of this file, and a heartbeat that is on its way at the end."""
UNKNOWN_CALL = "is not served here"
"""The answer (405) of a proxy whose release is older than this call."""


class TenureClient(Protocol):
    """The calls of `steno.client.client.Client` that are used here."""

    def take_over(self, run_id: str, trainer: str, *, force: bool = False) -> Tenure: ...
    def heartbeat(self, run_id: str, trainer: str, epoch: int, *, leaving: bool = False) -> Tenure: ...


class TenureHolder:
    """Of one run, by this process. Use as a context manager: leaving gives it up.

    epoch: None: the proxy is of a release that knows no trainers; then nothing is held, and leases of a dead trainer come back
    when their time is over. lost: set once another trainer has taken over.
    """

    def __init__(self, client: TenureClient, run: str, trainer: str, epoch: int | None) -> None:
        self.run, self.trainer, self.epoch = run, trainer, epoch
        self.lost: Superseded | None = None
        self._client = client
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._tell: Callable[[Superseded], object] | None = None
        self._thread = threading.Thread(target=self._beat, name="steno-tenure", daemon=True)
        if epoch is not None:
            self._thread.start()

    @classmethod
    def take(
        cls, client: TenureClient, run: str, trainer: str, *, force: bool = False, known: int = 0, patience_s: float = 600.0,
        sleep: Callable[[float], None] = time.sleep, now: Callable[[], float] = time.monotonic,
    ) -> TenureHolder:  # fmt: skip
        """Take over the run from whoever has it. One that was heard of a moment ago may have died since, so it is waited for
        once, until it would have been heard of again.

        Args:
            force: do not ask whether the other one lives.
            known: the newest epoch that is known of this run. A proxy that has lost its memory gives one that was there before:
                it is told of the next one.
            patience_s: how long a proxy that is away is waited for.
        Raises: TrainerAlive: it lives; StenoError: the proxy refuses, or stays away.
        """
        until, waited = now() + patience_s, False
        while True:
            try:
                tenure = client.take_over(run, trainer, force=force)
                if tenure.epoch <= known:
                    tenure = client.heartbeat(run, trainer, known + 1)
            except TrainerAlive as error:
                if waited:
                    raise
                waited, seconds = True, (error.retry_after_s or 0.0) + 0.5
                log.info("%s; waiting %.0f s for its next heartbeat", error.message, seconds)
                sleep(seconds)
            except StenoError as error:
                if isinstance(error, BadRequest) and UNKNOWN_CALL in error.message:
                    log.warning(
                        "the proxy's release can't register trainers: groups leased by a dead trainer are served again when "
                        "their leases end"
                    )
                    return cls(client, run, trainer, None)
                if not error.retryable or now() >= until:
                    raise
                log.warning("can't take over the run now, trying again: %s", error)
                sleep(AGAIN_S)
            else:
                log.info("run %s: this trainer is %s (epoch %d)", run, trainer, tenure.epoch)
                return cls(client, run, trainer, tenure.epoch)

    def on_lost(self, tell: Callable[[Superseded], object]) -> None:
        """Call this, from another thread, once another trainer has taken over; at once, if it has."""
        with self._lock:
            self._tell = tell
            lost = self.lost
        if lost is not None:
            tell(lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """No more heartbeats; the next trainer need not wait. Idempotent."""
        if self._over.is_set() or self.epoch is None:
            return
        self._over.set()
        self._thread.join(LEAVE_S)
        if self.lost is not None:
            return
        try:
            self._client.heartbeat(self.run, self.trainer, self.epoch, leaving=True)
        except StenoError as error:
            log.warning("can't tell the proxy that this trainer ends: %s", error)

    def _beat(self) -> None:
        assert self.epoch is not None
        silent = False
        while not self._over.wait(HEARTBEAT_S):
            try:
                self._client.heartbeat(self.run, self.trainer, self.epoch)
                silent = False
            except Superseded as error:
                with self._lock:
                    self.lost, tell = error, self._tell
                if tell is not None:
                    tell(error)
                return
            except StenoError as error:
                if not silent:
                    log.warning("can't send a heartbeat to the proxy: %s", error)
                silent = True

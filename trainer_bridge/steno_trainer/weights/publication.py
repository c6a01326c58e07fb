"""One update as the trainer sees it: set by the thread that follows it, read and waited for by the training loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from steno.contracts.errors import BadRequest, StenoError, WeightsRefused
from steno.contracts.policy import Update, UpdateSpec
from steno_trainer.errors import PushFailed


class Publication:
    """Weights on their way. `update` is the newest known state, None until the proxy has answered once.

    copy_s: how long the training loop stood still: for the full copy, or (`nccl`) until all was sent. push_s: from the post until
    the update was settled; None until it is. bytes_sent: uploaded (`stream`, or to an object store). trouble: why it does not get
    on, if it does not. uploading: to an object store, for the first post.
    """

    def __init__(
        self, spec: UpdateSpec, folder: Path | None = None, bring: Callable[[], int] | None = None
    ) -> None:  # fmt: skip
        """Args: bring: as `StagedWeights` has it."""
        self.spec = spec
        self.folder = folder
        self.bring = bring
        self.copy_s = 0.0
        self.push_s: float | None = None
        self.bytes_sent = 0
        self.update: Update | None = None
        self.trouble: StenoError | None = None
        self.uploading = False
        self._started = time.monotonic()
        self._refused: StenoError | None = None
        self._patches_refused = (
            False  # by a worker, at some time: once the proxy tries that worker again, its table no longer says so
        )
        self._ended: Update | None = None  # its last state other than running: a failed update may be tried again
        self._settled = threading.Event()

    @property
    def version(self) -> str:
        return self.spec.version

    @property
    def served(self) -> bool:
        """Whether some worker serves it: new turns are sampled by it from then on."""
        update = self.update
        return update is not None and (update.state == "done" or any(w.state == "served" for w in update.workers))

    @property
    def settled(self) -> bool:
        """Whether every worker has served it or has been named, a newer one came, or it was refused."""
        return self._settled.is_set()

    @property
    def patches_refused(self) -> bool:
        """Whether weights sent by difference were refused: by a worker that could not make them (one that made them and found
        them wrong by the probe would find the same of a full copy), or by a proxy that knows no patches."""
        return bool(self.spec.manifest.patches) and (isinstance(self._refused, BadRequest) or self._patches_refused)

    @property
    def outcome(self) -> str:
        """In words, as far as it is known."""
        if self._refused is not None:
            return f"refused: {self._refused}"
        state = self.update.state if self.update else "not accepted yet"
        return f"{state}: {self.trouble}" if self.trouble is not None else state

    @property
    def failed(self) -> dict[str, str]:
        """worker id -> why it does not serve these weights. They are tried again by the proxy and may leave this table."""
        workers = self.update.workers if self.update else []
        return {worker.worker_id: worker.error or "" for worker in workers if worker.state == "failed"}

    def wait(self, timeout_s: float | None = None) -> Update:
        """Until it is settled.

        Returns: the update; its state says how it ended. Raises: PushFailed: refused by the proxy (409: the version exists with
        other weights), or given up for a newer one; TimeoutError, which names what stands in the way.
        """
        if not self._settled.wait(timeout_s):
            state = self.update.state if self.update else "not accepted yet"
            seconds = time.monotonic() - self._started
            raise TimeoutError(
                f"update {self.version} is {state} after {seconds:.0f} s: {self.trouble or 'no trouble'}"
            )
        if self._refused is not None:
            raise PushFailed(f"update {self.version}: {self._refused}") from self._refused
        assert self._ended is not None
        return self._ended

    # -- from the thread that follows it --------------------------------------------------------------------------------------

    def seen(self, update: Update) -> None:
        self.update = update
        self._patches_refused |= any(map(_could_not_be_made, self.failed.values()))
        self.trouble = None
        if update.state != "running":
            self._ended = update
            self._settle()

    def refuse(self, error: StenoError) -> None:
        self._refused = error
        self._settle()

    def _settle(self) -> None:
        if self.push_s is None:
            self.push_s = time.monotonic() - self._started
        self._settled.set()


def _could_not_be_made(why: str) -> bool:
    """Args: why: `<code>: <what a worker says>`."""
    refused = f"{WeightsRefused.code}: "
    return why.startswith(refused) and not why.removeprefix(refused).startswith("probe")

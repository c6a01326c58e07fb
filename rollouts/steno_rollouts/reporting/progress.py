"""Progress of rollouts: one live line on a terminal, otherwise a plain line every few seconds; failures as they come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from steno.contracts.rest import GroupTrials
from steno_rollouts.outcome import EndReason, TrialResult
from steno_rollouts.trials.runner import FailedTrial

REFRESH_S = 0.25
MAX_SHOWN_FAILURES = 20
"""Lines about single trials; the rest is in the counts and in the results file."""


@dataclass
class Stats:
    """Counts of what has happened. trials, all_groups: that are planned; None: not known. groups: that have been started, or had
    ended before. spare: ended as such. held_why: why no group is admitted now, for held_s; None: one is."""

    trials: int | None = None
    groups: int = 0
    running: int = 0
    done: int = 0
    earlier: int = 0
    tokens: int = 0
    failed_early: int = 0
    awaiting: int = 0
    spare: int = 0
    held_why: str | None = None
    held_s: float = 0.0
    all_groups: int | None = None
    rewards: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def mean_reward(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def failures(self) -> int:
        return sum(self.reasons.values())

    def line(self, elapsed_s: float) -> str:
        """`12/64 trials, 8 running, mean reward 0.42, 2 failed (timeout 2), 310 tokens/s, 1:02`."""
        minutes, seconds = divmod(int(elapsed_s), 60)
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        parts = [
            f"{self.done}{f'/{self.trials}' if self.trials is not None else ''} trials",
            f"{self.running} running",
            f"{self.groups}{f'/{self.all_groups}' if self.all_groups is not None else ''} groups",
            "mean reward -" if self.mean_reward is None else f"mean reward {self.mean_reward:.3f}",
            f"{self.failures} failed ({reasons})" if self.failures else "0 failed",
            f"{self.tokens / max(elapsed_s, 1e-3):,.0f} tokens/s",
            f"{minutes}:{seconds:02d}",
        ]
        if self.earlier:
            parts.insert(1, f"{self.earlier} of them earlier")
        if self.spare:
            parts.append(f"{self.spare} spare")
        if self.awaiting:
            parts.append(f"{self.awaiting} wait to be scored with their groups")
        if self.failed_early:
            parts.append(f"{self.failed_early} failed before their first turn, still open")
        if self.held_why is not None:
            parts.append(f"held back for {self.held_s:.0f} s: {self.held_why}")
        return ", ".join(parts)


class ProgressPrinter:
    """An `Observer` that prints to `console`. `async with` it around the rollouts."""

    def __init__(
        self,
        console: Console,
        trials: int | None = None,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        groups: int | None = None,
    ) -> None:
        self.stats = Stats(trials, all_groups=groups)
        self._groups: set[str] = set()
        self._running: set[str] = set()
        self._failed_early: set[str] = set()
        self._awaiting: set[str] = set()
        self._held_at: float | None = None
        self._console = console
        self._every_s = every_s
        self._clock = clock
        self._began = clock()
        self._shown = 0

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[ProgressPrinter]:
        """Show it until the block ends; a last line is left."""
        self._began = self._clock()
        live = None
        if self._console.is_terminal:
            live = Live(self, console=self._console, refresh_per_second=1 / REFRESH_S, transient=True)
        ticking = asyncio.create_task(self._tick()) if live is None else None
        try:
            with live or contextlib.nullcontext():
                yield self
        finally:
            if ticking is not None:
                ticking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await ticking
            self._say(self.line())

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def line(self) -> str:
        self.stats.held_s = 0.0 if self._held_at is None else self._clock() - self._held_at
        return self.stats.line(self.elapsed_s)

    def __rich__(self) -> Text:
        return Text(self.line())

    def group_started(self, group: GroupTrials) -> None:
        self._count_group(group.group.group_id)
        if self.stats.trials is not None:  # those that were deleted never end
            self.stats.trials -= group.group.size - len(group.trials)

    def _count_group(self, group_id: str) -> None:
        self._groups.add(group_id)
        self.stats.groups = len(self._groups)

    def trial_started(self, trial_id: str) -> None:
        self._running.add(trial_id)
        self.stats.running = len(self._running)

    def _over(self, trial_id: str) -> None:
        """It does not run any more, if it did."""
        self._running.discard(trial_id)
        self.stats.running = len(self._running)

    def trial_failed(self, failed: FailedTrial) -> None:
        self._over(failed.trial_id)
        self._failed_early.add(failed.trial_id)
        self.stats.failed_early = len(self._failed_early)
        self._failure(failed.trial_id, f"failed before its first turn: {failed.verdict.detail}", str(failed.folder))

    def held_back(self, why: str | None) -> None:
        if why is None:
            self._held_at = None
        elif self._held_at is None:
            self._held_at = self._clock()
            self._say(f"held back: {why}")
        self.stats.held_why = why

    def trial_waits(self, result: TrialResult) -> None:
        self._over(result.trial_id)
        if result.attempts and not result.earlier and result.trial_id not in self._failed_early:
            self._awaiting.add(result.trial_id)
            self.stats.awaiting = len(self._awaiting)

    def trial_ended(self, result: TrialResult) -> None:
        stats = self.stats
        stats.done += 1
        self._over(result.trial_id)
        self._count_group(result.group_id)
        if result.reward is not None:
            stats.rewards.append(result.reward)
        elif result.end_reason == EndReason.SPARE:
            stats.spare += 1
        else:
            stats.reasons[result.end_reason] += 1
        if result.earlier:
            stats.earlier += 1
            return
        stats.tokens += result.completion_tokens
        if result.trial_id in self._failed_early:  # it is not run again
            self._failed_early.discard(result.trial_id)
            stats.failed_early = len(self._failed_early)
            return
        if result.trial_id in self._awaiting:
            self._awaiting.discard(result.trial_id)
            stats.awaiting = len(self._awaiting)
        if result.failed and result.end_reason != EndReason.CANCELLED:
            self._failure(result.trial_id, f"{result.end_reason} {result.detail}", result.folder)

    def _failure(self, trial_id: str, what: str, folder: str | None) -> None:
        self._shown += 1
        if self._shown <= MAX_SHOWN_FAILURES:
            self._say(f"{trial_id}: {what}" + (f" (see {folder})" if folder else ""), style="red")
        elif self._shown == MAX_SHOWN_FAILURES + 1:
            self._say("further failures are counted only")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            self._say(self.line())

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

"""A training run as its operator sees it: one line a step in a log, a live picture of the loop on a terminal.

Draws what it is told and asks nobody. Reward over steps, what the loop is doing now, where groups are, and what became of the
tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from steno_trainer.data.ledger import Account

BARS = "▁▂▃▄▅▆▇█"
CURVE_STEPS = 60


def ledger_line(total: Account) -> str:
    """`1,200 sampled = 800 trained + 400 not trained (zero_variance 300, constrained 100)`, in tokens."""
    reasons = sorted(total.untrained.items(), key=lambda item: -item[1])
    why = ", ".join(f"{reason.value} {tokens:,}" for reason, tokens in reasons if tokens)
    untrained = sum(total.untrained.values())
    return (
        f"{total.sampled:,} sampled = {total.trained:,} trained + {untrained:,} not trained{f' ({why})' if why else ''}"
    )


def step_line(version: str, values: Mapping[str, float]) -> str:
    """What one step did, for logs."""
    parts = [version]
    for name, words in (
        ("reward/mean", "reward {:.3f}"),
        ("batch/groups_trained", "{:.0f} groups"),
        ("batch/trained_tokens", "{:,.0f} tokens"),
        ("loss", "loss {:+.4f}"),
        ("policy/entropy", "entropy {:.3f}"),
        ("mismatch/kl", "mismatch kl {:.5f}"),
        ("optimizer/grad_norm", "grad norm {:.3f}"),
        ("staleness/mean", "staleness {:.2f}"),
        ("time/wait_s", "waited {:.1f} s"),
        ("time/train_s", "trained {:.1f} s"),
    ):
        if name in values:
            parts.append(words.format(values[name]))
    return "  ".join(parts)


def curve(values: list[float]) -> str:
    """One character a step; the axis is that of the values themselves."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in values)


class ConsoleView:
    """Use as a context manager. On a terminal a live picture, else lines; `say` writes a line either way."""

    def __init__(self, console: Console, *, run: str, steps: int | None) -> None:
        self._console = console
        self._run, self._steps = run, steps
        self._rewards: deque[float] = deque(maxlen=CURVE_STEPS)
        self._evaluations: list[tuple[int, float]] = []
        self._version, self._phase, self._since = "", "starting", time.monotonic()
        self._push = ""
        self._queue: dict[str, int] = {}
        self._values: Mapping[str, float] = {}
        self._ledger = Account()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self.picture, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def phase(self, what: str) -> None:
        """What the trainer does from now on."""
        self._phase, self._since = what, time.monotonic()

    def push(self, what: str) -> None:
        """What its weights do meanwhile; "" for nothing."""
        self._push = what

    def queue(self, **groups: int) -> None:
        """Groups by where they are: `running`, `ready`, `leased`, …"""
        self._queue = groups

    def evaluated(self, step: int, reward: float) -> None:
        self._evaluations.append((step, reward))
        self.say(f"evaluation at step {step}: reward {reward:.3f}")

    def stepped(
        self,
        version: str,
        values: Mapping[str, float],
        ledger: Account,
        by_version: Mapping[str, Account] | None = None,
    ) -> None:
        """A step is done. ledger: over all versions; by_version: of those whose tokens the step settled."""
        self._version, self._values, self._ledger = version, values, ledger
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
        if self._live is None:
            self.say(step_line(version, values))
            self.say(f"  ledger: {ledger_line(ledger)}")
            for name, account in (by_version or {}).items():
                self.say(f"    {name}: {ledger_line(account)}")

    def picture(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        elapsed = time.monotonic() - self._since
        of = f" of {self._steps}" if self._steps else ""
        step = self._version.rpartition("/")[2]
        grid.add_row(
            "run", Text(f"{self._run}, version {self._version or '-'}" + (f", step {step}{of}" if step else ""))
        )
        grid.add_row("now", Text(f"{self._phase} ({elapsed:.0f} s)", style="bold"))
        if self._push:
            grid.add_row("weights", Text(self._push))
        if self._rewards:
            rewards = list(self._rewards)
            grid.add_row("reward", Text.assemble((curve(rewards), "green"), f"  {rewards[0]:.3f} -> {rewards[-1]:.3f}"))
        if self._evaluations:
            shown = ", ".join(f"{step}: {reward:.3f}" for step, reward in self._evaluations[-6:])
            grid.add_row("evaluation", Text(shown))
        if self._queue:
            grid.add_row("groups", Text(", ".join(f"{count} {name}" for name, count in self._queue.items())))
        if self._values:
            grid.add_row("step", Text(step_line(self._version, self._values).split("  ", 1)[-1]))
            grid.add_row("tokens", Text(ledger_line(self._ledger)))
        return Group(grid)

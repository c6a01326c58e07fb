"""What `steno demo --train` ends with: where every sampled token went, and the curve of the rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from steno.contracts.runs.leases import RunView


def show_ledger(console: Console, trained: Mapping[str, Any], view: RunView) -> None:
    """sampled = trained + not trained, by reason (I4): the proxy's books and the trainer's together.

    trained: the trainer's accounts, as in its metrics file: {"sampled", "trained", "untrained": {reason: tokens}}.
    """
    sampled = sum(view.sampled.values())
    reasons: Counter[str] = Counter(trained["untrained"])
    for reason, by_version in view.not_trained.items():
        reasons[reason] += sum(by_version.values())
    waiting = sampled - trained["trained"] - sum(reasons.values())
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("tokens", justify="right")
    table.add_column("")
    table.add_row(f"{sampled:,}", "sampled, over all trials that have ended")
    table.add_row(f"{trained['trained']:,}", "trained")
    for reason, tokens in reasons.most_common():
        if tokens:
            table.add_row(f"{tokens:,}", f"not trained: {reason}")
    table.add_row(f"{waiting:,}", "in groups that wait for a further step")
    console.print()
    console.print("The ledger")
    console.print(table)


def write_plot(file: Path, steps: Sequence[Mapping[str, Any]], before: float, after: float) -> None:
    """The mean reward of each step's groups, and of the evaluations at both ends. A PNG."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot, ticker

    taken = [step for step in steps if step["stepped"] and "reward/mean" in step["values"]]
    at = [step["step"] for step in taken]
    rewards = [step["values"]["reward/mean"] for step in taken]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(at, rewards, marker=".", color="tab:blue", label="groups of the step")
    if at:
        axes.plot([0, max(at)], [before, after], "o", color="tab:orange", label="held-out worlds")
    axes.set(xlabel="optimisation step", ylabel="mean reward", ylim=(0, 1))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, format="png")  # whatever the name ends with
    pyplot.close(figure)

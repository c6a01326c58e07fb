"""A leased group with its rows: `CollectedGroup`, and how it is read from the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from steno import Client
from steno.contracts.errors import Gone, NotFound
from steno.contracts.rest import UnreadableTurn
from steno.contracts.runs.leases import Lease
from steno_adapters.main_branch import main_branch
from steno_adapters.rows import TrainableRow, trainable_rows

Branches = Literal["all", "main"]


@dataclass(frozen=True)
class CollectedGroup:
    """A leased group.

    rewards: by trial, without trials that can't be trained (such as failed ones). rows: of the trials in `rewards`, in the order
    of trials and branches; the same each time the group is served, unless a trial was deleted. untrained: sampled tokens of the
    leased trials that no row trains, by reason: those of `trainable_rows`, `other_branch`, `deleted` (since the group was first
    leased), `unreadable` (the record of the turn, or of one before it, does not add up). left_out: trial_id -> why the trial is
    not in `rewards`. earlier: this collector did not roll the group out. other_branches: how many branches could be trained but
    have no row, since one branch per trial was asked for.
    """

    lease: Lease
    rewards: dict[str, float]
    rows: list[TrainableRow]
    untrained: Counter[str] = field(default_factory=Counter)
    earlier: bool = False
    other_branches: int = 0

    @property
    def group_id(self) -> str:
        return self.lease.group.group_id

    @property
    def task(self) -> dict[str, Any]:
        """The fields of its task."""
        return self.lease.group.task

    @property
    def left_out(self) -> dict[str, str]:
        return self.lease.left_out


def read_group(
    client: Client, lease: Lease, *, policy: str, models: Sequence[str], branches: Branches, earlier: bool
) -> CollectedGroup:
    """Args: branches: of a trial that forked: all have rows, or `main`: the one with the most sampled tokens, whole."""
    rows: list[TrainableRow] = []
    rewards: dict[str, float] = {}
    untrained, others = Counter[str](), 0
    for trial_id in lease.tokens.keys() - {session.trial_id for session in lease.trials}:
        untrained["deleted"] += sum(lease.tokens[trial_id].values())  # since the group was first leased
    for session in lease.trials:
        sampled = sum(lease.tokens.get(session.trial_id, {}).values())
        try:
            recorded = client.sample_list(session.trial_id)
        except (Gone, NotFound):
            untrained["deleted"] += sampled
            continue
        samples = recorded.items
        assert session.reward is not None  # leased trials have one
        rewards[session.trial_id] = session.reward
        if branches == "main":
            main = main_branch(samples, policy=policy, models=models)
            found, left = [row for row in (main.row,) if row is not None], main.untrained
            others += main.others
        else:
            found, left = trainable_rows(samples, policy=policy, models=models)
        rows += found
        held = sum(row.trained_tokens for row in found) + left.total()
        untrained += left + _in_no_sample(sampled - held, recorded.unreadable)
    return CollectedGroup(lease, rewards, rows, untrained, earlier, others)


def _in_no_sample(tokens: int, unreadable: Sequence[UnreadableTurn]) -> Counter[str]:
    """By reason, the sampled tokens of a trial that no sample holds: those of turns that can't be read, and of superseded turns
    that no later turn continues."""
    damaged = min(tokens, sum(turn.completion_tokens for turn in unreadable))
    return +Counter(unreadable=damaged, superseded=tokens - damaged)

"""The rewards of a group, from a function of the user's that sees all of its trials: which of two answers is better, say.

`FILE.py:function` takes its parameters by name, from `GROUP_INPUTS`, and returns for each trial what a reward function returns
for one (`reward.py`): a list in the trials' order, or a dict by trial id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steno.client.client import AsyncClient
from steno.contracts.errors import ConfigError
from steno.contracts.records import Session
from steno_rollouts.outcome import OWN_REWARD, CommandOutcome, RewardError
from steno_rollouts.trials.reward import read_answer, shown
from steno_rollouts.trials.transcript import Transcript, read_transcript
from steno_rollouts.trials.user_function import UserFunction

GROUP_INPUTS = "task task_folder group_id trials".split()


@dataclass(frozen=True)
class TrialOfGroup:
    """A trial, as the function sees it. reward: what its own reward function, file or verifier said; None: nothing. metrics,
    end_reason: as recorded (`completed`, `timeout`, `exit_code`, `limit:max_turns`); `completed` where a command failed and
    there was a reward of its own, or its reward function failed, or its reward file is malformed."""

    trial_id: str
    transcript: Transcript
    reward: float | None
    metrics: Mapping[str, float]
    end_reason: str

    @classmethod
    async def read(cls, client: AsyncClient, session: Session, *, recorded: bool = False) -> TrialOfGroup:
        """Args: recorded: the trial was not scored together with its group: its reward is its own. Raises: StenoError."""
        metrics = dict(session.metrics)
        own = metrics.pop(OWN_REWARD, session.reward if recorded else None)
        transcript = await read_transcript(client, session)
        return cls(session.trial_id, transcript, own, metrics, session.end_reason or "")


class GroupRewardFunction(UserFunction):
    """The function of `--group-reward`."""

    def __init__(self, where: str, timeout_s: float = 300.0) -> None:
        """Raises: ConfigError: no such file or function, a parameter that is none of `GROUP_INPUTS`, or no `trials`."""
        super().__init__(where, timeout_s, "group_reward", GROUP_INPUTS)
        if not self.takes("trials"):
            raise ConfigError(f"group_reward: {where} must take `trials`", field="group_reward")

    async def __call__(
        self, group_id: str, task: dict[str, Any], task_folder: Path | None, trials: Sequence[TrialOfGroup]
    ) -> dict[str, CommandOutcome]:
        """What it said of each trial, by id. Args: task: all of its fields. Raises: RewardError, also for what it raised."""
        inputs = {"task": task, "task_folder": task_folder, "group_id": group_id, "trials": list(trials)}
        trial_ids = [trial.trial_id for trial in trials]
        return await self._said(inputs, group_id, lambda answer: self._read(answer, trial_ids))

    def _read(self, answer: Any, trial_ids: Sequence[str]) -> dict[str, CommandOutcome]:
        each = self._each(answer, trial_ids)
        return {trial_id: read_answer(each[trial_id], f"{self.where}: {trial_id}") for trial_id in trial_ids}

    def _each(self, answer: Any, trial_ids: Sequence[str]) -> Mapping[str, Any]:
        wanted = f"must be a list of {len(trial_ids)} rewards, or a dict of them by trial_id"
        if isinstance(answer, Mapping):
            if set(answer) != set(trial_ids):
                raise RewardError(f"{self.where}: got a dict with {shown(sorted(map(str, answer)))}, {wanted}")
            return answer
        in_order = isinstance(answer, Iterable) and not isinstance(answer, str | bytes | Set)
        found = list(answer) if in_order else None
        if found is None or len(found) != len(trial_ids):
            raise RewardError(f"{self.where}: got {shown(answer if found is None else found)}, {wanted}")
        return dict(zip(trial_ids, found, strict=True))

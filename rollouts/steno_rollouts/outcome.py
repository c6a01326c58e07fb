"""How a trial can end, and what is kept of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from steno.contracts.errors import StenoError
from steno.contracts.records import Counts, Session, SessionStatus

OWN_REWARD = "own_reward"
"""The metric of a trial that is scored together with its group: what its own reward function, file or verifier said."""
WALL_S = "rollout/wall_s"
"""The metric that every trial has whose launcher has posted its end."""


class RewardError(StenoError):
    """A reward that can't be read or computed; the trial is unscored. Never leaves these rollouts."""

    code = "reward_error"


class EndReason(StrEnum):
    """Why a launcher ended a trial, as its session's `end_reason`. The proxy's own reasons (`limit:…`, `replay_diverged`) are
    not here. The session is `completed` for the first three, and for any that has a reward; else `aborted`.

    A completed trial without a reward is unscored: accounted for, never trained, and still open to a reward that is posted later.
    """

    COMPLETED = "completed"  # it ran to its end, and has a reward
    NO_REWARD = "no_reward"  # it ran to its end, and nothing said what that was worth
    REWARD_ERROR = "reward_error"  # its reward file is malformed, or the reward function raised, or took too long
    TIMEOUT = "timeout"  # it was ended at its time limit; scored where the reward function or `timeout_reward` says so
    EXIT_CODE = "exit_code"  # the command failed, and had no turn or no reward
    START_FAILED = "start_failed"  # the command could not be run at all
    SPARE = "spare"  # enough other trials of its group had a reward before it ended
    CANCELLED = "cancelled"  # ended by Ctrl-C, SIGTERM, or whoever awaited the rollouts
    DEADLINE = "deadline"  # its group's deadline had passed before it began
    INTERRUPTED = "interrupted"  # its rollouts were killed while it ran, and started again; or its node was lost

    @property
    def early(self) -> bool:
        """Whether a trial without a turn, ended so, failed before its first turn: that says nothing of the policy."""
        return self in (EndReason.EXIT_CODE, EndReason.START_FAILED, EndReason.DEADLINE, EndReason.INTERRUPTED)

    @property
    def status(self) -> SessionStatus:
        done = (EndReason.COMPLETED, EndReason.NO_REWARD, EndReason.REWARD_ERROR)
        return "completed" if self in done else "aborted"


@dataclass(frozen=True)
class CommandOutcome:
    """What became of a trial's command, before anything is posted. detail: for people; "" where there is nothing to add."""

    reason: EndReason
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    detail: str = ""

    def failed(self, *, scored_together: bool) -> bool:
        """Whether somebody may want to look at its folder. scored_together: without a reward of its own it has not failed."""
        return self.reward is None and not (scored_together and self.reason is EndReason.NO_REWARD)


@dataclass(frozen=True)
class TrialResult:
    """One line of `--results`: a trial that has ended.

    end_reason: the session's: an `EndReason`, or the proxy's own (`limit:max_turns`). reward: None: unscored. wall_s: from the
    first attempt's start to the last one's end. folder: where its working folder and output were kept; None: removed.
    earlier: it had ended before these rollouts began. image: digest of the image that its sandbox ran, of Docker and Podman.
    awaits_reward: it is scored together with its group, and is no line yet.
    """

    run_id: str
    group_id: str
    trial_id: str
    task_id: str
    round: str
    status: str
    end_reason: str
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    attempts: int = 0
    exit_code: int | None = None
    wall_s: float = 0.0
    turns: int = 0
    completion_tokens: int = 0
    folder: str | None = None
    earlier: bool = False
    image: str | None = None
    awaits_reward: bool = False

    @property
    def failed(self) -> bool:
        """It has no reward, and was not a spare."""
        return self.reward is None and self.end_reason != EndReason.SPARE

    @property
    def failed_early(self) -> bool:
        """Before its first turn: another start of the run runs it again, if its whole group went so."""
        early = {reason.value for reason in EndReason if reason.early}
        return self.failed and self.turns == 0 and self.end_reason in early

    def row(self) -> dict[str, Any]:
        found = asdict(self)
        del found["awaits_reward"]
        return found


def is_scored_later(session: Session) -> bool:
    """Whether its launcher has posted its end, and it is scored with its group. Else a limit of its own has ended it, and nobody
    has said yet what it was worth."""
    return session.awaits_reward and WALL_S in session.metrics


def has_no_end(session: Session) -> bool:
    """Whether a trial runs, or a limit of its own has ended it and its launcher has not posted its end."""
    return session.status == "open" or (session.awaits_reward and not is_scored_later(session))


def deleted(session: Session) -> Session:
    """What is known of a trial that was deleted, from what it was before: nothing is on record of it any more."""
    return session.model_copy(
        update={"status": "deleted", "end_reason": "deleted", "counts": Counts(), "awaits_reward": False}
    )


def recorded_result(session: Session, *, task_id: str, round_name: str, earlier: bool) -> TrialResult:
    """What the proxy has on record of a trial that has ended."""
    return TrialResult(
        run_id=session.run_id or "",
        group_id=session.group_id or "",
        trial_id=session.trial_id,
        task_id=task_id,
        round=round_name,
        status=session.status,
        end_reason=session.end_reason or "",
        reward=session.reward if session.status == "completed" else None,
        metrics=dict(session.metrics),
        turns=session.counts.turns,
        wall_s=round(session.metrics.get(WALL_S, 0.0), 3),
        completion_tokens=session.counts.completion_tokens,
        earlier=earlier,
        awaits_reward=session.awaits_reward,
    )

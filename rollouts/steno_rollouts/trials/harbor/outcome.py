"""What became of a trial of Harbor's, in this project's words. Values in, values out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from steno.contracts.records import MAX_REWARD
from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError
from steno_rollouts.trials.executor import Exit

Kind = Literal["timeout", "agent", "start", "verifier", "lost"]
FAILED = 1
"""Exit code of an agent that failed: Harbor does not tell its own."""
SHARED = "shared_verifier"
"""Metric: 1 where the verifier ran in a sandbox that the agent had."""
ONLY_PROXY = "only_proxy"

_AGENT = (
    "NonZeroAgentExitCodeError ApiError ApiRateLimitError ApiUsageLimitError ApiInternalServerError ApiOverloadedError "
    "ApiConnectionClosedError ApiResponseStalledError OutputTokenExceededError ContextWindowExceededError UnknownApiError "
    "ApiProviderResourceNotFoundError AgentSafetyRefusalError AgentAuthenticationError ModelNotFoundError NetworkConnectionError"
)
_VERIFIER = (
    "VerifierTimeoutError AddTestsDirError VerifierOutputParseError DownloadVerifierDirError RewardFileNotFoundError "
    "RewardFileEmptyError StillRunning"
)
_START = "AgentSetupTimeoutError EnvironmentStartTimeoutError HealthcheckError SandboxBuildFailedError"
_PODS = (
    "ImageNotPulled PodNotStarted PodDeadline PodOutOfMemory PodEnded QuotaExceeded ApiRefused AlreadyThere Changed "
    "NoCredentials"
)
_LOST_PODS = "PodEvicted PodGone StreamBroken ApiUnavailable NotThere"
"""`kubernetes/pods/errors.py` and `api.py`: of a pod that is lost nothing is known; its node may be alive."""
KINDS: Mapping[str, Kind] = {
    "AgentTimeoutError": "timeout",
    **dict.fromkeys(_AGENT.split(), "agent"),
    **dict.fromkeys(_VERIFIER.split(), "verifier"),
    **dict.fromkeys(_START.split(), "start"),
    **dict.fromkeys(_PODS.split(), "start"),
    **dict.fromkeys(_LOST_PODS.split(), "lost"),
}
"""Harbor's exceptions. timeout: `EndReason.TIMEOUT`, with a reward if the verifier gave one. agent: `EXIT_CODE`, unless there
is a reward. start: `START_FAILED`; of a verifier's sandbox, `REWARD_ERROR`. lost: as start, but `INTERRUPTED` of a sandbox in
which the agent has begun. verifier: `REWARD_ERROR`. Any other counts as the part of the trial in which it was raised."""


@dataclass(frozen=True)
class HarborOutcome:
    """What the driver wrote. rewards: None: the verifier said nothing. steps: name and rewards of each step that has some.
    unverified: name of the first step that began and has none: Harbor leaves it out of the mean.
    error: `Type: message`; kind: what it means. image: digest of what its sandbox ran, where that is known."""

    rewards: Mapping[str, float] | None
    steps: tuple[tuple[str, Mapping[str, float]], ...] = ()
    unverified: str | None = None
    kind: Kind | None = None
    error: str = ""
    shared: bool = False
    only_proxy: bool = False
    unreachable: str | None = None
    image: str | None = None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None: the driver came to no end."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        steps = found["step_results"] or []
        parts = [found, *reversed(steps)]
        info = next((part["exception_info"] for part in parts if part["exception_info"]), None)
        began = bool(found["agent_execution"]) or any(step["agent_execution"] for step in steps)
        verified = any(part.get("verifier") for part in parts)
        return cls(
            rewards=_rewards(found),
            steps=tuple((step["step_name"], rewards) for step in steps if (rewards := _rewards(step)) is not None),
            unverified=next((step["step_name"] for step in steps if _rewards(step) is None), None),
            kind=_kind(info["exception_type"], began, verified) if info else None,
            error=f"{info['exception_type']}: {_line(info['exception_message'])}" if info else "",
            shared="shared" in found["modes"],
            only_proxy=bool(found["only_host"]),
            unreachable=found["unreachable"],
            image=found["image"],
        )

    @property
    def exit(self) -> Exit:
        """How the agent ended."""
        if self.kind in ("start", "lost"):
            return Exit(None, error=self.error, lost=self.kind == "lost")
        if self.kind == "timeout":
            return Exit(None, timed_out=True, error=self.error)
        return Exit(FAILED if self.kind == "agent" else 0)

    @property
    def metrics(self) -> dict[str, float]:
        marks = {SHARED: 1.0} if self.shared else {}
        if self.only_proxy:
            marks[ONLY_PROXY] = 1.0
        return {
            **{f"step/{name}/{key}": value for name, rewards in self.steps for key, value in _finite(rewards).items()},
            **marks,
        }

    def worth(self, key: str) -> CommandOutcome | None:
        """What the verifier gave under `key`; all else it gave are metrics. None: nothing. Raises: RewardError."""
        if self.rewards is None:
            if self.kind == "verifier":
                raise RewardError(f"verifier: {self.error}")
            return (
                None
                if self.kind
                else CommandOutcome(EndReason.NO_REWARD, None, self.metrics, "the verifier gave no reward")
            )
        if self.unverified is not None:
            raise RewardError(
                f"verifier: step {self.unverified!r} has no reward: {self.error or 'its verifier gave none'}"
            )
        if key not in self.rewards:
            raise RewardError(
                f"reward_key: the verifier gave no {key!r}; it gave {', '.join(sorted(self.rewards)) or 'nothing'}"
            )
        reward = self.rewards[key]
        if not math.isfinite(reward) or abs(reward) > MAX_REWARD:
            raise RewardError(f"verifier: {key}: got {reward:g}, must be within ±{MAX_REWARD:g}")
        others = _finite({name: value for name, value in self.rewards.items() if name != key})
        return CommandOutcome(EndReason.COMPLETED, reward, {**others, **self.metrics})


def _rewards(part: Mapping[str, Any]) -> dict[str, float] | None:
    given = (part["verifier_result"] or {}).get("rewards")
    return None if given is None else {str(key): _number(value) for key, value in given.items()}


def _number(value: Any) -> float:
    """Harbor takes integers of any size, and its JSON has null for what is no number."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _finite(rewards: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in rewards.items() if math.isfinite(value)}


def _kind(name: str, began: bool, verified: bool) -> Kind:
    kind = KINDS.get(name)
    if kind not in (None, "start", "lost"):
        return kind
    if not began:
        return "start"
    if verified:
        return "verifier"
    return "lost" if kind == "lost" else "agent"


def _line(message: str) -> str:
    """Of a long one, how it begins and how it ends: a command that failed stands first, and why it did last."""
    line = " ".join(message.split())
    return line if len(line) <= 400 else f"{line[:120]} … {line[-280:]}"

"""The reward of a trial: from a file that the trial wrote, or from the user's reward function, also long after it ran.

`reward.json` (`{"reward": 1.0, "metrics": {"tests_passed": 3}}`; other numbers beside `reward` are metrics too) or
`reward.txt` (one number) in the working folder. A function of the user's (`user_function.py`) returns a number, such an object,
or None for "can't say".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from steno.contracts.json_limits import storable
from steno.contracts.records import MAX_REWARD
from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.transcript import Transcript
from steno_rollouts.trials.user_function import UserFunction

REWARD_JSON = "reward.json"
REWARD_TEXT = "reward.txt"
MAX_REWARD_BYTES = 1_000_000
"""Of a reward file: a trial writes it, and these rollouts read it whole."""
MAX_METRICS_BYTES = 256 * 1024
"""Of a trial's metrics, as JSON: thousands of them. They are posted with its end, and the proxy takes 1 MiB."""
INPUTS = "task task_folder workdir exit_code stdout stderr trial_id transcript".split()
RECORDED_INPUTS = "task trial_id transcript".split()
"""What of these is on record once a trial's folder is gone."""


class TrialToScore(Protocol):
    """A trial, as far as a reward function cares."""

    @property
    def trial_id(self) -> str: ...
    def inputs(self) -> dict[str, Any]:
        """What it may ask for, by name."""
        ...


@dataclass(frozen=True)
class RecordedTrial:
    """A trial of which only the record is left. task: its fields, as far as they are known. transcript: None: the function does
    not take it. task_folder: if that is known."""

    task: dict[str, Any]
    trial_id: str
    transcript: Transcript | None
    task_folder: Path | None = None

    def inputs(self) -> dict[str, Any]:
        known = {"task": self.task, "trial_id": self.trial_id, "transcript": self.transcript}
        return known if self.task_folder is None else {**known, "task_folder": self.task_folder}


@dataclass(frozen=True)
class FinishedTrial:
    """A trial that has run, as a reward function may ask for it. transcript: None: the function does not take it."""

    task: Task
    workdir: Path
    exit_code: int | None
    stdout: Path
    stderr: Path
    trial_id: str
    transcript: Transcript | None

    def inputs(self) -> dict[str, Any]:
        return {
            "task": self.task.arguments(),
            "task_folder": self.task.folder,
            "workdir": self.workdir,
            "exit_code": self.exit_code,
            "stdout": self.stdout,
            "stderr": self.stderr,
            "trial_id": self.trial_id,
            "transcript": self.transcript,
        }


class RewardFunction(UserFunction):
    """The function of `--reward`, of single trials."""

    def __init__(self, where: str, timeout_s: float = 300.0) -> None:
        """Raises: ConfigError: no such file or function, or a parameter that is none of `INPUTS`."""
        super().__init__(where, timeout_s, "reward", INPUTS)

    async def __call__(self, scored: TrialToScore) -> CommandOutcome:
        """Raises: RewardError, also for what the function raised."""
        return await self._said(scored.inputs(), scored.trial_id, lambda answer: read_answer(answer, self.where))


class BadRewardFile(RewardError):
    """A reward file that the trial wrote, and that is none."""


def written_reward(workdir: Path) -> CommandOutcome | None:
    """`read_reward` of a file that the trial, and so its agent, may have written. Raises: BadRewardFile."""
    try:
        return read_reward(workdir)
    except RewardError as error:
        raise BadRewardFile(error.message) from error


def read_reward(workdir: Path) -> CommandOutcome | None:
    """What the files of a folder say; None: nothing. Raises: RewardError saying what is wrong with the file."""
    text = _read(workdir / REWARD_JSON)
    if text is not None:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RewardError(f"{REWARD_JSON}: not valid JSON: {error}") from None
        if not isinstance(answer, Mapping):
            raise RewardError(f"{REWARD_JSON}: got {shown(answer)}, must be an object with `reward`")
        return _verdict(answer, REWARD_JSON)
    text = _read(workdir / REWARD_TEXT)
    if text is None:
        return None
    try:
        return _verdict(float(text), REWARD_TEXT)
    except ValueError:
        raise RewardError(f"{REWARD_TEXT}: got {shown(text)}, must be one number") from None


def read_answer(answer: Any, where: str) -> CommandOutcome:
    """What a function said of a trial. Raises: RewardError."""
    try:
        return _verdict(answer, where)
    except RewardError:
        raise
    except Exception as error:  # what it returned may be of the user's own code as well
        raise RewardError(f"{where}: its answer raised {type(error).__name__}: {error}") from error


def check_metrics(metrics: Mapping[str, float], where: str) -> None:
    """Raises: RewardError: the proxy would not take them."""
    for name in metrics:
        try:
            storable(name)
        except ValueError as error:
            raise RewardError(
                f"{where}: metrics: got the name {shown(name)}, must be one that can be stored: {error}"
            ) from None
    size = len(json.dumps(metrics))
    if size > MAX_METRICS_BYTES:
        raise RewardError(
            f"{where}: metrics: got {len(metrics)} of together {size} bytes, must be at most {MAX_METRICS_BYTES} bytes of JSON"
        )


def _read(path: Path) -> str | None:
    try:
        if not path.is_file() or path.is_symlink():  # a link could name any file of this machine
            return None
        with path.open("rb") as file:
            raw = file.read(MAX_REWARD_BYTES + 1)
    except OSError as error:
        raise RewardError(f"{path.name}: {error.strerror}") from None
    if len(raw) > MAX_REWARD_BYTES:
        raise RewardError(f"{path.name}: more than {MAX_REWARD_BYTES} bytes")
    return raw.decode("utf-8-sig", errors="replace")


def _verdict(answer: Any, where: str) -> CommandOutcome:
    if answer is None:
        return CommandOutcome(EndReason.NO_REWARD, detail=f"{where}: None")
    if not isinstance(answer, Mapping):
        return CommandOutcome(EndReason.COMPLETED, _reward(answer, where))
    if "reward" not in answer:
        raise RewardError(f"{where}: `reward` is missing; got {_named(answer)}")
    more = {str(key): value for key, value in answer.items() if key not in ("reward", "metrics")}
    given = answer.get("metrics") or {}
    if not isinstance(given, Mapping):
        raise RewardError(f"{where}: metrics: got {shown(given)}, must be an object of numbers")
    numbers = {key: value for key, value in more.items() if isinstance(value, Real) or _is_numpys_bool(value)}
    metrics = {str(key): _number(value, where, f"metrics.{key}") for key, value in {**numbers, **given}.items()}
    check_metrics(metrics, where)
    if answer["reward"] is None:
        return CommandOutcome(EndReason.NO_REWARD, metrics=metrics, detail=f"{where}: reward is null")
    return CommandOutcome(EndReason.COMPLETED, _reward(answer["reward"], where), metrics)


def _is_numpys_bool(value: Any) -> bool:
    """Which is no `Real`, as Python's own is."""
    return getattr(getattr(value, "dtype", None), "kind", "") == "b" and not getattr(value, "shape", ())


def _reward(value: Any, where: str) -> float:
    number = _number(value, where, "reward")
    if abs(number) > MAX_REWARD:
        raise RewardError(f"{where}: reward: got {number:g}, must be within ±{MAX_REWARD:g}")
    return number


def _number(value: Any, where: str, name: str) -> float:
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except Exception:  # an integer that is too large; or whatever an object that a function returned raises
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"{where}: {name}: got {shown(value)}, must be a finite number")
    return number


def shown(value: Any) -> str:
    """For an error; at most 80 characters."""
    try:
        return _cut(repr(value))
    except Exception:  # of an integer with too many digits, of lists too deep in one another, of the user's own class
        return f"a value of type {type(value).__name__}"


def _named(answer: Mapping[Any, Any]) -> str:
    """Its keys, in characters that every terminal and file takes."""
    return _cut(", ".join(map(str, answer)).encode(errors="backslashreplace").decode()) or "nothing"


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "…"

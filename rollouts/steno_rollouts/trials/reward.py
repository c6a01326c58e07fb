"""The reward of a trial: from a file that the trial wrote, or from the user's reward function, also long after it ran.

`reward.json` (`{"reward": 1.0, "metrics": {"tests_passed": 3}}`; other numbers beside `reward` are metrics too) or
`reward.txt` (one number) in the working folder. `FILE.py:function` takes its parameters by name, from `INPUTS`, and returns a
number, such an object, or None for "can't say". It runs in a thread of its own, so that it may wait, and block, as it likes;
one that outlasts its time limit is given up (a thread can't be ended, but nothing waits for it).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from steno.client.client import AsyncSteno
from steno.config.plugins import load_function
from steno.contracts.errors import ConfigError, Gone, NotFound, StenoError
from steno.contracts.json_limits import storable
from steno.contracts.records import MAX_REWARD, Session, Turn
from steno_rollouts.calls.patience import AWAY
from steno_rollouts.outcome import CommandOutcome, EndReason
from steno_rollouts.tasks.task import Task

REWARD_JSON = "reward.json"
REWARD_TEXT = "reward.txt"
MAX_REWARD_BYTES = 1_000_000
"""Of a reward file: a trial writes it, and these rollouts read it whole."""
MAX_METRICS_BYTES = 256 * 1024
"""Of a trial's metrics, as JSON: thousands of them. They are posted with its end, and the proxy takes 1 MiB."""
INPUTS = "task task_folder workdir exit_code stdout stderr trial_id transcript".split()
RECORDED_INPUTS = "task trial_id transcript".split()
"""What of these is on record once a trial's folder is gone."""


class RewardError(StenoError):
    """A reward that can't be read or computed; the trial is unscored. Never leaves these rollouts."""

    code = "reward_error"


class Transcript(Protocol):
    """What was said in a trial, as a reward function may ask for it."""

    @property
    def session(self) -> Session: ...
    @property
    def turns(self) -> list[Turn]:
        """In commit order: each with the messages that were new in it (`messages`) and what the policy replied (`reply`)."""
        ...

    @property
    def last_reply(self) -> str:
        """Text of the last answer; "" where there was none."""
        ...


@dataclass(frozen=True)
class RecordedTranscript:
    """As the proxy had it on record."""

    session: Session
    turns: list[Turn]

    @property
    def last_reply(self) -> str:
        return str(self.turns[-1].reply.get("content") or "") if self.turns else ""


async def read_transcript(client: AsyncSteno, trial_id: str) -> Transcript:
    """As patient as the client is: the time that a reward function has does not run meanwhile.

    Raises: RewardError: it can't be read; Gone, NotFound: it was deleted; Unreachable, StoreUnavailable, TooManyRequests: the
        proxy or its store is away.
    """
    try:
        return RecordedTranscript(await client.session(trial_id), [turn async for turn in client.turns(trial_id)])
    except (Gone, NotFound, *AWAY):
        raise
    except StenoError as error:
        raise RewardError(f"transcript of {trial_id}: {error.message}") from error


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


class RewardFunction:
    """The function of `FILE.py:function`, sync or async."""

    def __init__(self, where: str, timeout_s: float = 300.0) -> None:
        """Raises: ConfigError: no such file or function, or a parameter that is none of `INPUTS`."""
        self.where = where
        self._timeout_s = timeout_s
        self._function = load_function(where, "reward")
        parameters = inspect.signature(self._function).parameters.values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [parameter for parameter in parameters if parameter.kind in kinds and parameter.name in INPUTS]
        self._names = [parameter.name for parameter in named]
        self._needs = [parameter.name for parameter in named if parameter.default is parameter.empty]
        unknown = [
            p.name for p in parameters if p.default is p.empty and p.name not in INPUTS and p.kind is not p.VAR_KEYWORD
        ]
        if unknown:
            raise ConfigError(
                f"reward: {where}: no such input: {', '.join(unknown)}; there are {', '.join(INPUTS)}", field="reward"
            )

    def needs(self, name: str) -> bool:
        """Whether the function has a parameter of this name, without a default."""
        return name in self._needs

    def takes(self, name: str) -> bool:
        """Whether it is given this input where there is one."""
        return self._takes_all or name in self._names

    def check_inputs(self, known: Collection[str], of_what: str) -> None:
        """Raises: ConfigError: it needs what there is not."""
        if missing := [name for name in self._needs if name not in known]:
            raise ConfigError(
                f"reward: {self.where} asks for {', '.join(missing)}; {of_what} there are {', '.join(known)}",
                field="reward",
            )

    def digest(self) -> str:
        """Of its file and its name: 8 hexadecimal digits."""
        file, _, name = self.where.rpartition(":")
        code = Path(file).expanduser().read_bytes()
        return blake2b(code + b"\0" + name.encode(), digest_size=4).hexdigest()

    async def __call__(self, scored: TrialToScore) -> CommandOutcome:
        """Raises: RewardError, also for what the function raised."""
        inputs = scored.inputs()
        chosen = inputs if self._takes_all else {name: inputs[name] for name in self._names if name in inputs}
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await _in_thread(lambda: self._answer(chosen), f"reward of {scored.trial_id}")
        except TimeoutError:
            raise RewardError(f"{self.where}: no answer in {self._timeout_s:g} s") from None
        except Exception as error:  # the user's own code: whatever it raises is this trial's outcome
            raise RewardError(f"{self.where} raised {type(error).__name__}: {error}") from error
        try:
            return _verdict(answer, self.where)
        except RewardError:
            raise
        except Exception as error:  # what it returned may be of the user's own code as well
            raise RewardError(f"{self.where}: its answer raised {type(error).__name__}: {error}") from error

    def _answer(self, inputs: dict[str, Any]) -> Any:
        answer = self._function(**inputs)
        return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer


def read_reward(workdir: Path) -> CommandOutcome | None:
    """What the trial wrote; None: nothing. Raises: RewardError saying what is wrong with the file."""
    text = _read(workdir / REWARD_JSON)
    if text is not None:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RewardError(f"{REWARD_JSON}: not valid JSON: {error}") from None
        if not isinstance(answer, Mapping):
            raise RewardError(f"{REWARD_JSON}: got {_shown(answer)}, must be an object with `reward`")
        return _verdict(answer, REWARD_JSON)
    text = _read(workdir / REWARD_TEXT)
    if text is None:
        return None
    try:
        return _verdict(float(text), REWARD_TEXT)
    except ValueError:
        raise RewardError(f"{REWARD_TEXT}: got {_shown(text)}, must be one number") from None


def check_metrics(metrics: Mapping[str, float], where: str) -> None:
    """Raises: RewardError: the proxy would not take them."""
    for name in metrics:
        try:
            storable(name)
        except ValueError as error:
            raise RewardError(
                f"{where}: metrics: got the name {_shown(name)}, must be one that can be stored: {error}"
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
    return raw.decode(errors="replace")


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
        raise RewardError(f"{where}: metrics: got {_shown(given)}, must be an object of numbers")
    numbers = {key: value for key, value in more.items() if isinstance(value, bool | int | float)}
    metrics = {str(key): _number(value, where, f"metrics.{key}") for key, value in {**numbers, **given}.items()}
    check_metrics(metrics, where)
    if answer["reward"] is None:
        return CommandOutcome(EndReason.NO_REWARD, metrics=metrics, detail=f"{where}: reward is null")
    return CommandOutcome(EndReason.COMPLETED, _reward(answer["reward"], where), metrics)


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
        raise RewardError(f"{where}: {name}: got {_shown(value)}, must be a finite number")
    return number


def _shown(value: Any) -> str:
    try:
        return _cut(repr(value))
    except Exception:  # of an integer with too many digits, of lists too deep in one another, of the user's own class
        return f"a value of type {type(value).__name__}"


def _named(answer: Mapping[Any, Any]) -> str:
    """Its keys, in characters that every terminal and file takes."""
    return _cut(", ".join(map(str, answer)).encode(errors="backslashreplace").decode()) or "nothing"


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "…"


async def _awaited(answer: Any) -> Any:
    return await answer


async def _in_thread(work: Callable[[], Any], name: str) -> Any:
    """A daemon thread of its own: an executor's threads are waited for at exit, and one that hangs takes another's place."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(answer: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(answer)
        else:
            its_own = isinstance(error, Exception) and not isinstance(error, StopIteration)  # a future takes none
            future.set_exception(error if its_own else RuntimeError(repr(error)))

    def run() -> None:
        answer, failure = None, None
        try:
            answer = work()
        except BaseException as error:  # SystemExit in a reward function ends no more than its trial
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, answer, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future

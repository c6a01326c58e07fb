"""Functions of the user's that score trials: `FILE.py:function` takes its parameters by name, from what there is to know.

It runs in a thread of its own, so that it may wait, and block, as it likes; one that outlasts its time limit is given up (a
thread can't be ended, but nothing waits for it).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

from steno.config.plugins import load_with_text
from steno.contracts.errors import ConfigError
from steno_rollouts.outcome import RewardError

T = TypeVar("T")


class UserFunction:
    """The function of `FILE.py:function`, sync or async."""

    def __init__(self, where: str, timeout_s: float, field: str, inputs: Sequence[str]) -> None:
        """Args: field: the setting that names it. inputs: names of what it may ask for.
        Raises: ConfigError: no such file or function, or a parameter that is none of `inputs`."""
        self.where, self.field = where, field
        self._timeout_s = timeout_s
        # Settings of an evaluation are looked at before its model is loaded, and again afterwards.
        self._function, text = load_with_text(where, field, once=True)
        name = where.rpartition(":")[2]
        self._digest = blake2b(text + b"\0" + name.encode(), digest_size=4).hexdigest()
        parameters = inspect.signature(self._function).parameters.values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [parameter for parameter in parameters if parameter.kind in kinds and parameter.name in inputs]
        self._names = [parameter.name for parameter in named]
        self._needs = [parameter.name for parameter in named if parameter.default is parameter.empty]
        unknown = [
            p.name for p in parameters if p.default is p.empty and p.name not in inputs and p.kind is not p.VAR_KEYWORD
        ]
        if unknown:
            raise ConfigError(
                f"{field}: {where}: no such input: {', '.join(unknown)}; there are {', '.join(inputs)}", field=field
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
                f"{self.field}: {self.where} asks for {', '.join(missing)}; {of_what} there are {', '.join(known)}",
                field=self.field,
            )

    def digest(self) -> str:
        """Of its file, as it was imported, and its name: 8 hexadecimal digits."""
        return self._digest

    async def _said(self, inputs: Mapping[str, Any], of_what: str, read: Callable[[Any], T]) -> T:
        """What it returned, as `read` has it: in the function's thread and its time, since what is returned may be of the user's
        own code as well (a generator, say).

        Args: of_what: a trial or a group. Raises: RewardError: it raised, or took too long, or `read` says so.
        """
        chosen = dict(inputs) if self._takes_all else {name: inputs[name] for name in self._names if name in inputs}
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await _in_thread(lambda: read(self._answer(chosen)), f"{self.field} of {of_what}")
        except RewardError:
            raise
        except Exception as error:  # the user's own code: whatever it raises is this trial's outcome
            if limit.expired():
                raise RewardError(f"{self.where}: no answer in {self._timeout_s:g} s") from None
            raise RewardError(f"{self.where} raised {type(error).__name__}: {error}") from error

    def _answer(self, inputs: dict[str, Any]) -> Any:
        answer = self._function(**inputs)
        return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer


async def _awaited(answer: Any) -> Any:
    return await answer


async def _in_thread(work: Callable[[], T], name: str) -> T:
    """A daemon thread of its own: an executor's threads are waited for at exit, and one that hangs takes another's place."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

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

"""`steno evaluate --follow`: which checkpoint of a training run is next, and where the numbers of one that was evaluated go.

A folder is read as `steno_trainer.checkpoints` writes it: step-<n>/weights-<lineage>-<n>/ or step-<n>/adapter-…/, which is whole
as soon as it has its name, and is removed once newer ones are there (`checkpoints_kept`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from steno.client.client import AsyncSteno
from steno.contracts.errors import ConfigError, StenoError
from steno.contracts.runs.training_steps import TrainingStep
from steno_cli.demo.processes import start
from steno_rollouts.reporting.results import trim

LOOK_S = 2.0
"""Between two looks at the folder. It may be on a network's file system."""
STEPS = "steps.jsonl"
"""In the folder of results: a line for each checkpoint that was evaluated."""


@dataclass(frozen=True)
class Checkpoint:
    """Args: model: its folder of weights, or of an adapter. step: how many steps trained it."""

    model: Path
    step: int
    lineage: str

    @property
    def version(self) -> str:
        return f"{self.lineage}/{self.step}"

    @property
    def name(self) -> str:
        """Of what belongs to it alone: its run of rollouts, its file of results."""
        return f"step-{self.step}-{self.lineage}"

    @property
    def is_adapter(self) -> bool:
        return self.model.name.startswith("adapter-")


async def next_checkpoint(
    folder: Path, done: Collection[str], until_step: int | None, say: Callable[[str], None]
) -> Checkpoint | None:
    """The newest that is not among `done`, once there is one. None: all are, and one of them is of `until_step` or later."""
    said = False
    while True:
        there = await asyncio.to_thread(list, _checkpoints(folder))
        wanted = [found for found in there if found.version not in done]
        if wanted:
            return max(wanted, key=attrgetter("step"))
        if until_step is not None and any(int(version.rpartition("/")[2]) >= until_step for version in done):
            return None
        if not said:
            said = True
            say(f"waiting for the next checkpoint in {folder}")
        await asyncio.sleep(LOOK_S)


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
    for kind in ("weights", "adapter"):
        for model in folder.glob(f"step-*/{kind}-*-*"):
            lineage, _, step = model.name.removeprefix(f"{kind}-").rpartition("-")
            if step.isdecimal():
                yield Checkpoint(model, int(step), lineage)


@contextlib.asynccontextmanager
async def whole_model(checkpoint: Checkpoint) -> AsyncIterator[Path]:
    """A folder that engines load: the checkpoint's own, or for the time being one into which its adapter is merged."""
    if not checkpoint.is_adapter:
        yield checkpoint.model
        return
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="steno-merged-")))
        merging = await start(stack, scratch, "merge", str(checkpoint.model), "--output", str(scratch / "model"))
        if await merging.process.wait():
            merging.check()
        yield scratch / "model"


class StepNumbers:
    """What checkpoints were worth: in a file, and on record at the proxy of their run. Either may be None."""

    def __init__(self, folder: Path, results: Path | None, proxy: AsyncSteno | None) -> None:
        """Args: folder: of the checkpoints. results: a folder. Raises: ConfigError: its file is not one of these."""
        self._folder, self._proxy = folder, proxy
        self._unposted: list[TrainingStep] = []
        self._file: Path | None = None
        self.done = set[str]()
        if results is not None:
            try:
                results.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"results: {results}: {error.strerror}; with --follow it is a folder", field="results"
                ) from None
            self._file = results / STEPS
            self.done |= _versions(self._file)

    async def check(self, checkpoint: Checkpoint, say: Callable[[str], None]) -> None:
        """Before hours are spent on it. Raises: StenoError: the proxy would never take what comes."""
        if self._proxy is not None:
            await self._post([TrainingStep(step=checkpoint.step, version=checkpoint.version)], say)

    async def keep(self, checkpoint: Checkpoint, values: Mapping[str, float], say: Callable[[str], None]) -> None:
        """A proxy that does not answer now gets them with the next ones."""
        self.done.add(checkpoint.version)
        step = TrainingStep(step=checkpoint.step, version=checkpoint.version, values=dict(values))
        if self._file is not None:
            line = json.dumps({"step": step.step, "version": step.version, "values": step.values})
            try:
                with self._file.open("a") as file:
                    file.write(line + "\n")
            except OSError as error:
                say(f"warning: {self._file}: {error.strerror}: step {step.step} is not in it")
        if self._proxy is None:
            return
        self._unposted = await self._post([*self._unposted, step], say)

    async def _post(self, steps: list[TrainingStep], say: Callable[[str], None]) -> list[TrainingStep]:
        """Returns: those that the proxy does not take now."""
        assert self._proxy is not None
        for number, step in enumerate(steps):
            try:
                await self._proxy.post_step(self._run(), step)
            except StenoError as error:
                if not error.retryable:
                    raise
                say(f"warning: {len(steps) - number} steps are not posted, the proxy does not take them now: {error}")
                return steps[number:]
        return []

    def _run(self) -> str:
        """Raises: ConfigError: no trainer has begun there."""
        try:
            return str(json.loads((self._folder / "run.json").read_text())["run"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"follow: {self._folder / 'run.json'} does not name the run: no `steno train` has begun there",
                field="follow",
            ) from None


def _versions(file: Path) -> set[str]:
    trim(file)
    try:
        return {str(json.loads(line)["version"]) for line in file.read_text().splitlines()}
    except FileNotFoundError:
        return set()
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"results: {file}: not what --follow wrote", field="results") from None

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

from steno.client.client import AsyncClient
from steno.contracts.errors import ConfigError, StenoError
from steno.contracts.runs.training_steps import TrainingStep
from steno_cli.demo.processes import start
from steno_rollouts.reporting.results import trim

Say = Callable[[str], None]
LOOK_S = 2.0
"""Between two looks at the folder. It may be on a network's file system."""
STATE = "state.msgpack"
"""Of a whole checkpoint. It is written last."""
STEPS = "steps.jsonl"
"""In the folder of results: a line for each checkpoint that was evaluated."""


@dataclass(frozen=True)
class Checkpoint:
    """Args: model: its folder of weights, or of an adapter. step: how many steps trained it. written: Unix seconds."""

    model: Path
    step: int
    lineage: str
    written: float

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


async def next_checkpoint(folder: Path, done: Collection[str], until_step: int | None, say: Say) -> Checkpoint | None:
    """The newest whose version is not among `done`, once there is one. None: there is none, and one of `until_step` or of a later
    step is done."""
    said = False
    while True:
        try:
            there = await asyncio.to_thread(list, _checkpoints(folder))
        except OSError:  # a folder was removed while it was looked at: look again
            await asyncio.sleep(LOOK_S)
            continue
        wanted = [found for found in there if found.version not in done]
        if wanted:
            return max(wanted, key=attrgetter("written"))
        if until_step is not None and any(int(version.rpartition("/")[2]) >= until_step for version in done):
            return None
        if not said:
            said = True
            say(f"waiting for the next checkpoint in {folder}")
        await asyncio.sleep(LOOK_S)


def _checkpoints(folder: Path) -> Iterator[Checkpoint]:
    """Raises: OSError."""
    for state in folder.glob(f"step-*/{STATE}"):
        written = state.stat().st_mtime
        for model in state.parent.iterdir():
            kind, _, rest = model.name.partition("-")
            lineage, _, step = rest.rpartition("-")
            if kind in ("weights", "adapter") and step.isdecimal():
                yield Checkpoint(model, int(step), lineage, written)


@contextlib.asynccontextmanager
async def whole_model(checkpoint: Checkpoint) -> AsyncIterator[Path]:
    """A folder that engines load: the checkpoint's own, or for the time being one into which its adapter is merged.

    Raises: DemoFailed: it can't be merged."""
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
    """What checkpoints were worth: in a file, and on record at the proxy of their run. Either may be None.

    done: versions that were evaluated."""

    def __init__(self, folder: Path, results: Path | None, proxy: AsyncClient | None, say: Say) -> None:
        """Args: folder: of the checkpoints. results: a folder. Raises: ConfigError: its file is not one of these."""
        self._folder, self._proxy, self._say = folder, proxy, say
        self._file: Path | None = None
        self._unposted: list[TrainingStep] = []
        if results is not None:
            try:
                results.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"results: {results}: {error.strerror}; with --follow it is a folder", field="results"
                ) from None
            self._file = results / STEPS
            self._unposted = _kept(self._file)
        self.done = {step.version for step in self._unposted}

    async def check(self, checkpoint: Checkpoint) -> None:
        """Check that the proxy takes numbers of this run, before hours are spent on them, and post those that an earlier start
        could not post. A step on record does not change. Raises: StenoError: the proxy will never take them."""
        if self._proxy is None:
            return
        try:
            found = (await self._proxy.step_page(self._run(), limit=1)).items
            step = TrainingStep(step=found[0].step, at=found[0].at) if found else _step(checkpoint, {})
            await self._proxy.post_step(self._run(), step)
        except StenoError as error:
            if not error.retryable:
                raise
        await self._post()

    async def keep(self, checkpoint: Checkpoint, values: Mapping[str, float]) -> None:
        """Raises: StenoError: the proxy refuses them; one that can't take them now is asked again later."""
        self.done.add(checkpoint.version)
        step = _step(checkpoint, values)
        if self._file is not None:
            try:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(step.model_dump_json(include={"step", "version", "at", "values"}) + "\n")
            except OSError as error:
                self._say(f"warning: {self._file}: {error.strerror}: step {step.step} is not in it")
        self._unposted.append(step)
        await self._post()

    async def finish(self) -> bool:
        """Whether the proxy, if there is one, has all numbers by now."""
        await self._post()
        return self._proxy is None or not self._unposted

    async def _post(self) -> None:
        while self._proxy is not None and self._unposted:
            try:
                await self._post_one(self._proxy, self._unposted[0])
            except StenoError as error:
                if not error.retryable:
                    raise
                steps = ", ".join(str(step.step) for step in self._unposted)
                self._say(f"warning: the proxy does not take the numbers of these steps now: {steps}: {error}")
                return
            self._unposted.pop(0)

    async def _post_one(self, proxy: AsyncClient, step: TrainingStep) -> None:
        """Beside what the trainer posted of it, unless a later start of the run has taken this step anew."""
        found = (await proxy.step_page(self._run(), start=step.step, limit=1)).items
        before = next((one for one in found if one.step == step.step), None)
        if before is not None and before.version in ("", step.version):
            step = step.model_copy(update={"at": before.at})
        elif before is not None and (before.at or 0.0) >= (step.at or 0.0):
            self._say(
                f"warning: step {step.step} was trained again as {before.version}: numbers of {step.version} are not posted"
            )
            return
        await proxy.post_step(self._run(), step)

    def _run(self) -> str:
        """Raises: ConfigError: no trainer has begun there."""
        try:
            return str(json.loads((self._folder / "run.json").read_text(encoding="utf-8"))["run"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"follow: {self._folder / 'run.json'} does not name the run: no `steno train` has begun there",
                field="follow",
            ) from None


def _step(checkpoint: Checkpoint, values: Mapping[str, float]) -> TrainingStep:
    return TrainingStep(step=checkpoint.step, version=checkpoint.version, at=checkpoint.written, values=dict(values))


def _kept(file: Path) -> list[TrainingStep]:
    try:
        trim(file)
        return [TrainingStep(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError):
        raise ConfigError(f"results: {file}: not what --follow wrote", field="results") from None

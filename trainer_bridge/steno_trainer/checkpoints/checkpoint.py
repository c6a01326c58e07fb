"""Checkpoints: everything that a trainer needs to go on as if it had never stopped, whole or not there.

    <root>/step-00000040/      zero/ (float32 weights and optimizer: partitions.py)   random-<rank>.pt   state.msgpack
                               weights-<lineage>-<step>/ (the full model, for any engine or tool that reads safetensors)
                               adapter-<lineage>-<step>/ in its place where an adapter is trained, in peft's layout
    <root>/.writing-step-…     being written; its writer died if another one writes
    <root>/lineages/           every start of the run (lineages.py); an older one writes no checkpoint here
    <root>/latest              the name of the newest whole one

A checkpoint is written under another name, synced and renamed; then `latest` is replaced; then older checkpoints are removed.
If the trainer is killed, at any point, the newest whole checkpoint is there. A resumed run is bit-equal on a CPU, given the same
ranks and batches; any number of ranks can resume.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
import torch

from steno.contracts.errors import Superseded
from steno_trainer.checkpoints import partitions
from steno_trainer.checkpoints.deepspeed_files import load_engine
from steno_trainer.checkpoints.frozen import NO_ADAPTER, adapter_of, begun_from
from steno_trainer.checkpoints.lineages import Lineages
from steno_trainer.data.ledger import Ledger
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.errors import BadCheckpoint
from steno_trainer.model.zero_engine import PolicyEngine
from steno_trainer.step.step import Stepper
from steno_trainer.weights.adapters import ADAPTER_PREFIX, write_adapter
from steno_trainer.weights.files.copies import WeightsCopies, make_newest, remove_or_leave, times_of
from steno_trainer.weights.source import ModelWeights

log = logging.getLogger(__name__)

FORMAT = 3
BY_DEEPSPEED = 2
"""The format before: the same, but what is in zero/ was written by DeepSpeed, and only as many ranks can read it."""
LATEST, STATE, WRITING = "latest", "state.msgpack", ".writing-"
_CONFIGURATION = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Files of a model directory that go with its weights: configuration, tokenizer, chat template, code."""
_TOKENIZER = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model")
"""A model with a tokenizer has at least one of these files."""


class RunState(msgspec.Struct, frozen=True):
    """What a run knows beside weights and optimizer.

    run_id: whose groups were trained; another run's books and groups would not go with these. path: the history's lineages with
    their last steps. ledger: `Ledger.to_bytes`. trained_groups: groups whose step is in this state, as far as their
    acknowledgement may be lost. named_models: `train_models` that calls asked for; None: a release before wrote this.
    acknowledged_groups: the newest others whose step is in this state, and when each was made, Unix seconds.
    """

    run_id: str
    path: tuple[tuple[str, int], ...]
    ledger: bytes = b""
    trained_groups: tuple[str, ...] = ()
    named_models: tuple[str, ...] | None = None
    acknowledged_groups: dict[str, float] = {}

    @classmethod
    def of(
        cls, run_id: str, history: VersionHistory, ledger: Ledger, trained_groups: set[str],
        named_models: tuple[str, ...] | None = None, acknowledged: Mapping[str, float] = MappingProxyType({}),
    ) -> RunState:  # fmt: skip
        """Reads trained_groups before acknowledged: a group that moves from the first to the second meanwhile is in the state."""
        path = tuple((version.lineage, version.step) for version in history.path)
        trained = tuple(sorted(trained_groups))
        return cls(run_id, path, ledger.to_bytes(), trained, named_models, dict(acknowledged))

    @property
    def history(self) -> VersionHistory:
        """As it was saved; a trainer that resumes opens a new lineage on it (`VersionHistory.resumed`)."""
        return VersionHistory(tuple(PolicyVersion(lineage, step) for lineage, step in self.path))

    def read_ledger(self) -> Ledger:
        return Ledger.from_bytes(self.ledger) if self.ledger else Ledger()


class _CheckpointRecord(msgspec.Struct, frozen=True):
    format: int
    ranks: int
    precision: str
    parameters: int
    steps_done: int
    run: RunState
    adapter: str = NO_ADAPTER
    """The adapter that is trained: its shape, and a fingerprint of the frozen weights, which are not in here."""
    model: str = ""
    """The setting `model`, for messages: a resumed run may name another folder with the same weights."""
    begun_from: str = ""
    """The fingerprint of `model`'s weights (`frozen.begun_from`). "": an adapter is trained, or an older release wrote this."""


class Checkpoints:
    """The checkpoints of one run. All public methods but `newest` are collectives; all ranks see the same folder."""

    def __init__(self, root: Path, stepper: Stepper, *, keep: int = 2, lineages: Lineages | None = None) -> None:
        self.root = root
        self._lineages = lineages
        self._stepper = stepper
        self._engine: PolicyEngine = stepper.engine
        self._ranks = stepper.ranks
        self._keep = keep
        self._adapter = adapter_of(self._engine)
        self._begun_from = begun_from(self._engine)  # the weights are still those that were loaded
        if self._ranks.first and self._adapter == NO_ADAPTER:
            fetch_configuration(self._engine.settings.model)

    def newest(self) -> Path | None:
        """The newest whole checkpoint. Raises: BadCheckpoint: `latest` names none."""
        try:
            name = (self.root / LATEST).read_text().strip()
        except FileNotFoundError:
            return None
        if not (self.root / name / STATE).is_file():
            raise BadCheckpoint(f"{self.root / LATEST} names {name}, which is no whole checkpoint")
        return self.root / name

    def save(self, run: RunState, *, spare: bool = False) -> Path:
        """Make everything so far durable, and return once it is. The first rank's `run` counts.

        Args: spare: checkpoints of earlier steps stay, however many: these weights may be broken.
        Raises: OSError, CopyFailed: on the rank that could not write; Superseded: on the first one, a later trainer writes here;
            the others return. What was there before is untouched.
        """
        ranks = self._ranks
        final = self._free(f"step-{self._stepper.steps_done:08d}")
        ranks.barrier()
        # A name that nothing has: what could not be removed may be there still.
        unique = ranks.share(uuid.uuid4().hex[:8].encode() if ranks.first else None).decode()
        writing = self.root / f"{WRITING}{final.name}-{unique}"
        if ranks.first:
            self.root.mkdir(parents=True, exist_ok=True)
            self._sweep()
            writing.mkdir()
        ranks.barrier()
        partitions.save(self._engine, writing / "zero")
        torch.save(_random_state(), writing / f"random-{ranks.rank}.pt")
        self._write_weights(writing, run.history.current)
        _sync_files(writing, only=ranks.rank, of=ranks.size)
        ranks.barrier()
        lost = self._superseded() if ranks.first else None
        # All ranks leave here together: the others would wait at the next barrier for the first one, which has left.
        if ranks.share((b"superseded" if lost else b"") if ranks.first else None):
            if lost is not None:
                raise lost
            return final
        if ranks.first:
            self._wrote(writing, final, run)
            self._point_at(final.name)
            self._prune(final, spare=spare)
        ranks.barrier()
        return final

    def _write_weights(self, writing: Path, version: PolicyVersion) -> None:
        lm, model = self._engine.lm, self._engine.settings.model
        if self._adapter == NO_ADAPTER:
            extra = configuration(model) if self._ranks.first else []
            WeightsCopies(writing, ranks=self._ranks, extra=extra).write(version, ModelWeights(lm))
            return
        folder = writing / f"{ADAPTER_PREFIX}{version.lineage}-{version.step}"
        if self._ranks.first:
            folder.mkdir()
        write_adapter(lm, folder, base=model, writes=self._ranks.first)
        # The others write nothing, and must not sync what is half written.
        self._ranks.barrier()

    def _superseded(self) -> Superseded | None:
        try:
            if self._lineages is not None:
                self._lineages.check()
        except Superseded as error:
            return error
        return None

    def resume(self, run_id: str) -> RunState | None:
        """Go on from the newest checkpoint: weights, optimizer, random numbers, steps. None: there is none, nothing was changed.

        A rank that the saved run did not have keeps the random state of a new start.

        Raises: BadCheckpoint: not whole, of another run, precision or model, or of a release before and of another number of
            ranks: it says which.
        """
        found = self._ranks.share(str(self.newest() or "").encode() if self._ranks.first else None).decode()
        if not found:
            return None
        folder = Path(found)
        saved = self._read(folder, run_id)
        if saved.format == BY_DEEPSPEED:
            load_engine(self._engine.deepspeed, folder, "zero")
        else:
            partitions.load(self._engine, folder / "zero", saved.ranks)
        if self._ranks.rank < saved.ranks:
            _restore_random_state(torch.load(folder / f"random-{self._ranks.rank}.pt", weights_only=True))
        self._stepper.steps_done = saved.steps_done
        self._ranks.barrier()
        log.info("resumed from %s%s", folder, "" if saved.ranks == self._ranks.size else f", of {saved.ranks} ranks")
        return saved.run

    def _read(self, folder: Path, run_id: str) -> _CheckpointRecord:
        try:
            saved = msgspec.msgpack.decode((folder / STATE).read_bytes(), type=_CheckpointRecord)
        except (OSError, msgspec.DecodeError) as error:
            raise BadCheckpoint(f"{folder}: {error}") from error
        engine = self._engine
        by_deepspeed = saved.format == BY_DEEPSPEED
        if by_deepspeed and saved.ranks != self._ranks.size:
            raise BadCheckpoint(
                f"{folder}: an older release wrote it with {saved.ranks} ranks, and only as many can read it; there are "
                f"{self._ranks.size} now: go on with {saved.ranks} until the next checkpoint"
            )
        for what, was, now in (
            ("format", saved.format, BY_DEEPSPEED if by_deepspeed else FORMAT),
            ("run", saved.run.run_id, run_id),
            ("precision", saved.precision, engine.settings.precision),
            ("adapter", saved.adapter, self._adapter),
            ("parameters", saved.parameters, engine.parameters),
        ):
            if was != now:
                anew = "; start anew, in another checkpoint_dir, with its weights-… folder as the model"
                if saved.adapter != NO_ADAPTER:
                    anew = (
                        "; start anew, in another checkpoint_dir, with what `steno merge` makes of its adapter-… folder"
                    )
                hint = anew if what != "format" else ""
                raise BadCheckpoint(f"{folder}: {what} {was} in the checkpoint, {now} now{hint}")
        if saved.begun_from and saved.begun_from != self._begun_from:
            raise BadCheckpoint(
                f"{folder}: model: got {engine.settings.model} (weights {self._begun_from}), must be {saved.model} (weights "
                f"{saved.begun_from}), wherever it lies now, as when this run began; to train another model, start "
                f"anew, in another checkpoint_dir (where the first weights are gone: from the checkpoint's weights-… folder)",
                field="model",
            )
        return saved

    def _wrote(self, writing: Path, final: Path, run: RunState) -> None:
        """All parts are there and synced: say what they are, and give them their name."""
        settings, steps = self._engine.settings, self._stepper.steps_done
        saved = _CheckpointRecord(
            FORMAT, self._ranks.size, settings.precision, self._engine.parameters, steps, run, self._adapter,
            settings.model, self._begun_from,
        )  # fmt: skip
        _write_synced(writing / STATE, msgspec.msgpack.encode(saved))
        make_newest(writing / STATE, self._whole())
        _sync_folders(writing)
        writing.rename(final)
        _sync_folder(self.root)

    def _point_at(self, name: str) -> None:
        beside = self.root / f"{WRITING}{LATEST}"
        _write_synced(beside, name.encode())
        beside.replace(self.root / LATEST)
        _sync_folder(self.root)

    def _free(self, name: str) -> Path:
        """A name that is not taken: a step that was saved, resumed and saved again must not replace its own checkpoint."""
        again = 0
        while (path := self.root / (f"{name}.{again:02d}" if again else name)).exists():
            again += 1
        return path

    def _whole(self) -> list[Path]:
        """The records of whole checkpoints."""
        return list(self.root.glob(f"step-*/{STATE}"))

    def _prune(self, written: Path, *, spare: bool) -> None:
        """Remove old checkpoints. If one can't be removed, the run goes on, and the next save tries again.

        Args: written: the checkpoint just saved; it stays, whatever its time says.
        """
        # By age, not by step: the operator may have gone back to an older checkpoint.
        by_age = sorted((path.parent == written, time, path.parent) for time, path in times_of(self._whole()))
        newest: dict[str, Path] = {}  # of each step: a step that is saved again and again takes the place of no other
        for _, _, path in reversed(by_age):
            newest.setdefault(path.name.partition(".")[0], path)
        stay = list(newest.values())[: None if spare else self._keep]
        for _, _, old in by_age:
            if old not in stay:
                remove_or_leave(self._doom, old)
        self._sweep()

    def _doom(self, old: Path) -> None:
        """Rename the whole folder at once, so that half a checkpoint is never taken for a whole one. `_sweep` removes it."""
        old.rename(self.root / f"{WRITING}old-{old.name}-{uuid.uuid4().hex[:8]}")

    def _sweep(self) -> None:
        """Remove what killed writers and earlier saves left. One trainer writes here at a time: two would fight over `latest` as
        well."""
        for left in self.root.glob(f"{WRITING}*"):
            remove_or_leave(shutil.rmtree if left.is_dir() else Path.unlink, left)


def _random_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def fetch_configuration(model: str) -> None:
    """Fetch the files that `configuration` lists, for a model that was loaded by its name: loading it has fetched no tokenizer.
    Logs a warning if they can't be fetched, or if there is no tokenizer."""
    if Path(model).is_dir():
        return
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(model, allow_patterns=list(_CONFIGURATION), ignore_patterns=["*/*"])
    except (OSError, ValueError, httpx.HTTPError) as error:
        log.warning("model %s: files that go with its weights can't be fetched, and will be missing: %s", model, error)
    if not any(path.match(pattern) for path in configuration(model) for pattern in _TOKENIZER):
        log.warning("model %s: no tokenizer is in Hugging Face's cache, so what is saved of it will have none", model)


def configuration(model: str) -> list[Path]:
    """The files of `_CONFIGURATION` that are on this machine."""
    folder = Path(model)
    if not folder.is_dir():  # a name: transformers has it in its cache
        from transformers.utils.hub import cached_file

        config = cached_file(model, "config.json", local_files_only=True)
        assert config is not None
        folder = Path(config).parent
    found = {path for pattern in _CONFIGURATION for path in folder.glob(pattern)}
    return sorted(path for path in found if not path.name.endswith(".index.json") and path.name != "steno-weights.json")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sync_files(folder: Path, *, only: int, of: int) -> None:
    """Sync this rank's share of the files: most of the work of a large model's checkpoint."""
    for number, path in enumerate(_files(folder)):
        if number % of == only:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sync_folders(folder: Path) -> None:
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync_folder(path)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())

"""What travels between these rollouts and a node of Ray's: a task with its folder, files of the user's, and what came of it.

Keys are a parcel of their own: Ray may write a large one to disk, and keeps a small one in the memory of the processes that pass
it on.
"""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from steno.contracts.errors import ConfigError, Unreachable
from steno.contracts.rest import Trial
from steno_rollouts.config import RolloutSettings
from steno_rollouts.outcome import CommandOutcome
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import CannotStart, Exit
from steno_rollouts.trials.harbor.plan import HarborPlan

MAX_FOLDER_BYTES = 512 * 2**20
"""Of a task's folder: it goes to each node that plays one of its trials."""
DETAIL = 1000
"""Characters that are left of what a trial's outcome says, where that is longer than what may come back."""
OF_A_NODE = (CannotStart, ConfigError, Unreachable)
"""Errors that say what an attempt lacks on its node. Another node may have it."""


@dataclass(frozen=True, repr=False)
class Keys:
    """agent: opens the generation routes of one trial; harness: reads and completes the trials of its group. None: no keys."""

    agent: str | None = None
    harness: str | None = None


@dataclass(frozen=True)
class SentFile:
    """A file of the user's: path: as it was given."""

    path: Path
    content: bytes

    @classmethod
    def of(cls, path: Path) -> Self:
        return cls(path, path.read_bytes())

    def put(self, folder: Path) -> Path:
        """Where it is on this node: where it was given, if it is the same there (so is what it imports); else in `folder`."""
        there = self.path.expanduser()
        if there.is_file() and there.read_bytes() == self.content:
            return there
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / self.path.name
        written.write_bytes(self.content)
        return written


@dataclass(frozen=True)
class NodeRequest:
    """What a node is to do, without keys. play: one attempt; check: look whether trials can run there; clear: end what is left of
    an attempt. trial: without its key. task: its folder, if it has one, travels beside it. public_url: where agents reach the
    proxy."""

    do: Literal["play", "check", "clear"]
    settings: RolloutSettings
    run_id: str
    task: Task
    trial: Trial | None = None
    round: str = ""
    harbor: HarborPlan | None = None
    reward: SentFile | None = None
    agent: SentFile | None = None
    public_url: str = ""


@dataclass(frozen=True)
class Answer:
    """What came of it. node: its address. folder: the attempt's on that node, where it was kept. problem: the error that
    nothing came of it for, as its code and message. warnings: what the operator must be told."""

    node: str
    exit: Exit = field(default_factory=lambda: Exit(None))
    outcome: CommandOutcome | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    folder: str | None = None
    problem: tuple[str, str] | None = None
    warnings: tuple[str, ...] = ()


def packed(folder: Path) -> bytes:
    """A folder as a tar archive: contents, modes and links; owners are left out. Raises: CannotStart: it is too large."""
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    if size > MAX_FOLDER_BYTES:
        raise CannotStart(
            f"{folder}: got {size / 2**20:.0f} MiB, must be at most {MAX_FOLDER_BYTES // 2**20}: a task's folder is sent to nodes"
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=".", filter=_of_nobody)
    return buffer.getvalue()


def unpack(archive: bytes, folder: Path) -> None:
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        # It was made by `packed`. Python before 3.11.4 has no filters, and extracts everything anyway.
        opened.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        opened.extractall(folder)


def last_part(path: Path, most_bytes: int) -> bytes:
    """The end of what a trial printed, and a line before it that says what is left out; b"": there is none."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - most_bytes))
            part = file.read(most_bytes)
    except FileNotFoundError:
        return b""
    if size <= most_bytes:
        return part
    said = (
        f"[steno: the first {size - len(part)} of {size} bytes are left out (--ray-return-kb {most_bytes // 1024})]\n"
    )
    return said.encode() + part


def bounded(outcome: CommandOutcome, most_bytes: int) -> CommandOutcome:
    """The outcome; without its metrics, and its words cut, if both are longer than that."""
    size = len(json.dumps([outcome.metrics, outcome.detail]).encode())
    if size <= most_bytes:
        return outcome
    said = f"[{size} bytes: {len(outcome.metrics)} metrics and some words are left out (--ray-return-kb {most_bytes // 1024})]"
    return replace(outcome, metrics={}, detail=f"{outcome.detail[:DETAIL]} {said}".strip())


def _of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member

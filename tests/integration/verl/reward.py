"""What a trial was worth: another number for each trial of a group, where the agent did what it was told."""

from __future__ import annotations

from pathlib import Path


def score(workdir: Path, exit_code: int | None, trial_id: str) -> float:
    if exit_code:
        raise RuntimeError("the agent failed")
    done = (workdir / "note.txt").read_text() == "steno\n"
    return float(done) / (1 + int(trial_id.rpartition(".")[2]))

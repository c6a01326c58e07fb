"""How a start of ranks ends: by our launcher with our exit code (torchrun makes 1 of it), in tests with what ranks said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.integration.trainer.launching import RANK, run_ranks, running_ranks
from tests.integration.trainer.materials import random_model
from tests.integration.trainer.test_step import settings
from tests.support.programs.processes import until
from tests.support.programs.stack import ROOT


@pytest.mark.parametrize(("first", "ends"), [(3, 3), (1, 1)], ids=["another trainer has the run", "it failed"])
def test_that_another_trainer_has_the_run_gets_out(tmp_path: Path, first: int, ends: int) -> None:
    (tmp_path / "rank.py").write_text(f"import os, sys\nsys.exit({first} if os.environ['RANK'] == '0' else 0)\n")
    command = ["-m", "steno_cli.torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *command, str(tmp_path / "rank.py")], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == ends, ended.stderr


def test_ranks_that_fail_say_why(tmp_path: Path) -> None:
    job = {"settings": {"model": str(tmp_path), "sequence_parallel": 3}, "batches": []}
    with pytest.raises(AssertionError, match=r"(?s)ranks ended with .*1.*2 ranks can't be divided into groups of 3"):
        run_ranks(2, job, tmp_path)


def test_every_rank_refuses_a_checkpoint_that_lacks_tensors(tmp_path: Path) -> None:
    """Read under ZeRO-3, as `steno train` does. None waits for another in a collective."""
    model = random_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (tmp_path / "job.json").write_text(json.dumps({"settings": settings(model), "batches": []}))
    with running_ranks(2, RANK, tmp_path) as ranks:
        ended = until(lambda: None not in (codes := [rank.poll() for rank in ranks]) and codes, "both ranks end")
    said = (tmp_path / "said").read_text()
    assert ended == [1, 1], said
    # The name of the error is a write of its own, in between which the other rank may write.
    assert said.count(f"model {model}: its checkpoint has no model.norm.weight (1 of the model's") == 2, said

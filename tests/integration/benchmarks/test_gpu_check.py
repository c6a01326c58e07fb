"""The check for GPUs, rehearsed on the CPU: every part runs, and says what it can't show here. About a minute of processor
time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import __main__ as program
from benchmarks.gpu_check import calls as processes
from benchmarks.gpu_check import machine
from benchmarks.gpu_check.calls import Calls, Failed, OutOfTime
from benchmarks.gpu_check.collectives import wrong_anywhere
from benchmarks.gpu_check.parts import SMALL, Check, off
from benchmarks.gpu_check.verdict import Verdict, below, beyond, failed, judged, not_possible
from steno_trainer.distributed.ranks import Ranks
from tests.support.clock import ClockAhead

ROOT = Path(__file__).resolve().parents[3]
RIGHT = {"logprobs_mean": 0.001, "grad_norm_relative": 0.001, "gradient_cosine": 0.999}


def run(*arguments: str, timeout: float = 1750) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts/gpu-check"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.timeout(1800)
def test_a_rehearsal_looks_at_every_part_and_says_what_a_cpu_cannot_show(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = run("--rehearse", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    parts = report["parts"]
    assert {name: part["state"] for name, part in parts.items()} == {
        "kernel": "ok", "step": "ok", "engine": "ok", "memory": "not possible", "speed": "ok", "nccl": "ok",
        "vllm": "not possible",
    }  # fmt: skip
    assert "whole process" in parts["memory"]["why"] and "--vllm" in parts["vllm"]["why"]
    step = parts["step"]["figures"]["bfloat16, 1 rank"]
    assert step["shares"] and step["computed_tokens"][0] < step["computed_tokens"][1]
    assert step["against_reference"]["logprobs_mean"] > 0 and step["against_reference"]["gradient_cosine"] < 1
    trainer = parts["engine"]["figures"]["trainer"]
    assert trainer["float32"]["logprob_difference"] < trainer["bfloat16"]["logprob_difference"] and (
        trainer["bfloat16"]["kl_k3"] > 0
    )
    assert set(parts["speed"]["figures"]["lengths"]) == {"64", "256", "group"}
    assert parts["nccl"]["figures"]["ranks"] == 2
    assert report["schema"] == 1 and report["rehearsal"] and report["versions"]["torch"] and report["machine"]["cores"]
    for name, part in parts.items():
        assert name in done.stdout and part["seconds"] >= 0


@pytest.mark.parametrize(
    ("what", "value"), [("logprobs_mean", 0.06), ("grad_norm_relative", 0.2), ("gradient_cosine", 0.9)]
)
def test_a_step_that_is_off_fails_and_says_by_how_much(what: str, value: float) -> None:
    assert off(RIGHT, "bfloat16") == []
    for bad in (value, float("nan")):
        [said] = off({**RIGHT, what: bad}, "bfloat16")
        assert f"{bad:.3g}" in said
    assert len(off({**RIGHT, what: value}, "float32")) == (1 if what == "gradient_cosine" else 2)
    assert judged({}, ["wrong"]).state == "failed" and judged({}, []).state == "ok"
    assert beyond("x", 1.0, 1.0) == below("x", 1.0, 1.0) == []


class Hastened(ClockAhead):
    """Set forward once a process has said something."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log

    def monotonic(self) -> float:
        if self._log.exists() and self._log.stat().st_size:
            self.by_s = 100.0
        return super().monotonic()


def test_a_process_that_fails_or_takes_too_long_is_a_failure_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(tmp_path, until=time.monotonic() + 300, small=True)
    with pytest.raises(Failed, match=r"collectives ended with 1\n[\s\S]*KeyError: 'device'"):
        calls("collectives", {})
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\necho loading\nsleep 600\n")
    slow.chmod(0o700)
    monkeypatch.setattr(processes, "time", Hastened(tmp_path / "2-facts.log"))
    with pytest.raises(Failed, match="facts took longer than 60 s\nloading"):
        calls("facts", {}, limit_s=60.0, python=str(slow))
    with pytest.raises(OutOfTime, match="facts was not begun"):
        Calls(tmp_path, until=time.monotonic() + 1, small=True)("facts", {})


def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    from time import monotonic

    half = tmp_path / "half"
    half.write_text('#!/bin/sh\n[ "$RANK" = 1 ] && echo no such device && exit 3\nexec sleep 600\n')
    half.chmod(0o700)
    started = monotonic()
    with pytest.raises(Failed, match="collectives ended with 3\nno such device"):
        Calls(tmp_path, until=started + 200, small=True)("collectives", {}, python=str(half), ranks=2)
    assert monotonic() - started < 60


def test_a_collective_that_is_wrong_on_another_rank_alone_is_named() -> None:
    class First(Ranks):
        def add(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor + torch.tensor([0, 1, 0, 1])  # of the second rank: its broadcast is wrong

    ranks = First(0, 2, torch.device("cpu"), None)
    here = {"all_reduce": False, "broadcast": False, "all_to_all": False}
    assert wrong_anywhere(ranks, here) == {"wrong_ranks": 1, "wrong": ["broadcast"]}
    found = wrong_anywhere(ranks, here | {"all_to_all": True})
    assert found == {"wrong_ranks": 2, "wrong": ["broadcast", "all_to_all"]}


def test_what_can_not_be_looked_at_is_said_before_anything_is(tmp_path: Path) -> None:
    unknown = run("--rehearse", "--parts", "kernel,cache")
    assert unknown.returncode == 2 and "got cache, must be of kernel, step" in unknown.stderr
    command = [
        "env",
        "CUDA_VISIBLE_DEVICES=",
        sys.executable,
        "-m",
        "benchmarks.gpu_check",
        "--out",
        str(tmp_path / "r"),
    ]
    nothing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert nothing.returncode == 2 and "no CUDA device here; --rehearse" in nothing.stderr
    assert not (tmp_path / "r").exists()


def test_a_command_that_hangs_costs_its_own_line_and_not_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    found = machine.machine({"gpus": [], "gpu_memory_bytes": []})
    assert found["driver"] is None and found["cores"]
    assert machine.revision() == {"revision": None, "uncommitted": None}
    calls = Calls(tmp_path, until=0.0, small=True)
    verdict = program.look("vllm", Check(calls, "cpu", SMALL, {"gpus": []}, sys.executable))
    assert verdict.state == "not possible" and "did not say in 60 s whether it has vLLM" in verdict.why


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([not_possible("no vLLM")], 2),
        ([not_possible("no vLLM"), not_possible("no time")], 2),
        ([not_possible("on a CPU", {"peak": 1})], 0),
        ([not_possible("no vLLM"), judged({}, [])], 0),
        ([not_possible("no vLLM"), failed("wrong")], 1),
    ],
)
def test_the_exit_code_says_whether_anything_was_looked_at(verdicts: list[Verdict], code: int) -> None:
    assert program.exit_code(verdicts) == code


def test_a_check_of_vllm_alone_without_vllm_looked_at_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"gpus": [], "gpu_memory_bytes": [], "versions": {}}
    monkeypatch.setattr(program.Calls, "__call__", lambda *_, **__: facts)
    out, missing = tmp_path / "report.json", str(tmp_path / "python")
    monkeypatch.setattr(sys, "argv", ["x", "--rehearse", "--parts", "vllm", "--vllm", missing, "--out", str(out)])
    assert program.main() == 2
    assert "can't be run" in json.loads(out.read_text())["parts"]["vllm"]["why"]

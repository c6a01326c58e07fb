"""The whole product with the real engine: proxy and worker as processes, the demo's agent, the shipped checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from steno.models import TINY
from steno_cli.demo.record import LAW
from tests.integration.agents.support import check_forked, fork
from tests.integration.vllm.drawing import gathered
from tests.support.programs import forked
from tests.support.programs.stack import ROOT, Stack, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

VLLM = ["--engine", "vllm", "--model", str(TINY), "--", "--enforce-eager", "--dtype=float32", "--max-num-seqs=8"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    worker = [*VLLM, "--tool-call-parser", "hermes"]
    with running(tmp_path_factory.mktemp("stack"), None, proxy=["--queue-s", "5"]) as stack:
        stack.start_worker(*worker)
        stack.wait_for_model(600)
        yield stack


def run_agent(stack: Stack, trial_id: str, seed: int) -> int:
    environment = {**os.environ, "OPENAI_BASE_URL": stack.base_url(trial_id), "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "steno_cli.demo.toy_agent", "--seed", str(seed)]
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=400).returncode


def test_the_demos_agent_finishes_and_its_record_is_exact(stack: Stack) -> None:
    """Every token is drawn at temperature 1, so now and then one trial of three may miss its code word."""
    codes = {f"demo-{seed}": run_agent(stack, f"demo-{seed}", seed) for seed in range(3)}
    assert 0 in codes.values() and 2 not in codes.values(), codes
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    for trial_id in codes:
        turns = stack.turns(trial_id)
        assert len(turns) > (3 if codes[trial_id] == 0 else 0)
        assert {turn["fork_reason"] for turn in turns} == {None}
        assert [turn["parent_id"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]
        ids: list[int] = []
        sampled: list[tuple[int, float]] = []
        for turn in turns:
            ids += turn["new_prompt_ids"]
            assert len(ids) == turn["prompt_tokens"] and not turn["constrained"]
            sampled += enumerate(turn["sampling_logprobs"], len(ids))
            ids += turn["completion_ids"]
            assert turn["versions"] == [{"version": "base/0", "start": 0, "end": len(turn["completion_ids"])}]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float()
        at = torch.tensor([position - 1 for position, _ in sampled])
        expected = gathered(torch.log_softmax(logits[at], -1), [ids[position] for position, _ in sampled])
        assert [logprob for _, logprob in sampled] == pytest.approx(expected, abs=1e-3)


def test_a_fork_is_sampled_after_the_very_ids_of_its_origin(stack: Stack) -> None:
    """The demo's agent again, with the same task: two turns are told from the record, the third is sampled by the engine."""
    made = httpx.post(f"{stack.url}/sessions/origin", json={"sampling": LAW.model_dump()}, timeout=60)
    assert made.status_code == 200, made.text
    run_agent(stack, "origin", 7)
    origin = stack.turns("origin")
    fork(stack, "origin", origin[1], "fork")
    run_agent(stack, "fork", 7)
    turns = stack.turns("fork")
    assert [turn["replayed"] is not None for turn in turns][:3] == [True, True, False]
    check_forked(origin, turns, origin[1])
    assert turns[2]["new_prompt_ids"] == origin[2]["new_prompt_ids"] and len(turns[2]["sampling_logprobs"]) > 0
    spoken = [turn["turn_id"] for turn in turns if turn["completion_ids"]]
    [sample] = stack.get("/sessions/fork/samples")["items"]
    assert sum(sample["loss_mask"]) == sum(len(turn["completion_ids"]) for turn in turns if turn["turn_id"] in spoken)


def test_what_all_tokens_stand_for_is_kept_and_is_what_the_tokenizer_says(stack: Stack) -> None:
    run_agent(stack, "texts", 1)
    turn = stack.turns("texts")[0]
    deadline = time.monotonic() + 180
    while turn["tokenizer"] not in stack.get("/workers/tokenizers")["items"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    kept = stack.get(f"/workers/tokenizers/{turn['tokenizer']}")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    [card] = stack.get("/workers")["items"][0]["models"]
    assert len(kept["texts"]) == card["vocabulary_size"] >= len(tokenizer)
    assert not any(kept["texts"][len(tokenizer) :]), "a padded embedding has no tokens"
    for ids in (turn["new_prompt_ids"], turn["completion_ids"]):
        said = re.sub(
            rb"<0x([0-9A-F]{2})>",
            lambda byte: bytes.fromhex(byte[1].decode()),
            "".join(kept["texts"][one] for one in ids).encode(),
        )
        assert said.decode(errors="replace") == tokenizer.decode(ids)
    special = {one for one, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert set(kept["special"]) == special and turn["new_prompt_ids"][0] in special


def test_an_engine_that_dies_is_announced_and_ends_its_worker(stack: Stack) -> None:
    """Runs last: nobody serves any more. The exit code tells a supervisor to start a new worker. The model's name is kept, so a
    request for it waits `queue_s` for a worker."""
    (worker,) = stack.workers
    for process in psutil.Process(worker.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert worker.wait(120) == 1
    deadline = time.monotonic() + 120
    while httpx.get(stack.base_url("probe") + "/models", timeout=60).json()["data"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(stack.base_url("late") + "/chat/completions", json=request, timeout=60)
    assert answer.status_code == 503 and "retry-after" in answer.headers


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--", "--tool-call-parser", "hermess"], "no parser named 'hermess'; there are"),
        (["--", "--max-nun-seqs", "4"], "unrecognized arguments: --max-nun-seqs"),
    ],
)
def test_a_worker_says_what_is_wrong_with_its_arguments(extra: list[str], said: str) -> None:
    command = [sys.executable, "-m", "steno", "worker", "--engine", "vllm", "--model", str(TINY), *extra]
    ended = forked.run(command)
    assert ended.returncode not in (0, 1) and said in " ".join((ended.stderr + ended.stdout).split())
    assert "Traceback" not in ended.stderr

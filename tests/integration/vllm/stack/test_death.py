"""Two workers on vLLM, as processes: agents leave, one worker is killed while it speaks, the other told to stop while it speaks.

Slow to start, so that all of it is one story on one pair: the tests run in this order.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from steno.models import TINY
from steno_cli.demo.task import SYSTEM, TOOL, make_world
from tests.integration.fleet.fleet import Answer, ask, speakers
from tests.support.machine.redis_server import RedisServer
from tests.support.programs.ports import free_port
from tests.support.programs.stack import Stack, running
from tests.support.records.tokens import tokens_add_up

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

VLLM = ["--engine", "vllm", "--model", str(TINY)]
ARGUMENTS = [
    "--enforce-eager",
    "--dtype=float32",
    "--max-num-seqs=8",
    "--max-model-len=4096",
    "--tool-call-parser=hermes",
]
PYTHON = str(Path(sys.executable).with_name("python3"))
"""By this name its programs are not forks (`tests.support.programs.forked`): vLLM spawns its processes, as for users."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 600, "ignore_eos": True}
"""Goes on after the call that ends the model's answer, so that there is time to be killed in."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, list[int]]]:
    """The stack, and the ports of its workers' metrics."""
    redis, ports = RedisServer(), [free_port(), free_port()]
    options = ["--redis-url", redis.url, "--resume-grace-s", "1", "--queue-s", "300"]
    try:
        with running(tmp_path_factory.mktemp("pair"), None, proxy=options) as stack:
            for number, port in enumerate(ports):
                name = f"w{number}"
                words = [*VLLM, "--worker-id", name, "--metrics-port", str(port), "--drain-s", "300"]
                stack.start_worker(*words, "--", *ARGUMENTS, name=name, python=PYTHON)
            until(lambda: len(stack.get("/workers")["items"]) == 2, stack)
            yield stack, ports
    finally:
        redis.close()


def until(true: Callable[[], object], stack: Stack, within_s: float = 1800) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert all(child.poll() is None for child in stack.workers) and time.monotonic() < end, stack.logs()
        time.sleep(0.1)


def question(seed: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": make_world(str(seed)).question()}]


def test_what_vllm_sampled_is_on_record_or_accounted_for_also_where_agents_leave(
    pair: tuple[Stack, list[int]],
) -> None:
    stack, ports = pair

    def agent(number: int) -> None:
        leaves, stop = number % 2 == 0, ["e"] if number % 3 == 1 else None
        body = {"messages": question(number), "stream": True, "max_tokens": 300, "ignore_eos": True, "stop": stop}
        url = stack.base_url(f"left-{number}") + "/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=300) as response:
            for count, _ in enumerate(response.iter_lines()):
                if leaves and count > 10 * number:
                    return

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: not speakers(stack), stack)
    counted = tokens_add_up(stack, ports)
    assert counted["steno_worker_sampled_tokens_total"] > 300


def test_a_worker_that_is_killed_while_it_speaks_is_not_noticed_and_leaves_nothing_behind(
    pair: tuple[Stack, list[int]],
) -> None:
    stack, _ = pair
    fields = {"messages": question(1), "tools": [TOOL]} | GREEDY
    family = {child.pid: psutil.Process(child.pid).children(recursive=True) for child in stack.workers}
    shared = {child.pid: shared_memory([child.pid, *(one.pid for one in family[child.pid])]) for child in stack.workers}
    whole = ask(stack, "whole", "", **fields)
    before = list(stack.workers)
    cut = ask(stack, "cut", "", lambda answer: bool(answer.calls), **fields)
    [killed] = [child for child in before if child not in stack.workers]

    assert whole.calls and whole.done and (cut.content, cut.reasoning, cut.finish, cut.done) == (
        whole.content, whole.reasoning, whole.finish, True,
    )  # fmt: skip
    assert [said(call) for call in cut.calls.values()] == [said(call) for call in whole.calls.values()]
    [expected], [turn] = stack.turns("whole"), stack.turns("cut")
    same = ("completion_ids", "new_prompt_ids", "prompt_digest", "finish_reason", "law", "versions", "partial")
    assert {key: turn[key] for key in same} == {key: expected[key] for key in same}
    assert turn["sampling_logprobs"] == pytest.approx(expected["sampling_logprobs"], abs=1e-4)
    first, second = turn["workers"]
    assert turn["attempt"] == 1 and first["worker_id"] != second["worker_id"]
    assert (first["start"], second["end"]) == (0, GREEDY["max_tokens"]) and 0 < first["end"] == second["start"]

    assert family[killed.pid], "vLLM runs in processes of its own"
    all_end(family[killed.pid])
    assert [path for path in shared[killed.pid] if path.exists()] == []


def test_a_worker_told_to_stop_finishes_what_it_says_and_ends_with_its_engine(pair: tuple[Stack, list[int]]) -> None:
    stack, _ = pair
    for other in stack.workers[:-1]:  # the test before has killed it, unless this one is tried again alone
        other.terminate()
        assert other.wait(120) == 0
        stack.workers.remove(other)
    [child] = stack.workers
    family = psutil.Process(child.pid).children(recursive=True)

    def stop(answer: Answer) -> bool:
        if len(answer.content) > 20 and child in stack.workers:
            child.terminate()
            stack.workers.remove(child)
        return False

    answer = ask(stack, "stopped", "", stop, messages=question(2), **GREEDY)
    assert answer.done and child not in stack.workers
    [turn] = stack.turns("stopped")
    assert (turn["attempt"], len(turn["completion_ids"]), turn["partial"]) == (0, GREEDY["max_tokens"], False)
    assert child.wait(120) == 0
    all_end(family)


def said(call: dict[str, str]) -> tuple[str, str]:
    return call["name"], call["arguments"]


def all_end(processes: list[psutil.Process]) -> None:
    end = time.monotonic() + 180
    while left := [process.pid for process in processes if lives(process)]:
        assert time.monotonic() < end, f"{left} outlive their worker"
        time.sleep(0.1)


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def shared_memory(pids: list[int]) -> set[Path]:
    """Files of shared memory that these processes have mapped."""
    found: set[Path] = set()
    for pid in pids:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    return found

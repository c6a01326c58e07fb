"""README's and the operations page's own lines, run as they stand there: only the port is another one."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.client.client import Client
from steno.contracts.rest import Completion
from steno.models import TINY
from tests.integration.face.conftest import ADMIN
from tests.support.programs.ports import free_port
from tests.support.programs.processes import process, until_it_answers
from tests.support.programs.stack import ROOT, Stack, running


def commands(page: str, heading: str) -> list[str]:
    """The lines of the shell blocks under a heading, continued ones joined."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None, f"{page} has no heading {heading!r}"
    blocks = re.findall(r"^```bash\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line]


def programs(page: str) -> list[str]:
    """The blocks of Python on a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def here(line: str, port: int) -> str:
    line = line.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    return re.sub(r"^(\.venv/bin/)?steno ", f"{sys.executable} -m steno ", line)


def said(line: str, port: int, folder: Path, **environment: str) -> str:
    """What a line prints."""
    variables = {**os.environ, "STENO_PROXY": f"http://127.0.0.1:{port}", **environment}
    done = subprocess.run(
        ["bash", "-c", here(line, port)], capture_output=True, text=True, cwd=folder, env=variables, timeout=180
    )
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


@contextlib.contextmanager
def serving(line: str, port: int, log: Path, answers: Callable[[], Any]) -> Iterator[None]:
    """A line that serves, from when it answers."""
    with process(["bash", "-c", "exec " + here(line, port)], log, {"STENO_PORT": str(port)}) as child:
        until_it_answers(child, log, answers)
        yield


def test_the_readmes_lines_record_a_session_and_read_it_back(tmp_path: Path) -> None:
    proxy, worker, for_gpus, chat, session, turns, samples, complete, show, export = commands("README.md", "Use it")
    assert "--engine vllm" in for_gpus, "that one wants a GPU"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        serving(proxy, port, tmp_path / "proxy.log", lambda: httpx.get(f"{url}/readyz", timeout=60).status_code == 200),
        serving(worker, port, tmp_path / "worker.log", lambda: httpx.get(f"{url}/readyz", timeout=60).json()["models"]),
    ):
        usage = json.loads(said(chat, port, tmp_path))["usage"]
        assert (
            json.loads(said(session, port, tmp_path))["counts"]["completion_tokens"] == usage["completion_tokens"] > 0
        )
        assert len(json.loads(said(turns, port, tmp_path))["items"]) == 1
        [sample] = json.loads(said(samples, port, tmp_path))["items"]
        assert sample["loss_mask"].count(True) == usage["completion_tokens"]
        [program] = programs("README.md")
        found: dict[str, Any] = {}
        exec(program.replace("http://127.0.0.1:8000", url), found)
        assert found["mask"].sum() == usage["completion_tokens"] and len(found["ids"]) == len(sample["token_ids"])
        assert json.loads(said(complete, port, tmp_path))["reward"] == 1.0
        assert "my-trial" in said(show, port, tmp_path)
        said(export, port, tmp_path)
        [row] = (tmp_path / "my-trial.jsonl").read_text().splitlines()
        assert json.loads(row)["trial_id"] == "my-trial"


def test_the_reading_pages_examples_run(tmp_path: Path) -> None:
    """One after the other, as one program."""
    program = "\n".join(programs("docs/reading.md"))
    with running(tmp_path, ["--engine", "transformers", "--model", str(TINY)]) as stack:
        program = program.replace("http://127.0.0.1:8000", stack.url)
        until = time.monotonic() + 60
        while not stack.get("/workers/tokenizers")["items"]:  # asked for within seconds
            assert time.monotonic() < until
            time.sleep(0.1)
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=180,
            env={**os.environ},
        )
        assert done.returncode == 0, done.stderr
        turn, sample, texts, special, step, seen = done.stdout.splitlines()
        assert len(ast.literal_eval(texts)) <= 16 and "<|im_end|>" in ast.literal_eval(special)
        assert turn.startswith("0 ") and "base/0" in turn and sample.endswith(" 1.0")
        assert ast.literal_eval(step) == {"loss": -0.02, "reward/mean": 0.4}
        [differences] = map(list, ast.literal_eval(seen))
        assert 0 < len(differences) <= 16 and differences == pytest.approx([0.01] * len(differences), abs=1e-4)


def test_the_agent_of_the_example_in_containers_asks_and_writes_the_answer(stack: Stack, tmp_path: Path) -> None:
    agent, _ = programs("docs/rollouts.md")
    variables = {
        "STENO_TASK_INSTRUCTION": "hello",
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": stack.base_url("documented-agent"),
    }
    subprocess.run([sys.executable, "-c", agent], env={**os.environ, **variables}, cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "answer.txt").read_text() == "You said 'hello'."


def test_the_rollouts_pages_program_runs(stack: Stack, tmp_path: Path) -> None:
    _, program = programs("docs/rollouts.md")
    (tmp_path / "tasks/one").mkdir(parents=True)
    (tmp_path / "tasks/one/task.toml").touch()
    (tmp_path / "tasks/one/instruction.md").write_text("hello")
    agent = tmp_path / "run-agent.sh"
    agent.write_text("#!/bin/sh\necho 0.5 >reward.txt\n")
    agent.chmod(0o755)
    here = f'proxy="{stack.url}", work_dir=Path("work"), in_flight=32'
    done = subprocess.run(
        [sys.executable, "-c", program.replace("in_flight=32", here)],
        capture_output=True, text=True, timeout=180, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 24 and all(line.endswith(" 0.5 completed") for line in lines)


def test_the_operations_pages_lines_do_what_it_says(locked: Stack, tmp_path: Path) -> None:
    def run(line: str) -> str:
        return said(line.replace('"wait_s": 30', '"wait_s": 0'), locked.port, tmp_path, STENO_ADMIN_KEY=ADMIN)

    create, listing, tail = commands("docs/operations.md", "Sessions")
    lease, run_view, runs, groups, run_shown = commands("docs/operations.md", "Leases")
    policies, update, names, retire = commands("docs/operations.md", "Policies")
    assert len(json.loads(run(create))["trials"]) == 8
    assert all(f"g1.{index}" in run(listing) for index in range(8))
    with Client(locked.url, ADMIN) as client:
        client.complete("g1.0", Completion(reward=0.5))
    assert "0.5" in run(tail), "it ends with the session"
    assert json.loads(run(lease)) == {"items": []}
    assert json.loads(run(run_view))["run_id"] == "exp-7"
    assert "exp-7" in run(runs)
    assert "g1" in run(groups) and "1/8" in run(groups)
    assert "1 running" in run(run_shown)
    assert json.loads(run(policies))["items"][0]["workers"], "who serves which version"
    assert json.loads(run(update))["error"]["code"] == "not_found"
    assert "workers" in run(names)
    with pytest.raises(AssertionError, match="no worker has served a model 'org/judge-7b'"):
        run(retire)

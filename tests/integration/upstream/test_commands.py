"""How upstreams are asked for: what is imported for it, what is refused before anything listens, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.upstream.conftest import KEY, ask
from tests.support.programs import forked
from tests.support.programs.ports import free_port
from tests.support.programs.stack import ROOT, Stack, running


def steno(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-m", "steno", *words])


def test_litellm_is_imported_only_where_text_is_asked_of_it() -> None:
    """Not for the command line, the proxy, the worker, nor for a vLLM server."""
    code = (
        "import sys, steno_cli.main, steno_proxy.server.app, steno_worker.main, steno_cli.commands.upstream\n"
        "import steno_worker.engines.litellm.engine, steno_worker.engines.vllm_server.engine\n"
        "assert 'litellm' not in sys.modules\n"
        "import steno_worker.engines.litellm.text\n"
        "assert 'litellm' in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["proxy", "--upstream", "nonsense"], "PROVIDER/MODEL"),
        (["proxy", "--api-base", "http://127.0.0.1:1"], "give --upstream as well"),
        (["proxy", "--upstream", "openai/x", "--upstream-tokens", "require"], "require needs a vLLM server"),
        (["proxy", "--upstream", "hosted_vllm/x"], "api_base"),
        (["proxy", "--upstream", "hosted_vllm/x", "--api-base", "http://127.0.0.1:9/v1"], "can't be reached"),
        (["worker", "--engine", "litellm"], "--model PROVIDER/MODEL"),
        (
            ["worker", "--engine", "litellm", "--model", "openai/x", "--", "tokens=some"],
            "got 'some', must be one of require, auto, off",
        ),
    ],
)
def test_what_can_not_work_is_said_in_one_line(words: list[str], said: str) -> None:
    port = ["--port", str(free_port())] if words[0] == "proxy" else []
    done = steno(*words, *port)
    assert done.returncode == 2 and said in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_of_its_own_serves_an_upstream_as_well(behind: Stack, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    upstream = ["--model", "openai/up", "--api-base", behind.url + "/apart/v1", "--api-key-file", str(tmp_path / "key")]
    with running(tmp_path, ["--engine", "litellm", *upstream]) as stack:
        assert ask(stack, "apart", "hello").json()["choices"][0]["message"]["content"] == "you said hello"
        assert stack.get("/sessions/apart")["marks"] == ["text_only"]


def test_a_proxy_with_keys_admits_its_own_worker_and_stops_in_order(
    behind: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "admin").write_text("the admin's key")
    words = ["--upstream", "openai/up", "--api-base", behind.url + "/keyed/v1", "--api-key", KEY]
    words += ["--admin-key-file", str(tmp_path / "admin")]
    with running(tmp_path, None, proxy=words) as stack:
        deadline_log = tmp_path / "proxy.log"
        while "is connected" not in deadline_log.read_text():
            assert stack.proxy.poll() is None, stack.logs()
        stack.proxy.send_signal(signal.SIGTERM)
        assert stack.proxy.wait(120) == 0
        assert "Traceback" not in stack.logs() and KEY not in stack.logs()


def test_a_vllm_name_without_a_vllm_server_behind_it_is_served_as_text(in_front: Callable[..., Stack]) -> None:
    """Steno is an OpenAI-compatible server, and none that renders prompts for others: found out at start."""
    front = in_front("hosted_vllm/scripted", "/as-vllm/v1")
    assert ask(front, "as-vllm", "hello").json()["choices"][0]["message"]["content"] == "you said hello"
    assert front.get("/sessions/as-vllm")["marks"] == ["text_only"]
    assert "text_only" in (front.folder / "proxy.log").read_text()

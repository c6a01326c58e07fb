"""Programs of the tests that are forks: they end, and are ended, as programs that were started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.programs import forked
from tests.support.programs.ports import free_port
from tests.support.programs.processes import process, until
from tests.support.programs.stack import ROOT

PROXY = [sys.executable, "-m", "steno", "proxy"]


@pytest.fixture
def as_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests before this one may have set what imports read."""
    for name in {*os.environ, *forked.IMPORTED_IN}:
        if name in forked.IMPORTED_IN:
            monkeypatch.setenv(name, forked.IMPORTED_IN[name])
        else:
            monkeypatch.delenv(name)


def test_it_is_a_process_with_an_environment_and_a_folder_of_its_own(tmp_path: Path, as_imported: None) -> None:
    port, log = free_port(), tmp_path / "proxy.log"
    with process([*PROXY, "--host", "127.0.0.1"], log, {"STENO_PORT": str(port)}, cwd=tmp_path) as child:
        assert isinstance(child, forked.Program)
        until(lambda: str(port) in log.read_text())
        assert Path(f"/proc/{child.pid}/cwd").resolve() == tmp_path and child.pid != os.getpid()
        assert child.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0 == child.poll()
        child.kill()  # of one that has ended: nothing


def test_programs_are_forks_also_where_a_test_has_imported_litellm_and_deepspeed(
    tmp_path: Path, as_imported: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which set these, and a run of all tests imports both; vLLM sets the last two."""
    for name in (
        "LITELLM_LOCAL_MODEL_COST_MAP", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "VLLM_X", "LD_PRELOAD",
    ):  # fmt: skip
        monkeypatch.setenv(name, "1")
    with (tmp_path / "log").open("wb") as out:
        child = forked.start([*PROXY, "--help"], os.environ, ROOT, out)
    assert isinstance(child, forked.Program) and child.wait(60) == 0


def test_what_a_command_prints_and_what_it_says_come_apart(as_imported: None) -> None:
    done = forked.run([sys.executable, "-m", "steno", "sessions", "list", "--proxy", "http://127.0.0.1:9"])
    assert (done.returncode, done.stdout) == (1, "") and "127.0.0.1:9" in done.stderr


def test_its_exit_code_and_the_signal_that_killed_it_are_told(tmp_path: Path) -> None:
    with process([*PROXY, "--port", "none"], tmp_path / "wrong.log") as wrong:
        assert wrong.wait(60) == 2
    assert "port" in (tmp_path / "wrong.log").read_text()
    with process([*PROXY, "--port", str(free_port())], tmp_path / "killed.log") as killed:
        killed.kill()
        assert killed.wait(60) == -signal.SIGKILL


def test_what_imports_could_read_is_given_to_a_program_that_is_started(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "3"}
        child = forked.start([*PROXY, "--help"], environment, ROOT, out)
        assert isinstance(child, subprocess.Popen) and child.wait(300) == 0
        other = forked.start([sys.executable, "--version"], os.environ, ROOT, out)
        assert isinstance(other, subprocess.Popen) and other.wait(300) == 0


RANK = """
import os, sys, threading, time
said = [os.environ["RANK"], os.environ["STENO_SAID"], os.getsid(0) == os.getpid(), threading.active_count()]
os.write(1, (" ".join(map(str, said)) + "\\n").encode())  # at once: `print` under `-u` writes words, and the ranks share a file
open("said-" + os.environ["RANK"], "w").close()
while not (os.path.exists("said-0") and os.path.exists("said-1")):  # torchrun ends the others of one that fails
    time.sleep(0.01)
number = sys.argv[1 + int(os.environ["RANK"])]
sys.exit(int(number) if number != "TERM" else os.kill(os.getpid(), 15))
"""


@pytest.mark.parametrize(("codes", "code"), [(("0", "0"), 0), (("0", "3"), 3), (("TERM", "0"), 1)])
def test_ranks_of_torchrun_are_processes_of_their_own_and_end_as_such(
    tmp_path: Path, as_imported: None, codes: tuple[str, str], code: int
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "steno_cli.torchrun", "--standalone", "--nproc-per-node", "2", "rank.py", *codes]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "STENO_SAID": "it"}
    with (tmp_path / "log").open("wb") as out:
        launched = forked.start(command, environment, tmp_path, out)
    said = tmp_path.joinpath("log").read_text
    assert isinstance(launched, forked.Program) and launched.wait(120) == code, said()
    assert "0 it True 1\n" in said() and "1 it True 1\n" in said()


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        ((), "transformers"),
        (("--engine", "scripted"), "transformers"),
        (("--engine", "vllm"), "vllm"),
        (("--engine", "litellm"), None),
    ],
)
def test_workers_are_forks_of_what_has_imported_their_engine(words: tuple[str, ...], engine: str | None) -> None:
    """The default engine is transformers."""
    modules = forked._modules([sys.executable, "-m", "steno", "worker", "--proxy", "ws://127.0.0.1:1", *words])
    assert (f"steno_worker.engines.{engine}.engine" in modules) if modules else engine is None


def test_what_forks_is_another_process_for_other_imports() -> None:
    kinds = [("proxy",), ("proxy", "--upstream", "x"), ("worker",), ("worker", "--engine", "vllm"), ("tasks",)]
    sets = [forked._modules([sys.executable, "-m", "steno", *words]) for words in kinds] + [forked.RANKS]
    assert len({forked.address(1, modules) for modules in sets if modules}) == len(sets)


STARTS = """
import os, sys, psutil
from tests.support.programs import forked
if "collected" in sys.argv:
    forked.tests_are_collected()
command = [sys.executable, "-m", "steno", "proxy", "--host", "127.0.0.1", "--port", "0"]
with open("log-" + sys.argv[-1], "wb") as out:
    child = forked.start(command, os.environ, forked.ROOT, out)
    os.write(1, f"{psutil.Process(child.pid).ppid()}\\n".encode())  # at once: others write there, too
    child.kill()
    child.wait()
"""


def starts(folder: Path, *command: str) -> set[int]:
    """Whose fork the program of each process was. Returns once nobody has their standard output any more."""
    environment = {**os.environ, "PYTEST_XDIST_WORKER": "gw0", "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", *command], env=environment, cwd=folder, timeout=120, check=True, stdout=subprocess.PIPE
    )
    return {int(line) for line in done.stdout.split()}


def test_processes_of_one_run_share_what_forks_and_it_ends_with_the_run(tmp_path: Path) -> None:
    """The run is whoever starts the processes of xdist."""
    run = "import subprocess, sys\nfor one in [subprocess.Popen([*sys.argv[1:], name]) for name in 'ab']: one.wait()"
    [forker] = starts(tmp_path, run, sys.executable, "-c", STARTS, "collected")
    until(lambda: not psutil.pid_exists(forker))


def test_a_program_of_a_test_is_a_run_of_its_own(tmp_path: Path) -> None:
    """It inherits the variables of the process of xdist that started it, which goes on."""
    [forker] = starts(tmp_path, STARTS, "a")
    until(lambda: not psutil.pid_exists(forker))

"""torchrun whose ranks are forks of it, where it has imported what they import: `tests.support.programs.forked` starts it.

A rank's imports take more processor time than a step of the tiny model. Each rank is a process of its own all the same, in a
session of its own, with its own environment, as torchrun starts it. It ends without the destructors of what torchrun had made.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import deepspeed.runtime.zero.muon.muon_optimizer
import transformers.models.qwen3.modeling_qwen3
from torch.distributed import run as _run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from transformers import AutoModelForCausalLM, AutoTokenizer

import steno_cli.commands.train
import steno_cli.main
import steno_trainer.run.main

IMPORTED = (deepspeed, transformers, _run, AutoModelForCausalLM, AutoTokenizer, steno_cli, steno_trainer)
assert deepspeed.ops.__compatible_ops__, "it asks compilers at the first look, and keeps their answers"
assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork has no other thread than the one that forked"


class ForkedRank:
    """What torchrun uses of a `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], stdout: IO[Any] | None, stderr: IO[Any] | None
    ) -> None:
        """Args: words: as they follow `python -u`."""
        self.returncode: int | None = None
        gc.freeze()
        self.pid = os.fork()
        if self.pid == 0:
            _be_rank(words, environment, stdout, stderr)
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            select.select([self._ended], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
        return code


def _be_rank(
    words: Sequence[str], environment: Mapping[str, str], stdout: IO[Any] | None, stderr: IO[Any] | None
) -> NoReturn:
    """Run the program and end as an interpreter does: wait for threads that are no daemons, then call what `atexit` has."""
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream, descriptor in ((stdout, 1), (stderr, 2)):
            if stream is not None:
                os.dup2(stream.fileno(), descriptor)
        atexit._clear()  # of torchrun
        os.environ.clear()
        os.environ.update(environment)
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_rank(handler: Any, words: Sequence[str], environment: Mapping[str, str]) -> ForkedRank:
    assert list(words[:2]) == [sys.executable, "-u"], words
    return ForkedRank(words[2:], environment, handler._stdout, handler._stderr)


# Private names, so that an upgrade that has them no more is noticed here.
assert callable(subprocess_handler.SubprocessHandler._popen), "how torchrun starts a rank"
assert callable(threading._shutdown) and callable(atexit._clear), "how an interpreter ends"  # type: ignore[attr-defined]
subprocess_handler.SubprocessHandler._popen = _fork_rank  # type: ignore[assignment, method-assign]

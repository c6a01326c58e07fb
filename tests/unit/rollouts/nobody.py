"""What another user than root meets: tests often run as root, to whom no file is read-only and no process out of reach."""

from __future__ import annotations

import encodings.utf_8_sig  # noqa: F401  # of a Python in root's folder this user could load nothing when it is first used
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

NOBODY = 65534
LIMIT_S = 120


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def as_nobody(work: Callable[[], object], folder: Path, *, at_once: bool = True) -> None:
    """Run `work` in a child process, in `folder`, which then belongs to nobody: only relative paths lead there. Fails if `work`
    raises.

    Args: at_once: `work` runs as nobody from its start; else it calls `become_nobody` itself.
    """
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "see what it printed"
        return
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)  # what hangs here is in no reach of pytest's own time limit
        os.chdir(folder)
        if os.getuid() == 0:
            os.chown(".", NOBODY, NOBODY)
            if at_once:
                become_nobody()
        work()
        code = 0
    except BaseException:  # whatever it is: this process must not go on as a second pytest
        traceback.print_exc()
    finally:
        os._exit(code)

"""`steno`, but that the first rank is killed (SIGKILL) at the Nth call of a method.

python -m tests.integration.loop.mortal MODULE:CLASS.METHOD:N train …

With `:told` after N its launcher is told to stop instead (SIGTERM), and the method goes on once this rank has heard of it. The
method must not be one of the event loop's thread.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from typing import Any

from steno_trainer.run.loop import Loop


def arm(where: str) -> None:
    """Every rank counts; the first one dies, before the method does anything."""
    module, name, at, *told = where.split(":")
    owner_name, method_name = name.split(".")
    owner = getattr(importlib.import_module(module), owner_name)
    method = getattr(owner, method_name)
    calls = 0
    heard = _hears() if told else threading.Event()

    def mortal(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(at) and os.environ.get("RANK", "0") == "0":
            if not told:
                # What other threads have been given arrives: a push of the step before is posted by one.
                time.sleep(10.0)
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(os.getppid(), signal.SIGTERM)
            assert heard.wait(60), "nobody told this rank to stop"
        return method(*arguments, **named)

    setattr(owner, method_name, mortal)


def _hears() -> threading.Event:
    """Is set once this rank is told to stop."""
    stop, heard = Loop.stop, threading.Event()

    def stop_and_say(loop: Loop) -> None:
        stop(loop)
        heard.set()

    Loop.stop = stop_and_say  # type: ignore[method-assign]
    return heard


if __name__ == "__main__":
    arm(sys.argv.pop(1))
    from steno_cli.main import main

    main()

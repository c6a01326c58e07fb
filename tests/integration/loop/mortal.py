"""`steno`, but that the first rank is killed (SIGKILL) at the Nth call of a method.

python -m tests.integration.loop.mortal MODULE:CLASS.METHOD:N train …
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any


def arm(where: str) -> None:
    """Every rank counts; the first one dies, before the method does anything."""
    module, name, at = where.split(":")
    owner_name, method_name = name.split(".")
    owner = getattr(importlib.import_module(module), owner_name)
    method = getattr(owner, method_name)
    calls = 0

    def mortal(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(at) and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments, **named)

    setattr(owner, method_name, mortal)


if __name__ == "__main__":
    arm(sys.argv.pop(1))
    from steno_cli.main import main

    main()

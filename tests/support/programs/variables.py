"""The environment that a test gives to the programs that it starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def without_settings() -> Iterator[None]:
    """This process, and what it starts, without the variables that Steno's programs would read."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("STENO_")}
    yield
    os.environ.update(kept)

"""`steno demo`: proxy, worker and a small agent on this machine, and what was recorded of it."""

from __future__ import annotations


def demo() -> None:
    """Run a proxy, a worker with the embedded engine and a small tool-using agent; then show what was recorded.

    Needs no GPU, no Redis and no download.
    """
    from steno.demo import run

    run()

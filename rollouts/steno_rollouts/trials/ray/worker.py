"""What Ray runs for an attempt: it starts a process (`steno_rollouts.on_node`), hands it the parcels, and brings its answer back.

A process of its own, which leaves Ray's worker at once: Ray kills the children of a worker that exits, and an agent would then go
on by itself. A pipe joins the two: a byte asks it to end, a second one to end at once; when the worker is gone, however it went,
the pipe's end says so. Only the standard library is imported here, and Ray.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import subprocess
import sys

MODULE = "steno_rollouts.on_node"
LOOK_S = 0.25
"""Between two looks at whether Ray has cancelled the task: it does so without a signal, which would end the wait."""


class NodeProcessLost(Exception):
    """The process ended without an answer. What it had left running is ended."""


def on_node(keys: bytes, request: bytes, clear: bytes, folder: bytes | None) -> bytes:
    """A task of Ray's. Args: keys, request: pickled. clear: the request to end what is left, pickled. folder: the task's, packed.

    Returns: a pickled `Answer`. Raises: NodeProcessLost.
    """
    import ray

    place = (ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
    answer = _attended(pickle.dumps((keys, request, folder, place)))
    if answer:
        return answer
    _attended(pickle.dumps((keys, clear, folder, place)))
    raise NodeProcessLost(
        f"the process of an attempt on {place[1]} ended without an answer: it was killed, or see Ray's logs"
    )


def _attended(parcel: bytes) -> bytes:
    """b"": it came to no end of its own. Raises: KeyboardInterrupt: Ray has cancelled the task, and the process has ended."""
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(writing)],
            stdin=subprocess.PIPE,
            pass_fds=[writing],
            start_new_session=True,
        )
    finally:
        os.close(writing)
    assert process.stdin is not None
    answer, asked = bytearray(), 0
    with os.fdopen(reading, "rb", buffering=0) as said, process.stdin as told:
        with contextlib.suppress(BrokenPipeError):  # it ended at once: there will be no answer
            told.write(len(parcel).to_bytes(8, "big") + parcel)
            told.flush()
        while True:
            try:
                if select.select([said], [], [], LOOK_S)[0]:
                    piece = said.read(2**20)
                    if not piece:
                        break
                    answer += piece
            except KeyboardInterrupt:
                asked += 1
                with contextlib.suppress(BrokenPipeError):
                    told.write(b"!")
                    told.flush()
    process.wait()
    if asked:
        raise KeyboardInterrupt
    return bytes(answer)

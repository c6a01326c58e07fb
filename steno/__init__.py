"""The public API for notebooks, harnesses and trainers: the client of a proxy, and the records that its calls take and return.

    from steno import Client, Completion

    with Client("http://127.0.0.1:8000") as client:
        trial = client.register("my-trial")
        ...
        client.complete("my-trial", Completion(reward=1.0))
        for sample in client.samples("my-trial"):
            ids, mask, logprobs = sample.to_numpy()

Light: neither torch nor a server comes along. The names are imported when they are first asked for: the proxy and the worker need
the contracts alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steno.client.client import AsyncClient, Client
    from steno.contracts.errors import StenoError
    from steno.contracts.records import ForkOf, Group, Limits, Sample, SamplingPolicy, Session, Turn
    from steno.contracts.rest import Completion, GroupSpec, SessionSpec, Trial
    from steno.contracts.runs.leases import Lease, LeaseRequest
    from steno.contracts.runs.training_steps import PostedAnnotation, TrainingStep

_WHERE = {
    "steno.client.client": ("AsyncClient", "Client"),
    "steno.contracts.errors": ("StenoError",),
    "steno.contracts.runs.leases": ("Lease", "LeaseRequest"),
    "steno.contracts.records": ("ForkOf", "Group", "Limits", "Sample", "SamplingPolicy", "Session", "Turn"),
    "steno.contracts.rest": ("Completion", "GroupSpec", "SessionSpec", "Trial"),
    "steno.contracts.runs.training_steps": ("PostedAnnotation", "TrainingStep"),
}
__all__ = [
    "AsyncClient",
    "Client",
    "Completion",
    "ForkOf",
    "Group",
    "GroupSpec",
    "Lease",
    "LeaseRequest",
    "Limits",
    "PostedAnnotation",
    "Sample",
    "SamplingPolicy",
    "Session",
    "SessionSpec",
    "StenoError",
    "TrainingStep",
    "Trial",
    "Turn",
]


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            found = globals()[name] = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module 'steno' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

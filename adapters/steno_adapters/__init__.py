"""Steno for trainers that are not ours: what was recorded, as arrays; new weights, back to the workers.

    from steno_adapters import Collector, as_in_checkpoint, packed

    with Collector("http://127.0.0.1:8000", run="mine", agent=play) as collector:
        collector.push(as_in_checkpoint(model, model.state_dict()), "mine/0")
        groups = collector.collect(tasks, n=8)
        batch = packed([row for group in groups for row in group.rows], advantages)
        ...
        collector.acknowledge(groups)

`steno_adapters.trl` is the same for TRL's trainers. Stands on `steno` and `steno_rollouts` alone; numpy and torch come with the
functions that need them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steno_adapters.collate import PackedRows, PaddedRows, packed, padded
    from steno_adapters.collected_group import CollectedGroup
    from steno_adapters.collector import Collector
    from steno_adapters.function_agents import AgentCall
    from steno_adapters.rows import TrainableRow
    from steno_adapters.weights import as_in_checkpoint, probe_of, push

_WHERE = {
    "steno_adapters.collate": ("PackedRows", "PaddedRows", "packed", "padded"),
    "steno_adapters.collected_group": ("CollectedGroup",),
    "steno_adapters.collector": ("Collector",),
    "steno_adapters.function_agents": ("AgentCall",),
    "steno_adapters.rows": ("TrainableRow",),
    "steno_adapters.weights": ("as_in_checkpoint", "probe_of", "push"),
}
__all__ = [
    "AgentCall",
    "CollectedGroup",
    "Collector",
    "PackedRows",
    "PaddedRows",
    "TrainableRow",
    "as_in_checkpoint",
    "packed",
    "padded",
    "probe_of",
    "push",
]


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            found = globals()[name] = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module 'steno_adapters' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Settings of a whole run: what can't be is refused by name, and what is set reaches the part that it is for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.contracts.errors import ConfigError
from trainer_bridge.main import Duties
from trainer_bridge.run_config import RunSettings
from trainer_bridge.weights.nccl import Nccl


def settings(**fields: Any) -> RunSettings:
    return RunSettings(**{"model": "m", **fields})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"eval_every": 2}, "eval_config"),
        ({"eval_every": 3, "eval_config": "e.yaml", "push_every": 2}, "eval_every"),
        ({"push_every": 3, "max_staleness_steps": 1}, "push_every"),
        ({"transport": "stream", "weights_dir_at_workers": "/w"}, "weights_dir_at_workers"),
        ({"transport": "stream", "nccl_processes": 2}, "nccl_processes"),
    ],
)
def test_combinations_that_can_not_be_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(**fields).check()
    assert refused.value.field == named


def test_a_group_over_nccl_has_room_for_every_process_of_an_engine() -> None:
    given = settings(transport="nccl", nccl_processes=4)
    given.check()
    nccl = Duties._transport(SimpleNamespace(_settings=given, _ranks=None))  # type: ignore[arg-type]
    assert isinstance(nccl, Nccl)
    nccl._workers, nccl._address = (lambda: {"a": 1.0, "b": 1.0}), "127.0.0.1"
    assert '"world_size":9' in nccl._meet() and '"rank_offsets":{"a":1,"b":5}' in nccl._meet()

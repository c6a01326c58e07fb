"""Settings of a whole run: what can't be is refused by name, and what is set reaches the part that it is for."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from steno.contracts.errors import ConfigError
from steno.contracts.policy import Manifest, TensorEntry, UpdateSpec
from steno.contracts.runs.leases import LeaseRequest
from steno.contracts.worker_view import WorkerView
from steno_trainer.run import main
from steno_trainer.run.main import RankDuties
from steno_trainer.run_config import RunSettings
from steno_trainer.weights.nccl.transport import NcclTransport
from tests.support.records.worker_views import worker_view


def settings(**fields: Any) -> RunSettings:
    return RunSettings(**{"model": "m", **fields})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"eval_every": 2}, "eval_config"),
        ({"eval_every": 3, "eval_config": "e.yaml", "push_every": 2}, "eval_every"),
        ({"push_every": 3, "max_staleness_steps": 1}, "push_every"),
        ({"transport": "stream", "weights_dir_at_workers": "/w"}, "weights_dir_at_workers"),
        ({"transport": "stream", "weights_url": "s3://bucket"}, "weights_url"),
        ({"weights_dir_at_workers": "/w", "weights_url": "s3://bucket"}, "weights_url"),
        ({"weights_url": "memory://x"}, "weights_url"),
        ({"transport": "stream", "nccl_processes": 2}, "nccl_processes"),
        ({"transport": "stream", "nccl_address": "10.0.0.1"}, "nccl_address"),
        ({"transport": "nccl", "push": "delta"}, "push"),
        ({"transport": "nccl", "push": "adapter", "lora_rank": 8}, "push"),
        ({"push": "adapter"}, "push"),
        ({"push_full_every": 5}, "push_full_every"),
        ({"probe_tokens": 0, "probe_tolerance": 0.5}, "probe_tolerance"),
        ({"probe_tokens": 1}, "probe_tokens"),
        ({"distillation": 1.0, "reference": "r", "dynamic_sampling": True}, "dynamic_sampling"),
        *(
            ({"offline": True, **pushing}, next(iter(pushing)))
            for pushing in (
                {"max_staleness_steps": 4},
                {"transport": "stream"},
                {"weights_dir_at_workers": "/w"},
                {"weights_url": "s3://bucket"},
                {"push": "delta"},
                {"push_every": 5},
                {"push_deadline_s": 60.0},
                {"kv": "keep"},
                {"probe_tokens": 0},
                {"probe_tolerance": 0.5},
                {"send_dtype": "bfloat16"},
            )
        ),
        *(
            ({"records": "a.jsonl", **leased}, next(iter(leased)))
            for leased in ({"take_s": 5.0}, {"lease_ttl_s": 60.0}, {"take_over": True}, {"report_by": "source"})
        ),
    ],
)
def test_combinations_that_can_not_be_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(**fields).check()
    assert refused.value.field == named


def test_offline_a_push_is_refused_since_there_is_none_and_not_for_its_staleness() -> None:
    with pytest.raises(ConfigError, match=r"push_every: got 5, needs pushes of weights.*offline is true"):
        settings(offline=True, push_every=5).check()
    with pytest.raises(ConfigError, match=r"transport: got stream.*records is a\.jsonl"):
        settings(records="a.jsonl", transport="stream").check()
    settings(offline=True, max_staleness_steps=1, probe_tokens=64, push="full", weights_dir="/w").check()


def test_a_run_at_a_proxy_is_leased_and_has_tasks_also_offline() -> None:
    settings(offline=True, lease_ttl_s=60.0, take_over=True, report_by="source").check()


@pytest.mark.parametrize("field", ["lease_ttl_s", "push_deadline_s"])
def test_seconds_that_the_proxy_would_refuse_are_refused_at_the_start(field: str) -> None:
    taken = settings(**{field: 86400})
    LeaseRequest(consumer="t", ttl_s=taken.lease_ttl_s)
    weights = Manifest(tensors=[TensorEntry(name="w", dtype="float32", shape=[1], digest="0" * 32)])
    UpdateSpec(lineage="a", step=1, transport="stream", manifest=weights, deadline_s=taken.push_deadline_s)
    with pytest.raises(ValidationError, match=field):
        settings(**{field: 86401})


def test_a_group_over_nccl_has_room_for_every_process_of_an_engine() -> None:
    given = settings(transport="nccl", nccl_processes=4)
    given.check()
    nccl = RankDuties._transport(SimpleNamespace(_settings=given, _ranks=None))  # type: ignore[arg-type]
    assert isinstance(nccl, NcclTransport)
    nccl._workers, nccl._address = (lambda: {"a": 1.0, "b": 1.0}), lambda: "127.0.0.1"
    assert '"world_size":9' in nccl._meet() and '"rank_offsets":{"a":1,"b":5}' in nccl._meet()


def test_workers_that_can_not_meet_over_nccl_end_the_start_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Proxy:
        """Its one worker dialled from another network."""

        def __init__(self, *args: Any, **options: Any) -> None: ...
        def __enter__(self) -> Proxy:
            return self

        def __exit__(self, *_: object) -> None: ...
        def workers(self) -> list[WorkerView]:
            return [worker_view("far", address="198.51.100.7")]

    told: list[bytes] = []
    monkeypatch.setattr(main, "Client", Proxy)
    monkeypatch.setattr(main.TenureHolder, "take", lambda *args, **options: main.TenureHolder(Proxy(), "r", "t", None))  # type: ignore[arg-type]
    monkeypatch.setattr(main, "meeting_address", partial(main.meeting_address, route=lambda peer: "192.0.2.1"))
    given = settings(transport="nccl", nccl_address="127.0.0.1")
    ranks: Any = SimpleNamespace(share=told.append)
    refused = pytest.raises(
        ConfigError, match=r"127\.0\.0\.1 is a loopback address, but worker far is on another machine"
    )
    with refused, main._hold(given, ranks, "lineage"):
        raise AssertionError("it went on to load the model")
    assert told == [b""], "the other ranks end too"

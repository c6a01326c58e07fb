"""Which rows `AsyncRollouts` gives TRL's trainer, when their turn has come, and what it says of the others."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from steno.contracts.errors import Conflict, StenoError, Unreachable
from steno_adapters import CollectedGroup, TrainableRow
from steno_adapters.trl import AsyncRollouts
from steno_adapters.trl.row_progress import RowProgress

pytestmark = pytest.mark.trl


def row(version: str, *, temperature: float = 1.0, tokens: int = 2) -> TrainableRow:
    said, ones = np.arange(tokens), np.ones(tokens, np.float32)
    return TrainableRow(
        trial_id="g.0", group_id="g", leaf_id="t", reward=1.0, prompt_ids=np.int32([1, 2]), response_ids=said.astype(np.int32),
        response_mask=said >= 0, logprobs=-ones, temperatures=temperature * ones,
        version_index=np.zeros(tokens, np.int32), versions=(version,),
    )  # fmt: skip


def rollouts_at_step_3() -> AsyncRollouts:
    """Weights were pushed before steps 0 to 3."""
    collector: Any = None
    rollouts = AsyncRollouts(collector, [{"task_id": "a"}])
    rollouts._trainer = SimpleNamespace(args=SimpleNamespace(temperature=1.0, token_budget=8, max_staleness=2))
    for step in range(4):
        rollouts.versions.push(step)
    rollouts.update_model_version(4)
    return rollouts


@pytest.mark.parametrize(
    ("version", "changes", "reason"),
    [
        ("/3", {}, None),
        ("/1", {}, None),
        ("/0", {}, "stale"),
        ("/4", {}, "orphaned"),
        ("other/3", {}, "orphaned"),
        ("/3", {"temperature": 0.7}, "temperature"),
        ("/3", {"tokens": 7}, "too_long"),
    ],
)
def test_a_row_is_trained_unless_something_speaks_against_it(
    version: str, changes: dict[str, Any], reason: str | None
) -> None:
    rollouts = rollouts_at_step_3()
    found = row(version if version[0] != "/" else rollouts.versions.lineage + version, **changes)
    lease: Any = SimpleNamespace(group=SimpleNamespace(group_id="g", task={}, created_at=1.0), left_out={})
    rollouts._came(CollectedGroup(lease, {"g.0": 1.0, "g.1": 0.0}, [found]))
    if reason is None:
        sample = rollouts.rollout_buffer.get(timeout=0.0)
        assert rollouts.model_version - sample.model_version <= 2 and sample.advantage > 0
        assert sample.completion_mask.tolist() == [0, 0, 1, 1] and sample.old_log_probs.tolist() == [0, 0, -1, -1]
        assert rollouts.progress.finished == []
    else:
        with pytest.raises(queue.Empty):
            rollouts.rollout_buffer.get(timeout=0.0)
        assert rollouts.counts[f"untrained/{reason}"] == found.trained_tokens
    rollouts.progress.trained(1)
    assert rollouts.progress.finished == ["g"], "trained or dropped, it is not waited for"


class ProxyToTell:
    """The collector's part that says which groups are used. refusals: the next answers."""

    def __init__(self, *refusals: StenoError) -> None:
        self.refusals, self.told = list(refusals), list[str]()

    def used(self, groups: list[CollectedGroup]) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.told += [group.lease.lease_id for group in groups]


def leased(rollouts: AsyncRollouts, lease_id: str) -> CollectedGroup:
    lease: Any = SimpleNamespace(
        lease_id=lease_id, group=SimpleNamespace(group_id="g", task={}, created_at=1.0), left_out={}
    )
    return CollectedGroup(lease, {"g.0": 1.0, "g.1": 0.0}, [row(rollouts.versions.lineage + "/3")])


def all_taken(proxy: Any) -> AsyncRollouts:
    rollouts = rollouts_at_step_3()
    rollouts._collector = proxy
    rollouts._came(leased(rollouts, "first"))
    rollouts._mark_used()
    assert proxy.told == [], "its row is still waiting"
    rollouts.rollout_buffer.get(timeout=0.0)
    return rollouts


def test_a_proxy_that_was_away_is_told_again_which_groups_are_used() -> None:
    """Else they would count as in hand until the next checkpoint, which trials must begin for."""
    proxy = ProxyToTell(Unreachable("no proxy"), Unreachable("no proxy"))
    rollouts = all_taken(proxy)
    for _ in range(2):
        with pytest.raises(Unreachable):
            rollouts._mark_used()
    for _ in range(2):
        rollouts._mark_used()
    assert proxy.told == ["first"]


def test_a_group_that_is_leased_again_is_marked_as_used_again() -> None:
    proxy = ProxyToTell(Conflict("leased to another"))
    rollouts = all_taken(proxy)
    for _ in range(2):
        rollouts._mark_used()
    assert proxy.told == []
    rollouts._came(leased(rollouts, "second"))
    rollouts._mark_used()
    rollouts.progress.trained(1)  # finished, and not acknowledged
    rollouts._came(leased(rollouts, "third"))
    rollouts._mark_used()
    assert proxy.told == ["second", "third"]


def test_a_group_that_two_threads_acknowledge_at_a_time_is_acknowledged() -> None:
    """One that a checkpoint has comes again while the trainer saves the next one."""
    both = threading.Barrier(2)
    collector: Any = SimpleNamespace(acknowledge=lambda groups: both.wait(30))
    rollouts = rollouts_at_step_3()
    rollouts._collector = collector
    rollouts.progress = RowProgress.restored({"finished": ["g"]})
    with ThreadPoolExecutor() as threads:
        came = threads.submit(rollouts._came, leased(rollouts, "again"))
        while "g" not in rollouts._held:
            time.sleep(0.001)
        threads.submit(rollouts.acknowledge).result(30)
        came.result(30)
    assert rollouts.progress.finished == [] and rollouts._held == {}


def test_a_row_that_was_taken_is_not_kept_until_a_checkpoint_has_it() -> None:
    """With `save_strategy="no"` there is none, and the rows of all steps would be in memory at the end."""
    rollouts = rollouts_at_step_3()
    group = leased(rollouts, "first")
    kept = weakref.ref(group.rows[0])
    rollouts._came(group)
    del group
    assert rollouts.rollout_buffer.get(timeout=0.0).advantage > 0
    gc.collect()
    assert kept() is None and "g" in rollouts._held, "it is still leased, and acknowledged later"


def test_a_push_has_the_deadline_and_the_folder_that_it_was_given(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    collector: Any = SimpleNamespace(push=lambda tensors, version, **options: asked.append(options))
    rollouts = AsyncRollouts(collector, [{"task_id": "a"}], push_timeout_s=9.0, push_folder=tmp_path)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    rollouts._trainer = SimpleNamespace(accelerator=accelerator, model=torch.nn.Module())
    rollouts.send_weights(iter([]))
    assert asked == [{"parent": None, "timeout_s": 9.0, "folder": tmp_path}]

"""What a refusal of a ResourceQuota says: room later, or never."""

from __future__ import annotations

import pytest

from steno_rollouts.trials.harbor.kubernetes.pods.quotas import never_fits, no_room_now

FULL = 'pods "p" is forbidden: exceeded quota: team-a, requested: {}, used: {}, limited: {} (403)'


@pytest.mark.parametrize(
    ("words", "later", "never"),
    [
        (FULL.format("pods=1", "pods=8", "pods=8"), True, None),
        (FULL.format("requests.cpu=1500m", "requests.cpu=1", "requests.cpu=2"), True, None),
        (FULL.format("requests.cpu=2500m", "requests.cpu=0", "requests.cpu=2"), True, "team-a"),
        (FULL.format("cpu=1,memory=2Gi", "cpu=9,memory=0", "cpu=10,memory=2G"), True, "team-a"),
        (FULL.format("memory=1Gi", "memory=1", "memory=1073741824"), True, None),
        (FULL.format("memory=1e3", "memory=0", "memory=999"), True, "team-a"),
        (FULL.format("requests.nvidia.com/gpu=8", "requests.nvidia.com/gpu=0", "requests.nvidia.com/gpu=4"), True, "team-a"),
        (FULL.format("odd=many", "odd=0", "odd=few"), True, None),
        ('pods "p" is forbidden: exceeded quota: team-a, in other words', True, None),
        ('pods "p" is forbidden: status unknown for quota: team-a, resources: pods', True, None),
        ('pods "p" is forbidden: failed quota: team-a: must specify limits.cpu for: main', False, None),
        ('pods "p" is forbidden: User "u" cannot create resource "pods"', False, None),
    ],
)  # fmt: skip
def test_a_quota_refuses_for_now_or_for_good(words: str, later: bool, never: str | None) -> None:
    assert (no_room_now(words), never_fits(words)) == (later, never)

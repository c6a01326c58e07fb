"""What the doctor makes of facts that real processes don't show at will."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steno.doctor.disk_checks import check_folder
from steno.doctor.findings import Level, clock
from steno.doctor.proxy_checks import guarded, judge_metrics, judge_workers
from steno.doctor.redis_checks import judge

SOUND = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "maxmemory": "0"}


def worker(name: str, **changed: Any) -> dict[str, Any]:
    card = {"name": "m", "context_tokens": 1, "tokenizer_digest": "aaaa", "policy_version": "l/1"} | changed.pop(
        "card", {}
    )
    return {"id": name, "connected": True, "healthy": True, "draining": False, "behind": [], "models": [card]} | changed


def levels(findings: Any) -> dict[str, Level]:
    return {finding.check: finding.level for finding in findings}


def test_workers_that_disagree_are_named() -> None:
    found = list(judge_workers([worker("a"), worker("b", card={"tokenizer_digest": "bbbb", "policy_version": "l/2"})]))
    assert levels(found)["workers.tokenizers"] is Level.BAD and levels(found)["workers.versions"] is Level.WARNING
    assert "aaaa on a; bbbb on b" in next(f.message for f in found if f.check == "workers.tokenizers")


def test_workers_that_are_away_ill_or_behind() -> None:
    fleet = [worker("a"), worker("b", connected=False), worker("c", healthy=False), worker("d", behind=["default"])]
    found = levels(judge_workers(fleet))
    assert found["workers.connected"] is Level.WARNING
    assert found["workers.healthy"] is found["workers.behind"] is Level.BAD


def test_an_open_control_plane_is_bad_beyond_loopback() -> None:
    assert levels(guarded("http://127.0.0.1:8000", True, False, 200)) == {"proxy.keys": Level.WARNING}
    assert levels(guarded("http://10.0.0.1:8000", True, False, 200)) == {"proxy.keys": Level.BAD}
    assert levels(guarded("http://10.0.0.1:8000", False, True, 200)) == {
        "proxy.keys": Level.OK,
        "proxy.tls": Level.WARNING,
    }


def test_clocks_are_judged_by_what_is_known_of_them() -> None:
    assert clock("c", 2.9, 1.0).level is Level.OK
    assert clock("c", -3.5, 1.0).level is Level.BAD


def test_redis_old_following_full_or_failing() -> None:
    assert levels(judge({"redis_version": "6.2.1"}, SOUND, None))["redis.version"] is Level.BAD
    assert levels(judge({"redis_version": "7.0", "role": "slave"}, SOUND, None))["redis.role"] is Level.BAD
    assert (
        levels(judge({"redis_version": "7.0", "aof_last_write_status": "err"}, SOUND, None))["redis.disk"] is Level.BAD
    )
    replicas = {"redis_version": "7.0", "connected_slaves": 1}
    assert levels(judge(replicas, SOUND, None))["redis.persistence"] is Level.WARNING
    assert levels(judge({"redis_version": "7.0"}, SOUND, {"cluster_state": "fail"}))["redis.cluster"] is Level.BAD


def test_what_should_be_nothing_and_is_not() -> None:
    text = (
        '# TYPE steno_proxy_unrecorded_tokens_total counter\nsteno_proxy_unrecorded_tokens_total{reason="store"} 7.0\n'
    )
    found = levels(judge_metrics(text))
    assert found == {"proxy.unrecorded_tokens": Level.WARNING, "proxy.store_errors": Level.OK}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert levels(check_folder(tmp_path / "none")) == {"disk": Level.BAD}

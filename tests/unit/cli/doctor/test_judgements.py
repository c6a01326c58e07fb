"""What the doctor makes of facts that real processes don't show at will."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from steno_cli.doctor.disk_checks import check_folder
from steno_cli.doctor.findings import FindingLevel, clock
from steno_cli.doctor.proxy_checks import check_proxy, guarded, judge_metrics, judge_workers, waited_replicas
from steno_cli.doctor.redis_checks import judge
from steno_cli.doctor.redis_promises import failover, restart
from tests.unit.rollouts.nobody import as_nobody

SOUND = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "maxmemory": "0"}


def worker(name: str, **changed: Any) -> dict[str, Any]:
    card = {
        "name": "m",
        "context_tokens": 1,
        "tokenizer_digest": "aaaa",
        "policy_version": "l/1",
        "capabilities": ["tools"],
    }
    card |= changed.pop("card", {})
    return {"id": name, "connected": True, "healthy": True, "draining": False, "behind": [], "models": [card]} | changed


def levels(findings: Any) -> dict[str, FindingLevel]:
    return {finding.check: finding.level for finding in findings}


def test_workers_that_disagree_are_named() -> None:
    found = list(judge_workers([worker("a"), worker("b", card={"tokenizer_digest": "bbbb", "policy_version": "l/2"})]))
    assert (
        levels(found)["workers.tokenizers"] is FindingLevel.BAD
        and levels(found)["workers.versions"] is FindingLevel.WARNING
    )
    assert "aaaa on a; bbbb on b" in next(f.message for f in found if f.check == "workers.tokenizers")


def test_a_worker_that_parses_no_tool_calls_is_named() -> None:
    [found] = [
        f for f in judge_workers([worker("a"), worker("b", card={"capabilities": []})]) if f.check == "workers.tools"
    ]
    assert found.level is FindingLevel.WARNING and "m: agents get tool calls as text from b" in found.message
    upstream = worker("c", card={"capabilities": [], "text_only": True})  # whose calls its provider parses, or nobody
    assert "workers.tools" not in levels(judge_workers([worker("a"), upstream]))


def test_workers_that_are_away_ill_or_behind() -> None:
    fleet = [worker("a"), worker("b", connected=False), worker("c", healthy=False), worker("d", behind=["default"])]
    found = levels(judge_workers(fleet))
    assert found["workers.connected"] is FindingLevel.WARNING
    assert found["workers.healthy"] is found["workers.behind"] is FindingLevel.BAD


def test_a_proxy_that_does_not_go_by_the_name_asked_says_so() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/healthz":
            return httpx.Response(200, json={"status": "ok"})
        return httpx.Response(403, json={"error": {"code": "forbidden", "message": "Host: 'a.b': allowed_hosts"}})

    found = check_proxy("http://a.b", None, httpx.MockTransport(answer))
    assert levels(found) == {"proxy.reachable": FindingLevel.OK, "proxy.hosts": FindingLevel.BAD}
    assert "allowed_hosts" in found[-1].message


def test_a_variable_that_httpx_can_not_read_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:port")
    [found] = check_proxy("http://127.0.0.1:9", None)
    assert found.level is FindingLevel.BAD and found.message.startswith("HTTPS_PROXY: httpx can't read it")
    assert waited_replicas("http://127.0.0.1:9") is None


@pytest.mark.parametrize("key", [None, "mine"])
def test_a_proxy_without_keys_is_told_so_while_its_store_is_away(key: str | None) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/healthz":
                return httpx.Response(200, json={"status": "ok"})
            case "/workers":
                return httpx.Response(200, json={"items": []})
            case "/metrics":
                return httpx.Response(200, text="")
            case "/readyz":
                return httpx.Response(503, json={"store": "no answer", "models": []})
        return httpx.Response(503, json={"error": {"code": "store_unavailable", "message": "no answer"}})

    found = check_proxy("http://127.0.0.1:8000", key, httpx.MockTransport(answer))
    [keys] = [finding for finding in found if finding.check == "proxy.keys"]
    assert keys.level is FindingLevel.WARNING and keys.message.startswith("no admin key")


def test_an_open_control_plane_is_bad_beyond_loopback() -> None:
    assert levels(guarded("http://127.0.0.1:8000", True, False, 200)) == {"proxy.keys": FindingLevel.WARNING}
    assert levels(guarded("http://10.0.0.1:8000", True, False, 200)) == {"proxy.keys": FindingLevel.BAD}
    assert levels(guarded("http://10.0.0.1:8000", False, True, 200)) == {
        "proxy.keys": FindingLevel.OK,
        "proxy.tls": FindingLevel.WARNING,
    }


def test_an_agents_port_is_not_taken_for_a_guarded_control_plane() -> None:
    for has_key in (True, False):
        assert levels(guarded("http://127.0.0.1:8000", False, has_key, 404)) == {"proxy.control": FindingLevel.BAD}


def test_clocks_are_judged_by_what_is_known_of_them() -> None:
    assert clock("c", 2.9, 1.0).level is FindingLevel.OK
    assert clock("c", -3.5, 1.0).level is FindingLevel.BAD


def test_redis_old_following_full_or_failing() -> None:
    assert levels(judge({"redis_version": "6.2.1"}, SOUND, None))["redis.version"] is FindingLevel.BAD
    assert levels(judge({"redis_version": "7.0", "role": "slave"}, SOUND, None))["redis.role"] is FindingLevel.BAD
    assert (
        levels(judge({"redis_version": "7.0", "aof_last_write_status": "err"}, SOUND, None))["redis.disk"]
        is FindingLevel.BAD
    )
    assert (
        levels(judge({"redis_version": "7.0"}, SOUND, {"cluster_state": "fail"}))["redis.cluster"] is FindingLevel.BAD
    )


REPLICA = {"ip": "h", "port": 1, "state": "online", "offset": 90, "lag": 1}
STALLED = REPLICA | {"lag": 9, "offset": 10}


@pytest.mark.parametrize(
    ("replicas", "waited", "level", "said"),
    [
        ([], 0, FindingLevel.OK, "no replica"),
        ([], 1, FindingLevel.BAD, "waits for 1 replicas, but 0 follow"),
        ([REPLICA], 0, FindingLevel.WARNING, "does not wait for 1 replicas"),
        ([REPLICA], None, FindingLevel.WARNING, "may not wait (it does not say) for 1 replicas"),
        ([REPLICA], 1, FindingLevel.OK, "loses no turn that an agent has received"),
        ([REPLICA, STALLED], 1, FindingLevel.OK, "1 follow"),
        ([REPLICA, STALLED], 2, FindingLevel.BAD, "stalled: h:1"),
        ([STALLED], 0, FindingLevel.BAD, "90 bytes behind"),
        ([REPLICA | {"state": "wait_bgsave"}], 1, FindingLevel.BAD, "0 follow"),
    ],
)
def test_what_a_failover_keeps(
    replicas: list[dict[str, Any]], waited: int | None, level: FindingLevel, said: str
) -> None:
    info = {f"slave{number}": facts for number, facts in enumerate(replicas)} | {"master_repl_offset": 100}
    found = failover(info, waited)
    assert found.level is level and said in found.message, found


@pytest.mark.parametrize(
    ("settings", "replicas", "level", "said"),
    [
        ({"appendonly": "yes", "appendfsync": "always"}, 0, FindingLevel.OK, "a restart or a power cut loses no turn"),
        ({"appendonly": "yes", "appendfsync": "everysec"}, 0, FindingLevel.WARNING, "up to 2 s"),
        ({"appendonly": "yes", "appendfsync": "no"}, 0, FindingLevel.BAD, "kernel"),
        ({"appendonly": "no", "save": "3600 1"}, 0, FindingLevel.BAD, "all writes after the last snapshot"),
        ({"appendonly": "no", "save": ""}, 1, FindingLevel.BAD, "all data, and its replicas delete the same"),
    ],
)
def test_what_a_restart_keeps(settings: dict[str, str], replicas: int, level: FindingLevel, said: str) -> None:
    found = restart(settings, {"connected_slaves": replicas})
    assert found.level is level and said in found.message, found


def test_what_should_be_nothing_and_is_not() -> None:
    text = (
        '# TYPE steno_proxy_unrecorded_tokens_total counter\nsteno_proxy_unrecorded_tokens_total{reason="store"} 7.0\n'
    )
    found = levels(judge_metrics(text))
    assert found == {"proxy.unrecorded_tokens": FindingLevel.WARNING, "proxy.store_errors": FindingLevel.OK}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert levels(check_folder(tmp_path / "none")) == {"disk": FindingLevel.BAD}


def test_a_folder_that_one_may_not_look_at_is_a_finding_among_the_others(tmp_path: Path) -> None:
    def work() -> None:
        Path("trainers/checkpoints").mkdir(parents=True)
        Path("trainers").chmod(0)
        [finding] = check_folder(Path("trainers/checkpoints"))
        assert (finding.level, finding.message) == (FindingLevel.BAD, "trainers/checkpoints: Permission denied")

    as_nobody(work, tmp_path)

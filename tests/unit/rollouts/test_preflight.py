"""What is looked at before the first group, on this machine: where trials' folders are, and whether a trial can begin."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from steno.contracts.errors import ConfigError, Unreachable
from steno_cli.commands.rollout import roll_out
from steno_rollouts import preflight
from steno_rollouts.build import Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.preflight import check_command, check_sampling
from steno_rollouts.trials.harbor.pointing import POINTINGS
from tests.support.programs.ports import free_port


def prepared(tasks: Path, work_dir: Path) -> Prepared:
    return Prepared.of(RolloutSettings(tasks=tasks, work_dir=work_dir, command=["true"], confine="off"), "r")


def test_each_user_of_a_machine_has_a_folder_of_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = set()
    for user in (0, 1000, 1001):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        folders.add(RolloutSettings(tasks=Path("tasks")).work_dir)
    assert {folder.name for folder in folders} == {"steno-rollouts-0", "steno-rollouts-1000", "steno-rollouts-1001"}


@pytest.mark.parametrize("work_dir", ["rows.jsonl/work", "/proc"])
async def test_a_work_dir_that_can_not_be_written_is_named(
    work_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError) as caught:
        await check_command(prepared(tmp_path / "rows.jsonl", Path(work_dir)))
    assert caught.value.field == "work_dir"
    assert caught.value.message.startswith(
        f"work_dir: got '{tmp_path / work_dir}', must be a folder that this user can write to: "
    )


async def test_a_work_dir_that_is_not_there_is_made_and_left_empty(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    await check_command(prepared(tmp_path / "rows.jsonl", tmp_path / "a" / "b"))
    assert list((tmp_path / "a" / "b").iterdir()) == []


async def test_a_file_of_a_task_that_can_not_be_copied_is_named(tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.mkdir()
    (task / "task.toml").touch()
    (task / "instruction.md").touch()
    os.mkfifo(task / "pipe")
    with pytest.raises(ConfigError, match=r"command: a trial can't be started here: .*pipe"):
        await check_command(prepared(task, tmp_path / "work"))


@pytest.mark.parametrize("brought", [{"verifiers": None}, {"harbor": "terminus-2"}])
async def test_where_the_model_is_asked_from_here_its_address_is(
    brought: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the control plane's, which is what --proxy names where that has a port of its own."""
    url = f"http://127.0.0.1:{free_port()}"

    async def public_url(_: str) -> str:
        return url

    monkeypatch.setattr(preflight, "public_url", public_url)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    plans = {kind: SimpleNamespace(pointing=POINTINGS.get(name)) for kind, name in brought.items()}
    found = replace(prepared(tmp_path / "rows.jsonl", tmp_path / "work"), **cast(Any, plans))
    with pytest.raises(Unreachable) as caught:
        await check_command(found)
    assert caught.value.message.startswith(f"the proxy can't be reached: GET {url}/healthz failed: ")
    assert caught.value.message.endswith("set the proxy's --public-url to an address that it reaches")


@pytest.mark.parametrize("late", [httpx.ReadTimeout, httpx.ConnectTimeout])
async def test_a_first_answer_that_is_late_is_not_the_end(
    late: type[httpx.TimeoutException], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if len(asked) < 3:
            raise late("", request=request)
        return httpx.Response(200)

    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(answer)))
    await preflight.check_reach("http://proxy:8080")
    assert asked == ["/healthz"] * 3
    asked.clear()
    with pytest.raises(Unreachable, match=rf"GET http://proxy:8080/healthz failed: {late.__name__}\. "):
        await preflight.check_reach("http://proxy:8080", patience_s=0.0)
    assert asked == ["/healthz"]


HERE = {"url": "/"}


@pytest.mark.parametrize(
    ("proxy", "named", "url"),
    [
        ("http://proxy:8081/", [HERE], "http://proxy:8081"),
        ("http://proxy:8081", [HERE, {"url": "https://steno.example/rl/"}], "https://steno.example/rl"),
        ("http://proxy:8081", [HERE, {"url": "//{host}:8080"}], "http://proxy:8080"),
        ("https://[::1]:8081", [HERE, {"url": "//{host}:8080"}], "https://[::1]:8080"),
    ],
)
async def test_where_agents_reach_the_proxy_is_what_it_says_of_it(
    proxy: str, named: list[dict[str, str]], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = httpx.MockTransport(lambda request: httpx.Response(200, json={"servers": named}))
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=answers))
    assert await preflight.public_url(proxy) == url


async def test_a_proxy_that_does_not_say_where_agents_reach_it_is_not_looked_at_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own address may be reached where trials' is not: then the first trial would find out, or nobody."""

    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("", request=request)

    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(silent)))
    with pytest.raises(Unreachable, match=r"GET http://proxy:8081/openapi\.json: ReadTimeout"):
        await preflight.public_url("http://proxy:8081")


BENT: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_p": 0.95},
    {"top_p": 0.5},
    {"temperature": 0},
    {"logit_bias": {"7": 1.0}},
]


@pytest.mark.parametrize("sampling", BENT)
def test_sampling_that_can_not_be_trained_is_refused_unless_nothing_is_to_be_trained(sampling: dict[str, Any]) -> None:
    bent = list(sampling)[-1]
    with pytest.raises(ConfigError) as caught:
        check_sampling(RolloutSettings(tasks=Path("tasks"), sampling=sampling))
    assert caught.value.field == "sampling"
    assert caught.value.message.startswith(f"sampling: {bent}: got {sampling[bent]!r}: ")
    check_sampling(RolloutSettings(tasks=Path("tasks"), sampling=sampling, purpose="eval"))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 1.0, "max_tokens": 9}, {"temperatur": 1}])
def test_plain_sampling_is_taken_and_unknown_fields_are_the_proxys(sampling: dict[str, Any]) -> None:
    check_sampling(RolloutSettings(tasks=Path("tasks"), sampling=sampling))


@pytest.mark.parametrize(("given", "told"), [({}, True), ({"group_size": 2}, False), ({"purpose": "eval"}, False)])
async def test_groups_of_one_trial_that_are_to_be_trained_are_warned_of(
    given: dict[str, Any],
    told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def nobody(*_: object) -> None:
        raise Unreachable("no proxy")

    monkeypatch.setattr(preflight, "check_proxy", nobody)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    wanted = {"tasks": tmp_path / "rows.jsonl", "command": ["true"], "confine": "off", "group_size": 1, **given}
    with pytest.raises(Unreachable):
        await roll_out(RolloutSettings(**wanted, work_dir=tmp_path), "r")
    assert ("warning: group_size: got 1, must be at least 2 for training" in capsys.readouterr().err) is told

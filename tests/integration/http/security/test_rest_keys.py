"""Who may call what of the control plane, by its key (I8)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from steno.client.client import AsyncClient
from steno.contracts.errors import BadRequest, Conflict, Forbidden
from steno.contracts.rest import Completion, GroupSpec
from steno.contracts.runs.claims import ClaimRequest
from tests.integration.http.conftest import running

ADMIN = "the-admins-key"


async def test_an_agents_key_opens_its_own_generation_routes_and_nothing_else() -> None:
    """I8."""
    async with running(admin_key=ADMIN) as proxy:
        group = await proxy.steno.create_group(GroupSpec(group_id="g", size=2))
        mine, other = group.trials
        assert mine.api_key and other.api_key and mine.api_key != other.api_key
        body = {"messages": [{"role": "user", "content": "x"}]}
        async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as http:

            async def status(method: str, path: str, key: str | None, **json_body: Any) -> int:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                return (await http.request(method, path, headers=headers, json=json_body or None)).status_code

            chat = "/v1/chat/completions"
            assert await status("POST", f"/g.0{chat}", mine.api_key, **body) == 200
            assert await status("POST", f"/g.1{chat}", mine.api_key, **body) == 403
            assert await status("POST", f"/g.0{chat}", None, **body) == 401
            assert await status("POST", f"/g.0{chat}", ADMIN, **body) == 403
            assert await status("GET", "/g.0/v1/models", mine.api_key) == 200
            assert await status("GET", "/g.1/v1/models", mine.api_key) == 403
            for method, path in [
                ("GET", "/sessions"), ("GET", "/sessions/g.0"), ("GET", "/sessions/g.0/turns"), ("GET", "/sessions/none"),
                ("GET", "/sessions/g.0/samples"), ("GET", "/sessions/g.0/events"), ("POST", "/sessions/g.0/complete"),
                ("POST", "/sessions/g.0/task-step"), ("POST", "/groups/g/claims"), ("POST", "/groups/none/claims"),
                ("DELETE", "/sessions/g.0"), ("POST", "/sessions"), ("POST", "/sessions/new"), ("POST", "/groups"),
                ("GET", "/groups/g"), ("GET", "/workers"), ("GET", "/policy"), ("GET", "/metrics"),
            ]:  # fmt: skip
                assert await status(method, path, mine.api_key, reward=1.0, size=1) in (403, 400), (method, path)
                assert await status(method, path, None, reward=1.0, size=1) in (401, 400), (method, path)
            assert await status("POST", "/sessions/g.0/task-step", mine.api_key, name="mine") == 403
            claim = {"launcher": "agent", "trial_ids": ["g.0"]}
            assert await status("POST", "/groups/g/claims", mine.api_key, **claim) == 403
            session = await proxy.steno.session("g.0")
            assert session.status == "open" and session.reward is None and session.task_step is None


async def test_a_harness_key_reads_and_completes_its_groups_trials_only() -> None:
    async with running(admin_key=ADMIN, worker=False) as proxy:
        group = await proxy.steno.create_group(GroupSpec(group_id="g", size=2))
        await proxy.steno.create_group(GroupSpec(group_id="h", size=1))
        await proxy.steno.register("alone")
        headers = {"x-api-key": group.harness_key or ""}
        async with httpx.AsyncClient(base_url=proxy.url, headers=headers, timeout=60) as http:
            assert (await http.get("/groups/g")).status_code == 200
            assert (await http.get("/sessions/g.0")).status_code == 200
            assert (await http.post("/sessions/g.0/task-step", json={"name": "one"})).json()["task_step"] == "one"
            assert (await http.post("/sessions/g.0/complete", json={"reward": 1})).status_code == 200
            assert (await http.post("/sessions/g.0/task-step", json={"name": "two"})).status_code == 410
            assert (await http.post("/sessions/h.0/task-step", json={"name": "two"})).status_code == 403
            for path in ("/groups/h", "/sessions/h.0", "/sessions/alone", "/sessions/none", "/sessions"):
                assert (await http.get(path)).status_code == 403, path
            assert (await http.delete("/sessions/g.0")).status_code == 403
            await proxy.steno.delete("g.0")
            for path, status in (("/sessions/g.0", 410), ("/sessions/g.2", 403), ("/sessions/h.0", 403)):
                assert (await http.get(path)).status_code == status, (
                    "of its own trials it is told that they were deleted"
                )


async def test_a_runs_key_makes_its_groups_reads_and_completes_its_trials_and_opens_nothing_else() -> None:
    async with running(admin_key=ADMIN, worker=False) as proxy:
        key = await proxy.steno.run_key("mine/1")
        assert key is not None and key == await proxy.steno.run_key("mine/1") != await proxy.steno.run_key("other")
        await proxy.steno.create_group(GroupSpec(group_id="theirs", run_id="other", size=1))
        await proxy.steno.create_group(GroupSpec(group_id="nobodys", size=1))
        await proxy.steno.register("alone")
        async with AsyncClient(proxy.url, key, retries=0) as steno:
            made = await steno.create_group(GroupSpec(group_id="g", run_id="mine/1", size=2))
            assert made == await steno.create_group(GroupSpec(group_id="g", run_id="mine/1", size=2))
            assert (await steno.group("g")).run_id == "mine/1" and (await steno.run("mine/1")).groups.running == 1
            assert (await steno.complete("g.0", Completion(reward=1.0))).reward == 1.0
            assert (await steno.rollouts_over("mine/1")).over and (await steno.run("mine/1")).rollouts_over
            assert (await steno.session("g.1")).run_id == "mine/1" and (await steno.samples("g.1")) == []
        async with httpx.AsyncClient(base_url=proxy.url, headers={"x-api-key": key}, timeout=60) as http:
            refused = [
                ("POST", "/groups", {"group_id": "theirs", "run_id": "other", "size": 1}), ("POST", "/groups", {"size": 1}),
                ("POST", "/groups", {"run_id": "mine", "size": 1}), ("GET", "/groups/theirs", None),
                ("GET", "/groups/none", None), ("GET", "/groups?run_id=mine/1", None), ("GET", "/runs", None),
                ("GET", "/runs/other", None), ("POST", "/runs/other/rollouts", {}),
                ("GET", "/sessions", None), ("GET", "/sessions/theirs.0", None),
                ("GET", "/sessions/nobodys.0", None), ("GET", "/sessions/alone", None), ("GET", "/sessions/none", None),
                ("POST", "/sessions/theirs.0/complete", {"reward": 1}), ("POST", "/sessions/mine", {"run_id": "mine/1"}),
                ("DELETE", "/sessions/g.1", None), ("POST", "/sessions/g.1/rotate-key", None), ("GET", "/policy", None),
                ("POST", "/leases", {"run_id": "mine/1", "consumer": "x"}), ("GET", "/workers", None), ("GET", "/metrics", None),
                ("POST", "/runs/mine%2F1/trainer", {"trainer": "x"}), ("POST", "/runs/mine%2F1/key", None),
                ("POST", "/g.1/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ]  # fmt: skip
            for method, path, body in refused:
                answer = await http.request(method, path, json=body)
                assert answer.status_code == 403, (method, path, answer.text)
            taken = {"group_id": "theirs", "run_id": "mine/1", "size": 1}
            answer = await http.post("/groups", json=taken)
            assert answer.status_code == 409 and "sk-" not in answer.text, "another run has the name"
        async with httpx.AsyncClient(base_url=proxy.url, headers={"x-api-key": "rk-steno-forged"}, timeout=60) as http:
            for run in ("mine/1", None):
                assert (await http.post("/groups", json={"run_id": run, "size": 1})).status_code == 403
    async with running(worker=False) as proxy:
        assert await proxy.steno.run_key("mine") is None


async def test_a_trial_that_is_taken_over_has_another_key_and_no_word_of_the_first_launcher_counts() -> None:
    async with running(admin_key=ADMIN) as proxy:
        key = await proxy.steno.run_key("mine")
        group = await proxy.steno.create_group(GroupSpec(group_id="g", run_id="mine", size=2))
        await proxy.steno.create_group(GroupSpec(group_id="h", run_id="theirs", size=1))
        async with (
            AsyncClient(proxy.url, key, retries=0) as one,
            AsyncClient(proxy.url, group.harness_key, retries=0) as two,
        ):
            both = ClaimRequest(launcher="one", trial_ids=["g.1", "g.0"])
            first = await one.claim("g", both)
            assert [(each.granted, each.epoch, each.trial.session.trial_id) for each in first] == [
                (True, 1, "g.1"), (True, 1, "g.0"),
            ]  # fmt: skip
            assert {each.trial.api_key for each in first} == {trial.api_key for trial in group.trials}
            (refused,) = await two.claim("g", ClaimRequest(launcher="two", trial_ids=["g.0"]))
            assert (refused.granted, refused.launcher, refused.epoch) == (False, "one", 1) and 50 < refused.left_s <= 60
            (taken,) = await two.claim("g", ClaimRequest(launcher="two", trial_ids=["g.0"], gone=["one"]))
            assert (taken.granted, taken.epoch) == (True, 2) and taken.trial.api_key != group.trials[0].api_key
            async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as http:
                for agent, status in ((group.trials[0].api_key, 403), (taken.trial.api_key, 200)):
                    body = {"messages": [{"role": "user", "content": "x"}]}
                    headers = {"authorization": f"Bearer {agent}"}
                    answer = await http.post("/g.0/v1/chat/completions", headers=headers, json=body)
                    assert answer.status_code == status, answer.text
            with pytest.raises(Conflict, match="got claim 1, the newest is 2") as error:
                await one.complete("g.0", Completion(reward=1.0, claim=1))
            assert error.value.field == "claim"
            assert (await two.complete("g.0", Completion(reward=0.5, claim=2))).reward == 0.5
            (over,) = await one.claim("g", ClaimRequest(launcher="one", trial_ids=["g.0"]))
            assert not over.granted and over.trial.session.status == "completed"
            with pytest.raises(BadRequest, match=r"^trial_ids: h\.0 is no trial of group g"):
                await one.claim("g", ClaimRequest(launcher="one", trial_ids=["g.1", "h.0"]))
            for group_id in ("h", "none"):
                with pytest.raises(Forbidden):
                    await one.claim(group_id, ClaimRequest(launcher="one", trial_ids=["h.0"]))
            assert (await one.claim("g", both))[0].granted, "the other one is its own as before"


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "x-goog-api-key"])
async def test_the_key_is_taken_from_each_header_that_clients_use(header: str) -> None:
    async with running(admin_key=ADMIN) as proxy:
        trial = await proxy.steno.register("t")
        value = f"Bearer {trial.api_key}" if header == "authorization" else trial.api_key
        body = {"messages": [{"role": "user", "content": "x"}]}
        async with httpx.AsyncClient(base_url=proxy.url, headers={header: value or ""}, timeout=60) as http:
            assert (await http.post("/t/v1/chat/completions", json=body)).status_code == 200


async def test_with_keys_an_unregistered_trial_is_not_made_up() -> None:
    async with running(admin_key=ADMIN) as proxy:
        response = await proxy.chat("unknown", "x")
        assert response.status_code == 404 and json.loads(response.content)["error"]["code"] == "not_found"

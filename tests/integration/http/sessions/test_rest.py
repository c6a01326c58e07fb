"""The control plane: every call of the REST table, its encodings, its one error envelope. Its keys: test_rest_keys.py."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from steno.contracts.errors import Conflict, Gone, NotFound
from steno.contracts.records import Limits, SamplingPolicy
from steno.contracts.rest import Completion, GroupSpec, SessionSpec
from steno.contracts.runs.claims import ClaimRequest
from steno_proxy.api.control.groups import CLAIMED_AT_ONCE
from steno_proxy.store.memory.store import MemoryStore
from tests.integration.http.conftest import Proxy, running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say, drawn

ADMIN = "the-admins-key"


async def test_registering_is_idempotent_and_gives_urls_for_each_kind_of_client(proxy: Proxy) -> None:
    first = await proxy.steno.register("t", SessionSpec(metadata={"a": 1}))
    again = await proxy.steno.register("t", SessionSpec(metadata={"b": 2}))
    assert again.session == first.session and first.session.metadata == {"a": 1}
    assert first.urls == {"openai": f"{proxy.url}/t/v1", "anthropic": f"{proxy.url}/t", "gemini": f"{proxy.url}/t"}
    assert first.api_key is None


@pytest.mark.parametrize(
    ("public_url", "openai"),
    [
        ("https://steno.example", "https://steno.example/t/v1"),
        ("https://steno.example:8443/", "https://steno.example:8443/t/v1"),
        ("http://gateway/rl/steno", "http://gateway/rl/steno/t/v1"),
    ],
)
async def test_urls_come_from_the_public_url(public_url: str, openai: str) -> None:
    async with running(worker=False, public_url=public_url) as proxy:
        assert (await proxy.steno.register("t")).urls["openai"] == openai


async def test_a_path_prefix_is_served_with_and_without_it() -> None:
    async with running(public_url="https://gateway/rl/steno") as proxy:
        for path in ("/rl/steno/t", "/t"):
            body = {"messages": [{"role": "user", "content": "x"}]}
            assert (await proxy.http.post(f"{path}/v1/chat/completions", json=body)).status_code == 200
        assert (await proxy.http.get("/rl/steno/sessions/t")).json()["counts"]["turns"] == 2
        assert (await proxy.http.get("/rl/steno/healthz")).status_code == 200


async def test_groups_are_made_once_with_their_trials(proxy: Proxy) -> None:
    spec = GroupSpec(group_id="g", size=3, run_id="r", task={"name": "x"})
    made = await proxy.steno.create_group(spec)
    again = await proxy.steno.create_group(spec)
    assert [trial.session.trial_id for trial in made.trials] == ["g.0", "g.1", "g.2"]
    assert again.group == made.group and len(again.trials) == 3
    assert made.trials[0].session.sampling.neutralise is True
    assert await proxy.steno.group("g") == made.group
    with pytest.raises(Conflict):
        await proxy.steno.create_group(GroupSpec(group_id="g", size=4))
    evaluated = await proxy.steno.create_group(GroupSpec(size=1, purpose="eval"))
    assert evaluated.trials[0].session.sampling.neutralise is False


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.95), ("temperature", 0), ("logit_bias", {"7": 1.0})])
async def test_a_group_to_train_is_refused_where_it_forces_what_can_not_be_trained(
    proxy: Proxy, name: str, value: object
) -> None:
    body = {"size": 1, "sampling": {"force": {"max_tokens": 9, name: value}}}
    for purpose, neutralise, status in (
        (None, None, 400), ("train", None, 400), ("train", True, 400), ("train", False, 200), ("eval", None, 200),
    ):  # fmt: skip
        asked = body | ({"purpose": purpose} if purpose else {})
        asked["sampling"] = body["sampling"] | ({} if neutralise is None else {"neutralise": neutralise})
        answer = await proxy.http.post("/groups", json=asked)
        assert answer.status_code == status, (asked, answer.text)
        if status == 400:
            assert answer.json()["error"]["field"] == f"sampling.force.{name}"


async def test_listing_pages_and_filters(proxy: Proxy) -> None:
    for i in range(5):
        await proxy.steno.register(f"t{i}")
    await proxy.steno.complete("t1", Completion(reward=0.0))
    page = await proxy.steno.session_page(limit=2)
    assert len(page.items) == 2 and page.next_cursor
    assert [session.trial_id async for session in proxy.steno.sessions(limit=2)] == [f"t{i}" for i in range(5)]
    assert [session.trial_id async for session in proxy.steno.sessions(status="completed")] == ["t1"]
    assert (await proxy.http.get("/sessions", params={"cursor": "nonsense"})).status_code == 400


async def test_turns_page_and_come_as_msgpack_or_readable_json(proxy: Proxy) -> None:
    for i in range(3):
        await proxy.chat("t", f"m{i}")
    page = (await proxy.http.get("/sessions/t/turns", params={"limit": 2})).json()
    assert len(page["items"]) == 2 and page["next_start"] == 2
    assert page["items"][0]["completion_ids"] == [*map(ord, "hello"), 2]
    assert page["items"][0]["sampling_logprobs"] == drawn("t", page["items"][0]["prompt_tokens"], 6)
    raw = await proxy.http.get("/sessions/t/turns", headers={"accept": "application/msgpack"})
    assert raw.headers["content-type"] == "application/msgpack"
    assert msgspec.msgpack.decode(raw.content)["items"][0]["completion_ids"][:4] == b"h\0\0\0"
    assert len([turn async for turn in proxy.steno.turns("t")]) == 3
    assert len(await proxy.steno.samples("t")) == 3


async def test_completing_twice_the_same_changes_nothing_and_another_reward_is_a_conflict(proxy: Proxy) -> None:
    await proxy.steno.register("t")
    outcome = Completion(reward=0.0, end_reason="solved", metrics={"steps": 3})
    done = await proxy.steno.complete("t", outcome)
    assert (done.status, done.reward, done.metrics) == ("completed", 0.0, {"steps": 3})
    assert await proxy.steno.complete("t", outcome) == done
    with pytest.raises(Conflict):
        await proxy.steno.complete("t", Completion(reward=1.0))


async def test_deleting_leaves_a_tombstone(proxy: Proxy) -> None:
    await proxy.chat("t", "x")
    await proxy.steno.delete("t")
    with pytest.raises(Gone):
        await proxy.steno.session("t")
    assert (await proxy.chat("t", "x")).status_code == 410
    with pytest.raises(Gone):
        await proxy.steno.register("t")
    with pytest.raises(NotFound):
        await proxy.steno.delete("never")


async def test_deleting_stops_turns_in_flight_and_keeps_nothing() -> None:
    gate = asyncio.Event()
    async with running(ParrotEngine(lambda request: Say("ab", gates={1: gate}))) as proxy:
        chat = asyncio.create_task(proxy.chat("t", "x"))
        await until(lambda: proxy.engine.requests)
        await proxy.steno.delete("t")
        assert (await chat).status_code == 410
        with pytest.raises(Gone):
            await proxy.turns("t")


async def test_events_are_live_and_end_with_the_session(proxy: Proxy) -> None:
    await proxy.chat("t", "x")
    seen: list[Any] = []

    async def watch() -> None:
        async for cursor, event in proxy.steno.events("t"):
            seen.append((cursor, event["type"]))

    watching = asyncio.create_task(watch())
    await until(lambda: seen)
    await proxy.chat("t", "y")
    await proxy.steno.complete("t", Completion(reward=1.0))
    await asyncio.wait_for(watching, 60)
    assert [kind for _, kind in seen] == ["turn", "turn", "completed"]
    answer = await proxy.http.get("/sessions/t/events", headers={"last-event-id": seen[0][0]})
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.text.count("event: turn") == 1


async def test_events_after_what_is_no_cursor_are_a_400(proxy: Proxy) -> None:
    await proxy.chat("t", "one")
    for headers, query in (({"last-event-id": "x"}, ""), ({}, "?after=-1")):
        response = await proxy.http.get("/sessions/t/events" + query, headers=headers)
        assert (response.status_code, response.json()["error"]["field"]) == (400, "after")


async def test_operations(proxy: Proxy) -> None:
    await proxy.chat("t", "x")
    assert (await proxy.http.get("/healthz")).json()["status"] == "ok"
    assert (await proxy.http.get("/readyz")).json()["models"] == ["parrot"]
    for path in ("/healthz", "/readyz"):
        head = await proxy.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
    text = (await proxy.http.get("/metrics")).text
    assert "steno_proxy_turns_total" in text and "steno_proxy_models 1.0" in text
    [policy] = (await proxy.http.get("/policy")).json()["items"]
    assert (policy["policy"], policy["version"], [*policy["workers"]]) == ("default", None, ["base/0"])
    assert [worker.models[0].name for worker in await proxy.steno.workers()] == ["parrot"]
    document = (await proxy.http.get("/openapi.json")).json()
    assert {"/sessions", "/{trial_id}/v1/chat/completions"} <= set(document["paths"])


async def test_every_error_has_the_envelope_and_a_request_id(proxy: Proxy) -> None:
    for method, path, body, status, field in [
        ("GET", "/sessions/none", None, 404, None),
        ("GET", "/sessions/none/here", None, 404, None),
        ("PUT", "/sessions", None, 405, None),
        ("POST", "/sessions", b"{", 400, None),
        ("POST", "/sessions", b'{"sesion": 1}', 400, "sesion"),
        ("POST", "/groups", b'{"size": 0}', 400, "size"),
        ("POST", "/sessions/x", b'{"sampling": {"force": {"temperatur": 1}}}', 400, "sampling.force.temperatur"),
        ("GET", "/sessions?limit=0", None, 400, "limit"),
        ("POST", "/sessions/leases", b"{}", 400, "trial_id"),
        ("POST", "/sessions/x/complete", b'{"reward": "NaN"}', 400, "reward"),
        ("POST", "/sessions/x/complete", b'{"reward": 1e200}', 400, "reward"),
        ("POST", "/sessions/x/complete", b'{"reward": -1000001}', 400, "reward"),
        ("GET", "/sessions?group=g", None, 400, "group"),
        ("POST", "/leases?run_id=r", b'{"consumer": "c"}', 400, "run_id"),
    ]:
        response = await proxy.http.request(method, path, content=body, headers={"content-type": "application/json"})
        envelope = response.json()
        assert response.status_code == status, (path, response.text)
        assert envelope["error"]["field"] == field, (path, response.text)
        assert envelope["request_id"] == response.headers["x-request-id"]


async def test_an_error_says_what_would_be_right(proxy: Proxy) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    for method, path, headers, said in [
        (
            "POST",
            "/sessions/x/complete",
            form,
            "content-type: got application/x-www-form-urlencoded, must be application/json",
        ),
        ("GET", "/sessions?statuss=open", {}, "known are status, group_id, since, until, cursor, limit"),
        ("GET", "/sessions/x?full=1", {}, "this route takes none"),
        ("GET", "/session", {}, "/openapi.json lists the routes"),
        ("GET", "/sessions/x/turn", {}, "/openapi.json lists the routes"),
        ("GET", "/x/v1/chat/completions", {}, "use POST"),
        ("POST", "/x/v1beta/models/m:embedContent", {}, "agents' routes are generation, token counts and models"),
        ("POST", "/groups/v1/chat/completions", {}, "'groups' is not a valid trial id (or is reserved)"),
        ("GET", "/a%20b/v1/models", {}, "1 to 128 letters, digits"),
    ]:
        content = b'{"reward": 1}' if method == "POST" else None
        response = await proxy.http.request(method, path, content=content, headers=headers)
        assert said in response.json()["error"]["message"], (path, response.text)


async def test_a_trial_registered_again_keeps_its_limits_or_says_so(proxy: Proxy) -> None:
    limits, law = Limits(max_turns=2), SamplingPolicy(neutralise=True)
    await proxy.steno.register("t", SessionSpec(limits=limits, metadata={"a": 1}))
    for same in (None, SessionSpec(limits=limits), SessionSpec(metadata={"b": 2})):
        assert (await proxy.steno.register("t", same)).session.limits == limits
    for other in (SessionSpec(limits=Limits(max_turns=3)), SessionSpec(run_id="r"), SessionSpec(sampling=law)):
        with pytest.raises(Conflict) as refused:
            await proxy.steno.register("t", other)
        assert refused.value.field in other.model_fields_set


async def test_a_surprise_answers_fixed_text_and_a_request_id(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("secret words")

    monkeypatch.setattr(proxy.store, "tail", explode)
    monkeypatch.setattr(proxy.store, "session", explode)
    for response in (await proxy.chat("t", "x"), await proxy.http.get("/sessions/t")):
        assert response.status_code == 500 and "secret words" not in response.text
        assert response.headers["x-request-id"] in response.text


async def test_without_a_retention_nothing_is_deleted() -> None:
    """It was a day by default, and nothing said so."""
    async with running(worker=False, sweep_s=0.01) as proxy:
        await proxy.steno.register("t")
        await proxy.steno.complete("t", Completion())
        recording = proxy.store._recordings["t"]  # type: ignore[attr-defined]
        recording.head.ended -= 10 * 365 * 86400.0
        sweeps, expire = [], proxy.store.expire

        async def counted(**told: float) -> int:
            sweeps.append(told)
            return await expire(**told)

        proxy.store.expire = counted  # type: ignore[method-assign]
        await until(lambda: len(sweeps) > 2)
        assert (await proxy.http.get("/sessions/t")).status_code == 200


async def test_the_sweep_drops_what_is_past_its_retention() -> None:
    async with running(worker=False, retention_s=0.01, sweep_s=0.02) as proxy:
        await proxy.steno.register("kept")
        await proxy.steno.register("t")
        await proxy.steno.complete("t", Completion())
        async with asyncio.timeout(60):
            while (await proxy.http.get("/sessions/t")).status_code == 200:
                await asyncio.sleep(0.01)
        assert (await proxy.http.get("/sessions/kept")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/groups", b'{"size": 1, "task": {"x": "\\ud800"}}', "task"),
        ("/groups", b'{"size": 1, "task": {"\\ud800": 1}}', "task"),
        ("/groups", b'{"size": 1, "task": ' + b'{"a":' * 500 + b"1" + b"}" * 501, "task"),
        ("/groups", b'{"size": 1, "task": {"x": NaN}}', "task"),
        ("/groups", b'{"size": 1, "deadline_s": 1e999}', "deadline_s"),
        ("/sessions", b'{"metadata": {"a": 1%s}}' % (b"0" * 40), "metadata"),
        ("/sessions", b'{"metadata": {"a": "\\ud800"}}', "metadata"),
        ("/sessions", b'{"run_id": "\\ud800"}', "run_id"),
        ("/sessions", b'{"limits": {"max_turns": 1%s}}' % (b"0" * 40), "limits.max_turns"),
        ("/sessions", b'{"limits": {"max_idle_s": Infinity}}', "limits.max_idle_s"),
        ("/sessions/t/complete", b'{"reward": 1, "metrics": {"a": NaN}}', "metrics.a"),
        ("/sessions/t/complete", b'{"reward": 1, "metrics": {"\\ud800": 1}}', "metrics"),
        ("/sessions/t/complete", b'{"end_reason": "\\ud800"}', "end_reason"),
        ("/sessions/t/complete", b'{"end_reason": "a\\nINFO b"}', "end_reason"),
        ("/groups/g/claims", b'{"launcher": "a b", "trial_ids": ["g.0"]}', "launcher"),
        ("/groups/g/claims", b'{"launcher": "a", "trial_ids": []}', "trial_ids"),
        ("/groups/g/claims", b'{"launcher": "a", "trial_ids": ["g.0"], "ttl_s": NaN}', "ttl_s"),
        ("/sessions/t/task-step", b'{"name": ""}', "name"),
        ("/sessions/t/task-step", b'{"name": "a\\nb"}', "name"),
        ("/sessions/t/task-step", b'{"name": "\\ud800"}', "name"),
        ("/sessions/t/task-step", b'{"name": "%s"}' % (b"x" * 257), "name"),
        ("/sessions/t/task-step", b"{}", "name"),
    ],
)
async def test_what_could_not_be_read_back_is_refused_by_name(proxy: Proxy, path: str, body: bytes, field: str) -> None:
    await proxy.http.post("/sessions/t")
    await proxy.http.post("/groups", json={"group_id": "g", "size": 1})
    response = await proxy.http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["field"] or "").split("\ud800")[0].rstrip(".").startswith(field)


async def test_the_trials_of_a_claim_are_claimed_together_but_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is two round trips to Redis, and a launcher renews its claims of a group together."""
    store, under_way, most = MemoryStore(), 0, 0
    claim = store.claim

    async def noted(*which: Any, **how: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return await claim(*which, **how)

    monkeypatch.setattr(store, "claim", noted)
    async with running(store=store, worker=False) as proxy:
        made = await proxy.steno.create_group(GroupSpec(group_id="g", size=CLAIMED_AT_ONCE + 1))
        names = made.group.trial_ids
        found = await proxy.steno.claim("g", ClaimRequest(launcher="here", trial_ids=names, ttl_s=60.0))
    assert [one.trial.session.trial_id for one in found] == names and all(one.granted for one in found)
    assert most == CLAIMED_AT_ONCE

"""What a trainer tells of its steps, through the client and over HTTP: taken, read back, refused by name."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from steno.contracts.errors import BadRequest, Superseded
from steno.contracts.records import halves_to_bytes
from steno.contracts.rest import SessionSpec
from steno.contracts.runs.training_steps import PostedAnnotation, TrainingStep
from tests.integration.http.conftest import Proxy, running

ADMIN = "the-admins-key"


async def test_any_trainer_posts_its_steps_and_they_are_read_in_pages(proxy: Proxy) -> None:
    run = "team/a run"
    for number in range(1, 6):
        kept = await proxy.steno.post_step(run, TrainingStep(step=number, version=f"a/{number}", values={"loss": -0.5}))
        assert kept.at is not None
    await proxy.steno.post_step(run, TrainingStep(step=2, values={"eval/reward": 1.0}))
    page = await proxy.steno.step_page(run, limit=2)
    assert [(each.step, each.values) for each in page.items] == [
        (1, {"loss": -0.5}), (2, {"loss": -0.5, "eval/reward": 1.0}),
    ]  # fmt: skip
    assert page.next_start == 3
    rest = await proxy.steno.step_page(run, start=3)
    assert [each.step for each in rest.items] == [3, 4, 5] and rest.next_start is None
    assert (await proxy.steno.step_page("nobody")).items == []
    assert (await proxy.steno.run(run)).groups.in_hand == 0, "the run itself is still read"


async def test_a_run_id_that_would_be_read_as_the_steps_of_another_run_is_refused(proxy: Proxy) -> None:
    bodies = (("/groups", {"size": 1}), ("/sessions", {}), ("/sessions/t", {}))
    for path, body in bodies:
        answer = await proxy.http.post(path, json=body | {"run_id": "mine/steps"})
        error = answer.json()["error"]
        assert (answer.status_code, error["field"]) == (400, "run_id"), error
        assert "'mine/steps'" in error["message"] and "'/steps'" in error["message"]
    for fine in ("mine/steps/1", "steps", "mine.steps"):
        await proxy.steno.register(f"of-{fine.replace('/', '-')}", SessionSpec(run_id=fine))
        assert (await proxy.steno.run(fine)).run_id == fine


async def spoken(proxy: Proxy, trial_id: str, run_id: str = "r") -> Any:
    await proxy.steno.register(trial_id, SessionSpec(run_id=run_id))
    await proxy.chat(trial_id, "tell me", max_tokens=8)
    [turn] = await proxy.turns(trial_id, 1)
    return turn


async def test_annotations_are_read_with_the_turns_in_both_encodings(proxy: Proxy) -> None:
    turn = await spoken(proxy, "t")
    differences = halves_to_bytes([0.5] * turn.completion_tokens)
    one = PostedAnnotation(
        trial_id="t", turn_id=turn.turn_id, step=3, version="a/3", advantage=-1.0, differences=differences
    )
    gone = one.model_copy(update={"trial_id": "never"})
    taken = await proxy.steno.annotate("r", [gone, one])
    assert (taken.kept, taken.gone) == (1, ["never"])
    [page] = (await proxy.steno.turn_page("t")).items
    assert page.annotation == one.of_turn()
    body = (await proxy.http.get("/sessions/t/turns")).json()["items"][0]["annotation"]
    assert body == {
        "step": 3,
        "version": "a/3",
        "advantage": -1.0,
        "differences": base64.b64encode(differences).decode(),
    }
    again = {
        "items": [{"trial_id": "t", "turn_id": turn.turn_id, "step": 4, "differences": [None] * turn.completion_tokens}]
    }
    assert (await proxy.http.post("/runs/r/annotations", json=again)).json() == {"kept": 1, "gone": []}
    assert (await proxy.steno.turn_page("t")).items[0].annotation.step == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", ["turn", "length", "run"])
async def test_annotations_of_other_tokens_are_refused_by_name(proxy: Proxy, wrong: str) -> None:
    turn = await spoken(proxy, "t")
    differences = halves_to_bytes([0.5] * (turn.completion_tokens + (wrong == "length")))
    one = PostedAnnotation(
        trial_id="t", turn_id="0" * 12 if wrong == "turn" else turn.turn_id, step=3, differences=differences
    )
    field = {"turn": "turn_id", "length": "differences", "run": "trial_id"}[wrong]
    with pytest.raises(BadRequest, match=f"^{field}: ") as refused:
        await proxy.steno.annotate("other" if wrong == "run" else "r", [one])
    assert refused.value.field == f"items.{field}"
    assert (await proxy.steno.turn_page("t")).items[0].annotation is None


async def test_only_the_admin_posts_and_a_runs_key_reads_its_own() -> None:
    async with running(worker=False, admin_key=ADMIN) as proxy:
        await proxy.steno.post_step("mine", TrainingStep(step=1))
        key = await proxy.steno.run_key("mine")
        assert key is not None
        of_run = {"authorization": f"Bearer {key}"}
        assert (await proxy.http.get("/runs/mine/steps", headers=of_run)).json()["items"][0]["step"] == 1
        assert (await proxy.http.get("/runs/other/steps", headers=of_run)).status_code == 403
        for path, body in (("steps", {"step": 1}), ("annotations", {"items": []})):
            assert (await proxy.http.post(f"/runs/mine/{path}", json=body, headers=of_run)).status_code == 403
            nobody = {"authorization": ""}
            assert (await proxy.http.post(f"/runs/mine/{path}", json=body, headers=nobody)).status_code == 401


async def test_a_trainer_that_was_superseded_shows_nothing_any_more(proxy: Proxy) -> None:
    for name in ("first", "second"):
        await proxy.steno.take_over("r", name, force=True)
    headers = {"steno-epoch": "1"}
    for path, body in (("steps", {"step": 1}), ("annotations", {"items": []})):
        refused = await proxy.http.post(f"/runs/r/{path}", json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, Superseded.code)
    newest = {"steno-epoch": "2"}
    both = [proxy.http.post("/runs/r/steps", json={"step": 1}, headers=newest) for _ in range(2)]
    assert [answer.status_code for answer in await asyncio.gather(*both)] == [200, 200]

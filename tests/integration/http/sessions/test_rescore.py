"""`steno rescore` of a recorded run: other rewards for the same tokens, in a run of its own; the recorded one stays as it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from steno.client.client import AsyncClient
from steno.contracts.errors import ArchiveUnreadable, BadRequest, Conflict, Forbidden, NotFound
from steno.contracts.records import Turn
from steno.contracts.rest import Completion, GroupSpec
from steno.contracts.runs.leases import LeaseRequest
from steno_cli.main import app
from steno_proxy.store.interface import SessionListPage
from steno_trainer.data.advantages import Estimator
from steno_trainer.data.lease_feed import LeaseFeed
from steno_trainer.data.overlong import Overlong
from steno_trainer.data.rows import TrainingTerms
from steno_trainer.data.staleness import FIRST, PolicyVersion, VersionHistory
from steno_trainer.step.assemble import assemble
from tests.integration.http.conftest import Proxy, running
from tests.support.machine.redis_server import RedisServer
from tests.support.waiting import until

ADMIN = "the-admins-key"
FUNCTIONS = """
import os

def other_way(task, transcript, trial_id):
    assert transcript.session.trial_id == trial_id and task["question"] == "q"
    reward = transcript.session.reward
    return {"reward": -1.0 if reward is None else -float(reward), "turns": len(transcript.turns)}

async def withheld(task, **rest):
    assert sorted(rest) == ["transcript", "trial_id"]
    return float(task["_answer"]) * len(rest["transcript"].last_reply)

def afterwards(transcript, workdir, stdout, exit_code):
    return 1.0

def may_do_without(transcript, workdir=None):
    return None if transcript.session.trial_id.endswith(".0") else 1.0

def ranked(task, group_id, trials):
    assert (group_id, task["_answer"]) == ("g", 3) and [one.reward for one in trials] == [0.0, 1.0, None]
    assert all(len(one.transcript.turns) == 2 for one in trials)
    return {one.trial_id: {"reward": 2.0 - place, "place": place} for place, one in enumerate(trials)}

def one_too_few(trials):
    return [0.0] * (len(trials) - 1)

def with_folders(trials, task_folder):
    return [0.0] * len(trials)

def breaks(trial_id):
    if os.environ.get("STENO_TEST_MENDED"):
        return 1.0
    if trial_id.endswith(".1"):
        raise ValueError("no such file")
    return float("nan")
"""
TASK = {"task_id": "a", "question": "q"}


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Proxy]:
    async with running(admin_key=ADMIN) as found:
        await recorded(found, tmp_path)
        yield found


async def recorded(proxy: Proxy, folder: Path) -> None:
    """A run `r` of a group `g` of trials worth 0 and 1, one without a reward, one that was given up; groups of evaluation, of
    failures only, and one that runs."""
    (folder / "score.py").write_text(FUNCTIONS)
    groups = [("g", 4, "train"), ("e", 1, "eval"), ("f", 1, "train"), ("runs", 2, "train")]
    for name, size, purpose in groups:
        spec = GroupSpec(group_id=name, run_id="r", size=size, task=TASK, withheld={"_answer": 3}, purpose=purpose)  # type: ignore[arg-type]
        await proxy.steno.create_group(spec)
    for trial_id in ("g.0", "g.1", "g.2", "g.3", "e.0", "runs.0"):
        for text in ("hello", "and you?"):
            assert (await proxy.chat(trial_id, text)).status_code == 200
    for trial_id, reward in (("g.0", 0.0), ("g.1", 1.0), ("g.2", None), ("e.0", 0.5), ("runs.0", 1.0)):
        await proxy.steno.complete(trial_id, Completion(reward=reward))
    for trial_id in ("g.3", "f.0"):
        await proxy.steno.complete(trial_id, Completion(status="aborted", end_reason="timeout"))


async def rescored(
    proxy: Proxy, folder: Path, function: str, *words: str, run: str = "r", option: str = "--reward"
) -> Result:
    command = ["rescore", "--run", run, option, f"{folder / 'score.py'}:{function}", "--proxy", proxy.url]
    key = ["--key", proxy.key] if proxy.key is not None else []
    return await asyncio.to_thread(CliRunner().invoke, app, [*command, *key, *words])


async def trials_of(proxy: Proxy, run: str) -> dict[str, str]:
    """The trials of a rescored run, by what each scores anew."""
    found = [session async for session in proxy.steno.sessions(run_id=run)]
    return {str(session.rescore_of): session.trial_id for session in found}


def of_record(turns: list[Turn]) -> list[Turn]:
    return [turn.model_copy(update={"annotation": None}) for turn in turns]


async def advantages(proxy: Proxy, run: str) -> tuple[dict[str, float], int]:
    """As a trainer computes them: leased, read, assembled; by the trial that is scored. And how many tokens it is to account for.
    The leases are given back."""
    async with (
        AsyncClient(proxy.url, proxy.key) as client,
        LeaseFeed(client, run_id=run, consumer="t", ahead=1) as feed,  # who asks for more waits 20 s for them
    ):
        groups = await feed.take(1)
    terms = TrainingTerms(VersionHistory((PolicyVersion(FIRST, 0),)), None, 1000, 2**21)
    step = assemble(groups, terms, Estimator.GRPO, Overlong())
    sessions = {session.trial_id: session for group in groups for session in group.lease.trials}
    by_origin = {sessions[name].rescore_of or name: value for name, value in step.batch.advantages.items()}
    return by_origin, step.books.total().sampled


async def test_a_reward_the_other_way_round_turns_the_trainers_advantages(proxy: Proxy, tmp_path: Path) -> None:
    before, (of_old, _) = await proxy.steno.run("r"), await advantages(proxy, "r")
    old = {name: of_record(await proxy.store.turns(name)) for name in ("g.0", "g.1", "g.2", "g.3")}
    done = await rescored(proxy, tmp_path, "other_way", "--as", "new")
    assert done.exit_code == 0, done.output
    of_new, taken = await advantages(proxy, "new")
    assert of_old["g.1"] > 0 > of_old["g.0"] and of_new["g.1"] < 0 < of_new["g.0"] and "g.2" in of_new
    for words in (
        "trials with a reward 2 3", "mean reward 0.500 -0.667", "groups whose rewards are all equal 0 0",
        "1 of 1 groups order their trials otherwise than before", "run new: 1 groups, 4 trials",
        "left out: 1 groups of purpose eval, 1 groups of which no trial was completed, 1 groups that still run",
    ):  # fmt: skip
        assert words in " ".join(done.output.split()), done.output
    trials = await trials_of(proxy, "new")
    assert set(trials) == set(old)
    for origin in ("g.0", "g.1", "g.2"):
        assert of_record(await proxy.store.turns(trials[origin])) == old[origin]
        theirs, ours = await proxy.steno.samples(origin), await proxy.steno.samples(trials[origin])
        same = {"trial_id": origin, "group_id": "g", "reward": theirs[0].reward}
        assert [sample.model_copy(update=same) for sample in ours] == theirs, "tokens, masks, versions are the record's"
        assert len(ours) == 2
    found = await proxy.steno.session(trials["g.1"])
    assert (found.reward, found.metrics, found.end_reason) == (-1.0, {"turns": 2.0}, "completed")
    given_up = await proxy.steno.session(trials["g.3"])
    assert (given_up.status, given_up.end_reason, given_up.counts.turns) == ("aborted", "timeout", 0)
    assert [(await proxy.steno.session(name)).reward for name in ("g.0", "g.1", "g.2")] == [0.0, 1.0, None]
    after, new = await proxy.steno.run("r"), await proxy.steno.run("new")
    assert after.model_copy(update={"groups": before.groups}) == before
    tokens = sum(turn.completion_tokens for origin in ("g.0", "g.1", "g.2") for turn in old[origin])
    assert (new.sampled, sum(new.borrowed.values()), new.not_trained) == ({}, tokens, {}) and taken == tokens
    assert new.rollouts_over and new.groups.ready == 1 and not after.rollouts_over


async def test_a_group_may_be_scored_together(proxy: Proxy, tmp_path: Path) -> None:
    done = await rescored(proxy, tmp_path, "ranked", "--as", "new", option="--group-reward")
    assert done.exit_code == 0 and "mean reward 0.500 1.000" in " ".join(done.output.split()), done.output
    trials = await trials_of(proxy, "new")
    found = [await proxy.steno.session(trials[name]) for name in ("g.0", "g.1", "g.2", "g.3")]
    assert [(one.reward, one.metrics.get("place")) for one in found] == [
        (2.0, 0.0),
        (1.0, 1.0),
        (0.0, 2.0),
        (None, None),
    ]
    assert (await proxy.steno.run("new")).groups.ready == 1
    failed = await rescored(proxy, tmp_path, "one_too_few", "--as", "newer", option="--group-reward")
    said = str(failed.exception)
    assert failed.exit_code != 0 and await proxy.steno.groups("newer") == []
    assert (
        "1 groups can't be scored, so nothing was made" in said
        and "g: " in said
        and "must be a list of 3 rewards" in said
    )
    refused = await rescored(proxy, tmp_path, "with_folders", "--as", "newer", option="--group-reward")
    assert "asks for task_folder; of a recorded group there are task, group_id, trials" in str(refused.exception)
    both = await rescored(proxy, tmp_path, "ranked", "--group-reward", "score.py:ranked")
    assert "give one function: --reward or --group-reward" in str(both.exception)


async def test_what_was_made_is_not_made_again_and_counts(proxy: Proxy, tmp_path: Path) -> None:
    assert (await rescored(proxy, tmp_path, "other_way", "--as", "new")).exit_code == 0
    made, before = await proxy.steno.groups("new"), await proxy.steno.run("new")
    await proxy.steno.delete("f.0")
    again = await rescored(proxy, tmp_path, "other_way", "--as", "new")
    said = " ".join(again.output.split())
    assert "1 groups that were deleted, or are too old to be listed" in said
    assert again.exit_code == 0 and "run new: 1 groups (1 were there already), 4 trials" in said
    assert "mean reward 0.500 -0.667" in said and "1 of 1 groups order" in said
    assert await proxy.steno.groups("new") == made and await proxy.steno.run("new") == before


async def test_a_group_that_was_half_made_is_finished(proxy: Proxy, tmp_path: Path) -> None:
    from steno_rollouts.rescoring import Rescoring
    from steno_rollouts.trials.reward import RewardFunction

    function = RewardFunction(f"{tmp_path / 'score.py'}:other_way")

    class Killed(Exception):
        pass

    asked: list[str] = []

    class Dying(AsyncClient):
        left = 2

        async def _send(self, request):  # type: ignore[no-untyped-def]
            asked.append(request.path)
            if request.path.endswith("/complete"):
                if not self.left:
                    raise Killed
                self.left -= 1
            return await super()._send(request)

    async with Dying(proxy.url, proxy.key) as client:
        with pytest.raises(Killed):
            await Rescoring(client, "r", "new", function).run()
    half = await proxy.steno.run("new")
    assert (half.groups.running, half.groups.ready, half.rollouts_over) == (1, 0, False), "a trainer gets nothing of it"
    asked.clear()
    async with Dying(proxy.url, proxy.key) as client:
        client.left = 3
        rest = Rescoring(client, "r", "new", function)
        await rest.run()
    assert [path for path in asked if path.endswith("/turns")] == ["/sessions/g.2/turns"] and (
        rest.scored,
        rest.made,
    ) == (1, 1), "the others have their rewards"
    whole = await proxy.steno.run("new")
    assert (whole.groups.running, whole.groups.ready, whole.rollouts_over) == (0, 1, True)
    tokens = [turn.completion_tokens for name in ("g.0", "g.1", "g.2") for turn in await proxy.store.turns(name)]
    assert sum(whole.borrowed.values()) == sum(tokens)


async def test_where_a_trial_can_not_be_scored_it_is_named_and_nothing_is_made(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await rescored(proxy, tmp_path, "breaks", "--as", "new")
    assert done.exit_code != 0 and await proxy.steno.groups("new") == []
    said = str(done.exception)
    assert "3 trials can't be scored, so nothing was made" in said
    assert "g.1: " in said and "breaks raised ValueError: no such file" in said
    assert "g.0: " in said and "reward: got nan, must be a finite number" in said
    monkeypatch.setenv("STENO_TEST_MENDED", "1")
    assert (await rescored(proxy, tmp_path, "breaks", "--as", "new")).exit_code == 0
    assert (await proxy.steno.run("new")).groups.ready == 1


async def test_what_is_not_on_record_can_not_be_asked_for(proxy: Proxy, tmp_path: Path) -> None:
    done = await rescored(proxy, tmp_path, "afterwards", "--as", "new")
    assert done.exit_code != 0 and await proxy.steno.groups("new") == []
    said = "afterwards asks for workdir, stdout, exit_code; of a recorded trial there are task, trial_id, transcript"
    assert said in str(done.exception)
    assert (await rescored(proxy, tmp_path, "may_do_without", "--as", "new")).exit_code == 0
    view = await proxy.steno.run("new")
    assert sum(view.not_trained["unscored"].values()) > 0, "None is no reward"


async def test_trials_that_the_archive_can_not_give_now_are_not_left_out(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [session async for session in proxy.steno.sessions(group_id="g")]

    async def list_sessions(**query: Any) -> SessionListPage:
        return SessionListPage([one for one in sessions if one.trial_id != "g.1"], None, ["g.1"])

    monkeypatch.setattr(proxy.store, "list_sessions", list_sessions)
    with pytest.raises(ArchiveUnreadable, match=r"can't be read now: g\.1; each says why"):
        await proxy.steno.create_group(GroupSpec(group_id="h", run_id="s", size=4, rescore_of="g"))


async def test_a_run_of_another_function_is_not_mixed_with_this_one(proxy: Proxy, tmp_path: Path) -> None:
    assert (await rescored(proxy, tmp_path, "may_do_without", "--as", "new")).exit_code == 0
    done = await rescored(proxy, tmp_path, "other_way", "--as", "new")
    said = str(done.exception)
    assert "run new has groups, such as " in said and "score.py:other_way did not score" in said
    first = await rescored(proxy, tmp_path, "other_way")
    (tmp_path / "score.py").write_text(FUNCTIONS.replace("-1.0", "-2.0"))
    second = await rescored(proxy, tmp_path, "other_way")
    names = {
        " ".join(done.output.split()).rpartition("run r-rescored-")[2].partition(":")[0] for done in (first, second)
    }
    assert len(names) == 2 and all(len(name) == 8 for name in names), "another function, another run"


async def test_withheld_fields_are_on_record_and_no_agent_reads_them(proxy: Proxy, tmp_path: Path) -> None:
    done = await rescored(proxy, tmp_path, "withheld", "--as", "new")
    assert done.exit_code == 0, done.output
    trials = await trials_of(proxy, "new")
    said = (await proxy.store.turns("g.0"))[-1].reply["content"]
    assert (await proxy.steno.session(trials["g.0"])).reward == 3.0 * len(said) > 0
    for trial_id in ("g.0", "runs.1", trials["g.0"]):
        headers = {"authorization": f"Bearer {proxy.agent_key(trial_id)}"}
        for path in ("/groups/g", "/groups?run_id=r", "/sessions/g.0", f"/groups/{trials['g.0'][:-2]}"):
            answer = await proxy.http.get(path, headers=headers)
            assert answer.status_code == 403 and "_answer" not in answer.text


async def test_where_there_are_no_keys_nothing_is_withheld_on_record_and_tasks_bring_it(tmp_path: Path) -> None:
    async with running() as proxy:
        await recorded(proxy, tmp_path)
        assert (await proxy.steno.group("g")).withheld == {}
        none = await rescored(proxy, tmp_path, "withheld", "--as", "new")
        assert str(none.exception).count("raised KeyError: '_answer'") == 3
        tasks = tmp_path / "tasks.jsonl"
        for task, words, said in [
            ({"task_id": "b"}, [], "no task 'a', which group g was made of"),
            ({**TASK, "question": "z"}, [], "task 'a' differs from the one on record of group g in question"),
            ({**TASK, "answer": 1}, [], "task 'a' differs from the one on record of group g in answer"),
        ]:
            tasks.write_text(json.dumps(task))
            done = await rescored(proxy, tmp_path, "withheld", "--as", "new", "--tasks", str(tasks), *words)
            assert done.exit_code != 0 and said in str(done.exception)
        assert await proxy.steno.groups("new") == []
        tasks.write_text(json.dumps({**TASK, "_answer": 3}))
        done = await rescored(proxy, tmp_path, "withheld", "--as", "new", "--tasks", str(tasks))
        assert done.exit_code == 0, done.output
        found = await proxy.steno.session((await trials_of(proxy, "new"))["g.0"])
        assert found.reward == 3.0 * len((await proxy.store.turns("g.0"))[-1].reply["content"])
        assert (await proxy.chat(found.trial_id, "hello")).status_code == 410


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--run", "nobody"], "no group of run 'nobody' is on record"),
        (["--as", "r"], "--as: got 'r', must differ from --run"),
        (["--hide", "x"], "--hide: needs --tasks"),
    ],
)
async def test_what_can_not_be_is_refused_by_name(proxy: Proxy, tmp_path: Path, words: list[str], said: str) -> None:
    done = await rescored(proxy, tmp_path, "may_do_without", *words)
    assert done.exit_code != 0 and said in str(done.exception)


async def test_a_rescored_run_is_rescored_and_so_is_an_evaluation(proxy: Proxy, tmp_path: Path) -> None:
    assert (await rescored(proxy, tmp_path, "other_way", "--as", "one")).exit_code == 0
    done = await rescored(proxy, tmp_path, "other_way", "--as", "two", run="one")
    assert done.exit_code == 0, done.output
    assert "mean reward -0.667 0.667" in " ".join(done.output.split())
    first, second = await proxy.steno.run("one"), await proxy.steno.run("two")
    assert second.borrowed == first.borrowed
    assert (await rescored(proxy, tmp_path, "other_way", "--as", "evals", "--purpose", "eval")).exit_code == 0
    view = await proxy.steno.run("evals")
    assert view.not_trained == {"evaluation": view.borrowed} and view.eval_groups.ended == 1 and view.borrowed


async def test_the_route_takes_ended_groups_of_as_many_trials(proxy: Proxy) -> None:
    async def made(**fields: object) -> None:
        await proxy.steno.create_group(
            GroupSpec(**({"group_id": "n", "run_id": "n", "size": 4, "rescore_of": "g"} | fields))
        )  # type: ignore[arg-type]

    for fields, error, said in [
        ({"size": 3}, BadRequest, "size: got 3, must be 4, as many as group g has"),
        ({"purpose": "eval"}, BadRequest, "purpose: got eval, must be train"),
        ({"deadline_s": 5.0}, BadRequest, "deadline_s: can't be given with rescore_of"),
        ({"rescore_of": "none"}, NotFound, "rescore_of: no group none"),
        ({"rescore_of": "runs", "size": 2}, Conflict, "rescore_of: 1 trials of group runs are still open, such as runs.1"),
    ]:  # fmt: skip
        with pytest.raises(error, match=said.replace(".", r"\.")):
            await made(**fields)
    key = await proxy.steno.run_key("n")
    async with AsyncClient(proxy.url, key) as stranger:
        with pytest.raises(Forbidden):
            await stranger.create_group(GroupSpec(group_id="n", run_id="n", size=4, rescore_of="g"))
    with pytest.raises(NotFound):
        await proxy.steno.group("n")
    await made()
    await proxy.steno.delete("g.1")
    with pytest.raises(Conflict, match=r"rescore_of: trial g\.1, which n\.1 scores anew, is not on record any more"):
        await proxy.steno.complete("n.1", Completion(reward=1.0))
    await proxy.steno.complete("n.0", Completion(reward=1.0))
    for trial_id in ("g.0", "g.2", "g.3"):
        await proxy.steno.delete(trial_id)
    await made()
    assert len(await proxy.store.turns("n.0")) == 2, "it is whole by itself"
    assert (await proxy.chat("n.2", "hello")).status_code == 410
    for trial_id in ("n.1", "n.2", "n.3"):
        await proxy.steno.complete(trial_id, Completion(status="aborted"))
    [lease] = await proxy.steno.lease(LeaseRequest(run_id="n", consumer="t"))
    assert [trial.trial_id for trial in lease.trials] == ["n.0"]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


async def test_what_is_in_the_archive_is_rescored_from_there(server: RedisServer, tmp_path: Path) -> None:
    kept = {"redis_url": server.url, "archive": str(tmp_path / "archive"), "admin_key": ADMIN}
    async with running(retention_s=0.01, sweep_s=0.02, **kept) as proxy:
        await recorded(proxy, tmp_path)
        [lease] = await proxy.steno.lease(LeaseRequest(run_id="r", consumer="t"))
        await proxy.steno.acknowledge(lease.lease_id)
        turns = of_record(await proxy.store.turns("g.0"))
        with server.client() as client:
            await until(lambda: not client.exists("steno:{g.0}:session", "steno:{g.1}:session", "steno:{g.2}:session"))
        done = await rescored(proxy, tmp_path, "withheld", "--as", "new")
        assert done.exit_code == 0, done.output
        trials = await trials_of(proxy, "new")
        assert of_record(await proxy.store.turns(trials["g.0"])) == turns
        view = await proxy.steno.run("new")
        assert (view.groups.ready, view.sampled) == (1, {}) and view.borrowed
        shown = await asyncio.to_thread(
            CliRunner().invoke, app, ["runs", "show", "new", "--proxy", proxy.url, "--key", ADMIN]
        )
        assert "borrowed" in shown.output and "leases" in shown.output

"""The parts of the adapter for verl that know neither verl nor Ray: rows of a session, groups of a prompt, settings, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from steno.contracts.errors import ConfigError, Forbidden, NotFound, Unreachable
from steno.contracts.records import Limits, Sample, SampledRange, TokenSpan, floats_to_bytes, ids_to_bytes
from steno_adapters.verl import VERL_VERSIONS, check_versions
from steno_adapters.verl.handed_over import HandedOver
from steno_adapters.verl.prompt_groups import PromptGroups, PromptSession
from steno_adapters.verl.session_rows import SessionRows, step_of, training_rows, validation_rows
from steno_adapters.verl.settings import OF_VERL, PROXY_VARIABLE, VerlSettings
from steno_adapters.verl.task_rows import task_row
from steno_rollouts.build import NO_KEYS, Prepared
from steno_rollouts.tasks.task import Task
from steno_worker.config import dial_url

NAN = float("nan")


def sample(said: str, *, leaf: str = "t1", constrained: bool = False, version: str = "verl-a/3") -> Sample:
    """`p`: a token of the prompt, `s`: one that was sampled."""
    spans = [(i, i + 1) for i, kind in enumerate(said) if kind == "s"]
    return Sample(
        trial_id="g.0", group_id="g", leaf_id=leaf, turn_ids=[f"{leaf}-{a}" for a, _ in spans],
        token_ids=ids_to_bytes(list(range(10, 10 + len(said)))),
        loss_mask=bytes(kind == "s" and not constrained for kind in said),
        sampling_logprobs=floats_to_bytes([-float(i) if kind == "s" else NAN for i, kind in enumerate(said)]),
        spans=[TokenSpan(start=a, end=b, version=version) for a, b in spans],
        completions=[SampledRange(start=a, end=b, temperature=0.7) for a, b in spans], reward=1.0,
    )  # fmt: skip


def rows_of(samples: list[Sample], **given: Any) -> SessionRows:
    return training_rows(samples, lineage="verl-a", **given)


# -- rows ---------------------------------------------------------------------------------------------------------------------


def test_a_row_is_cut_before_its_first_sampled_token() -> None:
    [row] = rows_of([sample("pppsps")], prompt_length=8, response_length=8).rows
    assert (row.prompt_ids, row.response_ids) == ([10, 11, 12], [13, 14, 15])
    assert (row.mask, row.logprobs, row.steps) == ([1, 0, 1], [-3.0, 0.0, -5.0], (3, 3))


def test_a_longer_prompt_goes_on_in_the_response_and_nothing_is_cut_from_its_left() -> None:
    [row] = rows_of([sample("ppppss")], prompt_length=3, response_length=3).rows
    assert (row.prompt_ids, row.response_ids, row.mask) == ([10, 11, 12], [13, 14, 15], [0, 1, 1])


def test_a_rows_steps_are_those_of_its_trained_tokens_that_are_left() -> None:
    spans = [TokenSpan(start=2, end=4, version="verl-a/3"), TokenSpan(start=4, end=5, version="verl-a/9")]
    long = sample("ppsss").model_copy(update={"spans": spans})
    for prompt_length in (2, 1):  # with one token of the prompt in the response
        [whole] = rows_of([long], prompt_length=prompt_length, response_length=8).rows
        [cut] = rows_of([long], prompt_length=prompt_length, response_length=4 - prompt_length).rows
        assert (whole.trained_tokens, whole.steps) == (3, (3, 9))
        assert (cut.trained_tokens, cut.steps) == (2, (3, 3))


@pytest.mark.parametrize("main_only", [False, True])
def test_what_another_starts_weights_sampled_is_masked_and_counted(main_only: bool) -> None:
    """Two jobs at one proxy, or a job and its successor, lend it their models under one name."""
    spans = [(1, 2, "verl-b/7"), (3, 4, "verl-a/2"), (4, 5, "verl-b/8"), (5, 6, "verl-a/3")]
    both = sample("pspsss").model_copy(update={"spans": [TokenSpan(start=a, end=b, version=v) for a, b, v in spans]})
    found = rows_of(
        [both, sample("pss", leaf="b", version="verl-b/7")], prompt_length=8, response_length=8, main_only=main_only
    )
    [row] = found.rows
    assert (row.prompt_ids, row.response_ids) == ([10, 11, 12], [13, 14, 15])
    assert (row.mask, row.logprobs, row.steps) == ([1, 0, 1], [-3.0, 0.0, -5.0], (2, 3))
    assert found.untrained == ({"orphaned": 2, "other_branch": 2} if main_only else {"orphaned": 4})
    [short] = rows_of([both], prompt_length=8, response_length=2).rows
    assert (short.mask, short.steps) == ([1], (2, 2)), "its last token is cut off"
    none = rows_of([sample("pss", version="verl-b/7")], prompt_length=8, response_length=8)
    assert none.rows == [] and none.untrained == {"orphaned": 2}


def test_what_is_too_long_is_cut_off_at_the_end_and_counted() -> None:
    found = rows_of([sample("ppsss")], prompt_length=2, response_length=2)
    assert found.rows[0].mask == [1, 1] and found.untrained == {"too_long": 1}
    nothing = rows_of([sample("ppppps")], prompt_length=2, response_length=2)
    assert nothing.rows == [] and nothing.untrained == {"too_long": 1}


@pytest.mark.parametrize(
    ("said", "response_length"),
    [("ppsspppss", 4), ("ppsspp", 8)],
    ids=["cut inside a tool result", "what follows is not trained"],
)
def test_a_row_ends_at_its_last_trained_token_where_verl_puts_the_reward(said: str, response_length: int) -> None:
    """verl's GAE takes no reward from a masked token."""
    [row] = rows_of([sample(said)], prompt_length=2, response_length=response_length).rows
    assert (row.response_ids, row.mask, row.logprobs) == ([12, 13], [1, 1], [-2.0, -3.0])


def test_the_last_row_of_a_session_has_the_most_trained_tokens() -> None:
    samples = [sample("psss", leaf="a"), sample("ps", leaf="b"), sample("pss", leaf="c")]
    found = rows_of(samples, prompt_length=8, response_length=8)
    assert [row.trained_tokens for row in found.rows] == [1, 2, 3] and not found.untrained
    main = rows_of(samples, prompt_length=8, response_length=8, main_only=True)
    assert [row.trained_tokens for row in main.rows] == [3] and main.untrained == {"other_branch": 3}
    # After the cut it is another one.
    cut = rows_of([sample("pppppsss", leaf="a"), sample("pss", leaf="b")], prompt_length=3, response_length=3)
    assert [row.trained_tokens for row in cut.rows] == [1, 2]


def test_what_was_not_drawn_by_plain_temperature_sampling_is_validated_and_not_trained() -> None:
    greedy = sample("pss", constrained=True)
    found = rows_of([greedy], prompt_length=8, response_length=8)
    assert found.rows == [] and found.untrained == {"constrained": 2}
    [row] = validation_rows([sample("ps", leaf="b"), greedy], prompt_length=8, response_length=8).rows
    assert (row.prompt_ids, row.mask, row.logprobs) == ([10], [1, 1], [-1.0, -2.0])
    assert validation_rows([], prompt_length=8, response_length=8).rows == []


def test_a_version_says_its_step() -> None:
    assert (step_of("verl-a/12", "verl-a"), step_of("verl-a/b", "verl-a")) == (12, None)
    assert {step_of(version, "verl-a") for version in ("base", "verl-b/12", "verl-a-b/12", "x/verl-a/12")} == {None}


# -- groups -------------------------------------------------------------------------------------------------------------------


async def test_sessions_that_come_together_are_one_group_and_a_later_one_has_its_own() -> None:
    groups, asked = PromptGroups(), list[int]()

    async def register(size: int) -> Any:
        asked.append(size)
        await asyncio.sleep(0)
        return f"group of {size}"

    (first, a), (same, b) = groups.come("u"), groups.come("u")
    other, c = groups.come("v")
    assert first is same and other is not first and (a, b, c) == (0, 1, 0)
    assert not first.is_registered
    assert await asyncio.gather(first.registered(register), first.registered(register)) == ["group of 2"] * 2
    assert first.is_registered and asked == [2]
    late, index = groups.come("u")
    assert late is not first and index == 0
    assert not groups.leave("u", first, rows=False)
    assert not groups.leave("u", first, rows=True), "one of them has rows"
    assert groups.leave("u", late, rows=False)
    again, _ = groups.come("u")
    assert again not in (first, late)
    assert groups.open == 2, "the new one, and the other prompt's"


async def test_trials_of_sessions_that_failed_before_they_played_are_known() -> None:
    group, _ = PromptGroups().come("u")
    trials = [SimpleNamespace(session=SimpleNamespace(trial_id=f"g.{i}")) for i in range(3)]

    async def register(size: int) -> Any:
        return SimpleNamespace(trials=trials)

    assert group.not_ended() == [], "none is registered"
    await group.registered(register)
    group.ended.add(1)
    assert group.not_ended() == ["g.0", "g.2"]


async def test_a_group_that_is_refused_is_refused_to_each_of_its_sessions() -> None:
    group, _ = PromptGroups().come("u")

    async def register(size: int) -> Any:
        raise Forbidden("no")

    for _ in range(2):
        with pytest.raises(Forbidden):
            await group.registered(register)
    assert group.closed and not group.is_registered


def test_a_group_says_whose_it_is_and_forces_the_law() -> None:
    group, index = PromptGroups().come("u")
    task = Task("t", {"task_id": "t", "instruction": "do"}, {"_answer": "42"})
    session = PromptSession("a/b c", group, index, task, {"temperature": 0.7}, False, 5)
    spec, again = (session.group_spec("run one", "verl-a", 2, Limits(max_turns=3), 60.0) for _ in range(2))
    assert spec.group_id != again.group_id and spec.group_id is not None and spec.group_id.startswith("run-one.a-b-c.")
    assert spec.task == {"task_id": "t", "instruction": "do", "verl": {"uid": "a/b c", "step": 5, "lineage": "verl-a"}}
    assert spec.deadline_s == 60.0, "what a killed process leaves does not wait for ever"
    assert (spec.size, spec.purpose, spec.sampling.force, spec.limits.max_turns) == (
        2,
        "train",
        {"temperature": 0.7},
        3,
    )
    evaluation = PromptSession("u", group, 0, task, {}, True).group_spec("r", "verl-a", 1, Limits(), 60.0)
    assert evaluation.purpose == "eval"


# -- groups that verl has -----------------------------------------------------------------------------------------------------


def leased(lease_id: str, task: dict[str, Any]) -> Any:
    return SimpleNamespace(lease_id=lease_id, group=SimpleNamespace(group_id=f"g-{lease_id}", task=task))


OURS = {"verl": {"uid": "u", "lineage": "verl-a"}}


class Leases:
    """A client that leases its groups once, and fails as it is told. refused: lease -> what its acknowledgement raises."""

    def __init__(self, *failures: Exception, refused: dict[str, Exception] | None = None) -> None:
        self.failures, self.done, self.refused = list(failures), list[str](), refused or {}
        self.leases = [leased("l", OURS)]

    async def lease(self, request: Any) -> list[Any]:
        if self.failures:
            raise self.failures.pop(0)
        found, self.leases = self.leases, []
        return found

    async def acknowledge(self, lease_id: str) -> None:
        self.done.append(f"acknowledged {lease_id}")
        if lease_id in self.refused:
            raise self.refused[lease_id]

    async def extend(self, lease_id: str, ttl_s: float) -> None:
        self.done.append(f"extended {lease_id}")


async def test_a_group_is_acknowledged_once_its_rows_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steno_adapters.verl.handed_over.LOOK_S", 0.001)
    client, looks = Leases(Unreachable("away")), 0

    async def unfinished(uids: Collection[str]) -> set[str]:
        nonlocal looks
        looks += 1
        return set(uids) if looks < 3 else set()

    await handed_over(client, unfinished, until="acknowledged l")
    assert client.done[0] == "extended l" and looks == 3


async def handed_over(client: Leases, unfinished: Callable[[Collection[str]], Any], until: str) -> None:
    running = asyncio.create_task(HandedOver(client, "r", "verl-a", unfinished).run())  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        while until not in client.done:
            assert not running.done(), "it goes on whatever happens"
            await asyncio.sleep(0.001)
    running.cancel()


async def test_a_lease_that_the_proxy_does_not_know_any_more_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy without Redis that was started again."""
    monkeypatch.setattr("steno_adapters.verl.handed_over.LOOK_S", 0.001)
    client = Leases(refused={"l": NotFound("no group g is leased")})
    client.leases.append(leased("next", OURS))

    async def unfinished(uids: Collection[str]) -> set[str]:
        return set()

    await handed_over(client, unfinished, until="acknowledged next")
    assert client.done.count("acknowledged l") == 1


async def test_a_failure_of_transfer_queue_is_said_and_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("steno_adapters.verl.handed_over.LOOK_S", 0.001)
    client, failures = Leases(), [RuntimeError("no controller")]

    async def unfinished(uids: Collection[str]) -> set[str]:
        if failures:
            raise failures.pop()
        return set()

    await handed_over(client, unfinished, until="acknowledged l")
    assert "RuntimeError: no controller" in caplog.text


async def test_groups_that_this_start_did_not_register_are_left_in_hand(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another start's may never have been trained, though TransferQueue knows nothing of them."""
    monkeypatch.setattr("steno_adapters.verl.handed_over.LOOK_S", 0.001)
    client = Leases()
    before = {"verl": {"uid": "v", "lineage": "verl-b"}}
    client.leases = [leased("before", before), leased("before", before), leased("other", {"task_id": "t"})]
    client.leases.append(leased("l", OURS))

    async def unfinished(uids: Collection[str]) -> set[str]:
        assert set(uids) == {"u"}
        return set()

    await handed_over(client, unfinished, until="acknowledged l")
    assert client.done == ["acknowledged l"]
    assert caplog.text.count("g-before stays in hand") == 1 == caplog.text.count("g-other stays in hand")


async def test_a_key_that_does_not_open_leases_is_said_and_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    async def unfinished(uids: Collection[str]) -> set[str]:
        raise AssertionError("nothing was leased")

    await HandedOver(Leases(Forbidden("a run's key")), "r", "verl-a", unfinished).run()  # type: ignore[arg-type]
    assert "groups stay in hand" in caplog.text


# -- settings -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "agents.yaml"
    path.write_text(yaml.safe_dump({"tasks": "/tasks", "command": ["true"], "proxy": "http://yaml", "timeout_s": 1}))
    return path


def test_the_command_line_counts_before_the_environment_and_that_before_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (found := VerlSettings.found(file, {})).proxy == "http://yaml" and found.timeout_s == 1
    monkeypatch.setenv(PROXY_VARIABLE, "https://variable")
    monkeypatch.setenv("STENO_VERL_TIMEOUT_S", "2")
    assert (found := VerlSettings.found(file, {})).proxy == "https://variable" and found.timeout_s == 2
    assert (found := VerlSettings.found(file, {"proxy": "http://line", "timeout_s": 3})).proxy == "http://line"
    assert found.timeout_s == 3
    monkeypatch.setenv("STENO_VERL_PROXY", "http://own-variable")
    assert VerlSettings.found(file, {}).proxy == "http://own-variable"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("STENO_VERL_AGENT_OPTIONS", '{"max_turns": ', "STENO_VERL_AGENT_OPTIONS: not valid JSON"),
        ("STENO_VERL_TIMEOUT", "2", "STENO_VERL_TIMEOUT: no such setting; did you mean STENO_VERL_TIMEOUT_S?"),
        ("STENO_VERL_BRANCHES", "some", "STENO_VERL_BRANCHES: Input should be 'all' or 'main'"),
        (PROXY_VARIABLE, "10.0.0.1:8000", "got '10.0.0.1:8000', must be http(s)://HOST[:PORT][/PREFIX], or nothing"),
    ],
)
def test_a_bad_variable_is_named(
    variable: str, value: str, words: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as refused:
        VerlSettings.found(file, {})
    assert words in refused.value.message


def test_what_verl_decides_is_refused_and_the_place_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"group_size: can't be given here: actor_rollout_ref.rollout.n decides it"):
        VerlSettings.found(file, {"group_size": 4})
    with pytest.raises(ConfigError, match=r"\+steno.retries: Input should be greater than or equal to 0"):
        VerlSettings.found(file, {"retries": -1})
    assert set(OF_VERL) <= set(VerlSettings.model_fields)
    file.write_text("verifiers: words\n")
    with pytest.raises(ConfigError, match="verifiers: can't be given here: with verl, trials are commands or Harbor's"):
        VerlSettings.found(file, {})
    file.write_text("tasks: .\ngroup_reward: judge.py:ranked\n")
    with pytest.raises(ConfigError, match="group_reward: can't be given here: verl wants a row's reward"):
        VerlSettings.found(file, {})
    file.write_text("tasks: .\nspare_trials: 2\n")
    with pytest.raises(ConfigError, match="spare_trials: can't be given here: verl wants a row of each trial"):
        VerlSettings.found(file, {})


@pytest.mark.parametrize("name", ["key", "worker_key"])
def test_keys_are_not_taken_from_a_command_line_that_verl_prints(name: str, file: Path, tmp_path: Path) -> None:
    words = rf"\+steno.{name}: verl prints and tracks its command line: set STENO_VERL_{name.upper()}, or give a file"
    with pytest.raises(ConfigError, match=words) as refused:
        VerlSettings.found(file, {name: "hush"})
    assert f"+steno.{name}_file" in refused.value.message and "hush" not in refused.value.message
    (tmp_path / "key").write_text("hush\n")
    found = VerlSettings.found(file, {f"{name}_file": str(tmp_path / "key")})
    assert getattr(found, name).get_secret_value() == "hush"


def test_without_a_url_there_is_no_proxy_yet_and_no_key_of_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("tasks: /tasks\n")
    assert VerlSettings.found(file, {}).proxy == ""
    monkeypatch.setenv("STENO_VERL_KEY", "secret")
    with pytest.raises(ConfigError, match="key: is of a proxy that runs already"):
        VerlSettings.found(file, {})


@pytest.mark.parametrize(("key", "keyless"), [("made-by-the-job", False), (None, True)])
def test_it_is_said_that_the_proxy_has_no_keys_only_where_the_jobs_has_none(
    key: str | None, keyless: bool, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "t"}\n')
    file.write_text(yaml.safe_dump({"tasks": str(tmp_path / "tasks.jsonl"), "command": ["true"], "confine": "off"}))
    settings = VerlSettings.found(file, {}).in_job("http://10.0.0.1:8000", key, tmp_path / "work")
    assert (settings.proxy, settings.work_dir) == ("http://10.0.0.1:8000", tmp_path / "work")
    assert (NO_KEYS in Prepared.of(settings, "r").warnings) == keyless


def test_a_url_without_a_port_means_the_schemes_own() -> None:
    assert (dial_url("http://proxy"), dial_url("https://proxy/x/")) == (
        "ws://proxy/workers/connect",
        "wss://proxy/x/workers/connect",
    )


# -- releases ------------------------------------------------------------------------------------------------------------------


def test_another_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(version: str) -> Callable[[str], str]:
        return lambda name: version if name == "verl" else "0.1.10"

    monkeypatch.setattr("steno_adapters.verl.version", known("0.10.0"))
    with pytest.raises(ImportError, match=r"verl: got 0.10.0, must be 0.9.1"):
        check_versions()
    monkeypatch.setattr("steno_adapters.verl.version", known(VERL_VERSIONS[0]))
    check_versions()


# -- rows of tasks ------------------------------------------------------------------------------------------------------------


def test_a_tasks_row_shows_its_prompt_and_nothing_hidden() -> None:
    task = Task("t", {"task_id": "t", "question": "6 * 7?"}, {"_answer": "42"})
    row = task_row(task, 3, agent_name="steno", data_source="mine")
    assert (row["prompt"], row["extra_info"]) == ([{"role": "user", "content": "6 * 7?"}], {"index": 3, "task_id": "t"})
    assert "42" not in repr(row)
    with pytest.raises(
        ConfigError, match=r"task 't' has no text to show: it has level, task_id, must have one of instruction"
    ):
        task_row(Task("t", {"task_id": "t", "level": 1}), 0, agent_name="steno", data_source="mine")

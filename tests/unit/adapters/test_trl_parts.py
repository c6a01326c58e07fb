"""The parts of the adapter for TRL that need no TRL: which rows were trained, how old versions are, which group counts what."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest

from steno.contracts.errors import BadRequest
from tests.support.sources import ROOT


def part(name: str) -> ModuleType:
    """A module of the adapter by itself: the package refuses to be imported without TRL."""
    spec = importlib.util.spec_from_file_location(f"trl_{name}", ROOT / f"adapters/steno_adapters/trl/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


RowProgress = part("row_progress").RowProgress
VersionCount = part("version_count").VersionCount
failed_groups = part("failed_groups")
grpo_advantages = part("group_rewards").grpo_advantages
unused = part("unused_settings")


def test_a_group_whose_acknowledgement_redis_forgot_is_not_trained_again() -> None:
    progress = RowProgress()
    progress.begin("a", 2, 1.0)
    for _ in range(2):
        progress.handed_over("a")
    progress.trained(2)
    progress.acknowledged("a", 1.0)
    later = RowProgress.restored(json.loads(json.dumps(progress.saved(), sort_keys=True)))
    assert later.begin("a", 2, 1.0) == 2 and later.finished == ["a"]
    later.acknowledged("a", 1.0)
    assert (later.finished, later.groups) == ([], 1)
    assert later.begin("a", 2, 5.0) == 0, "made anew: another one"


def test_no_more_acknowledged_groups_are_remembered_than_the_newest_also_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers sorts what it saves by names."""
    monkeypatch.setattr(sys.modules[RowProgress.__module__], "MOST_DONE", 3)
    progress = RowProgress(finished=["z", "m", "a", "b"])
    for made_at, name in enumerate("zma"):
        progress.acknowledged(name, float(made_at))
    later = RowProgress.restored({**json.loads(json.dumps(progress.saved(), sort_keys=True)), "finished": ["b"]})
    later.acknowledged("b", 3.0)
    assert list(later.done) == ["m", "a", "b"]


def test_a_group_is_finished_with_the_last_of_its_rows() -> None:
    progress = RowProgress()
    assert [progress.begin("a", 2, 1.0), progress.begin("b", 1, 1.0)] == [0, 0]
    assert [progress.handed_over(name) for name in "aab"] == [False, True, True]
    progress.trained(1)
    assert (progress.finished, progress.passed) == ([], {"a": 1})
    progress.trained(2)
    assert (progress.finished, progress.passed) == (["a", "b"], {})
    progress.acknowledged("a", 1.0)
    assert progress.saved() == {"finished": ["b"], "passed": {}, "begun": [], "groups": 2, "done": {"a": 1.0}}


def test_rows_that_were_dropped_are_passed_in_their_turn() -> None:
    progress = RowProgress()
    progress.begin("a", 2, 1.0), progress.begin("b", 2, 1.0)
    for name, dropped in (("a", True), ("a", False), ("b", True), ("b", False)):
        progress.handed_over(name, dropped=dropped)
    progress.trained(1)
    assert (progress.finished, progress.passed) == (["a"], {"b": 1})


def test_groups_of_which_a_row_was_trained_are_counted_over_all_starts() -> None:
    """TRL ends a run of so many epochs by them. One in the middle is counted by the start that trains its last row."""
    progress = RowProgress()
    for name, rows in (("a", 1), ("dropped", 2), ("b", 2), ("c", 2)):
        progress.begin(name, rows, 1.0)
    for name, dropped in (
        ("a", False), ("dropped", True), ("dropped", True), ("b", True), ("b", False), ("c", False), ("c", False)
    ):  # fmt: skip
        progress.handed_over(name, dropped=dropped)
    progress.trained(3)
    saved = progress.saved()
    assert (saved["groups"], saved["begun"], saved["passed"]) == (2, ["c"], {"c": 1})
    later = RowProgress.restored(json.loads(json.dumps(saved)))
    later.begin("c", 2, 1.0)
    later.handed_over("c", dropped=True)
    later.trained(0)
    assert later.groups == 3 and later.saved()["begun"] == []
    assert RowProgress.restored({"finished": ["a"]}).groups == 0, "of an earlier release"


def test_what_a_checkpoint_has_is_not_begun_again() -> None:
    progress = RowProgress.restored({"finished": ["done"], "passed": {"half": 2}})
    assert [progress.begin("done", 3, 1.0), progress.begin("half", 3, 1.0), progress.begin("new", 3, 1.0)] == [3, 2, 0]
    assert progress.handed_over("half")
    progress.trained(1)
    assert (progress.finished, progress.passed) == (["done", "half"], {})


def test_a_group_without_rows_is_finished_at_once() -> None:
    progress = RowProgress()
    assert progress.begin("empty", 0, 1.0) == 0
    assert progress.finished == ["empty"]


def test_versions_of_this_start_are_numbered_as_they_are_pushed() -> None:
    count = VersionCount([("a", 0)])
    assert [count.push(step) for step in (0, 1, 2)] == ["a/0", "a/1", "a/2"]
    assert [count.number(f"a/{step}") for step in (0, 1, 2, 3)] == [1, 2, 3, None]
    assert count.number("base/0") is None and count.number("no version") is None and count.parent is None


@pytest.mark.parametrize(("version", "number"), [("a/4", 1), ("a/3", 0), ("a/1", -2), ("a/6", -1), ("b/4", 1)])
def test_versions_of_earlier_starts_are_as_far_behind_as_their_steps(version: str, number: int) -> None:
    """a went to 6, of which b and c know 4."""
    count = VersionCount([("a", 0), ("b", 4), ("c", 4)])
    count.push(4)
    assert count.number(version) == number
    assert count.parent == "b/4"


def test_with_a_push_every_other_step_versions_are_half_as_far() -> None:
    count = VersionCount([("a", 0), ("b", 4)], every=2)
    assert [count.number(f"a/{step}") for step in (4, 2, 0)] == [1, 0, -1]


def test_advantages_are_those_of_grpo() -> None:
    found = grpo_advantages({"a": 0.0, "b": 1.0, "c": 2.0})
    assert list(found.values()) == pytest.approx([-1, 0, 1], abs=1e-5)
    assert grpo_advantages({"a": 0.5, "b": 0.5}) == {"a": 0.0, "b": 0.0}
    assert grpo_advantages({"a": 0.5}) == {"a": 0.0}


def test_too_many_failed_groups_in_a_row_are_an_error_with_their_reasons() -> None:
    groups = failed_groups.FailedGroups(3)
    groups.failed(2, [])
    groups.trainable()
    groups.failed(2, ["trial a: exit_code: no disk"])
    with pytest.raises(failed_groups.NothingToTrain, match=r"3 groups in a row .*trial a: exit_code: no disk; trial b"):
        groups.failed(1, ["trial a: exit_code: no disk", "trial b: timeout"])
    with pytest.raises(failed_groups.NothingToTrain, match="the log of the program that runs the trials says why"):
        groups.failed(1, [])


def test_groups_that_ran_when_the_first_one_failed_are_waited_for() -> None:
    """Broken tasks fail at once while good ones run for hours; what a killed launcher left fails before anything new ends."""
    groups = failed_groups.FailedGroups(3)
    groups.failed(1, [], ran=4)
    groups.failed(5, [], ran=9)
    groups.trainable()
    groups.failed(2, [], ran=0)
    with pytest.raises(failed_groups.NothingToTrain, match=r"3 groups in a row"):
        groups.failed(1, [], ran=9)
    groups = failed_groups.FailedGroups(3)
    groups.failed(6, [], ran=4)
    with pytest.raises(failed_groups.NothingToTrain, match=r"7 groups in a row"):
        groups.failed(1, [])


def test_groups_that_fail_are_waited_out_where_that_is_wanted() -> None:
    failed_groups.FailedGroups(0).failed(1000, [])


@dataclass
class Config:
    num_generations: int = 8
    max_completion_length: int = 2048
    top_k: int = 0
    min_p: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: float = 1.0


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"num_generations": 16}, {}, "num_generations: got 16, must be 8 or 4: `n` decides"),
        ({"max_completion_length": 512}, {}, "max_completion_length: got 512, must be 2048: the Limits of the trials"),
        ({"top_k": 20}, {}, "top_k: got 20, must be 0: the trials' SamplingPolicy decides"),
        ({"min_p": 0.1}, {}, "min_p: got 0.1, must be None: the trials' SamplingPolicy decides"),
        ({"chat_template_kwargs": {"thinks": False}}, {}, "chat_template_kwargs: got {'thinks': False}, must be None"),
        ({}, {"reward_funcs": [len]}, "reward_funcs: got [<built-in function len>], must be None: a trial's reward"),
        ({}, {"tools": [len]}, "tools: got [<built-in function len>], must be None: the agent has its own"),
    ],
)
def test_what_only_trls_own_rollouts_would_read_is_refused(
    changes: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    """Else a user has other lengths, numbers or rewards than the config says, without a word."""
    with pytest.raises(BadRequest) as refused:
        unused.check_unused(unused.UNUSED_BY_ASYNC, replace(Config(), **changes), options, 4)
    assert said in str(refused.value) and refused.value.field == next(iter(changes or options))


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"min_p": 0.0, "top_k": -1}, {}),
        ({"num_generations": 4, "temperature": 0.5, "chat_template_kwargs": {}}, {"callbacks": [len], "tools": []}),
        ({}, {"reward_funcs": None, "processing_class": len}),
    ],
)
def test_what_was_not_touched_or_is_read_is_not_refused(changes: dict[str, Any], options: dict[str, Any]) -> None:
    unused.check_unused(unused.UNUSED_BY_ASYNC, replace(Config(), **changes), options, 4)

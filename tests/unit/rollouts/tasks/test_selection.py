"""Which tasks are taken: the filter's grammar, and that the same tasks are drawn again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import ConfigError
from steno_rollouts.tasks.selection import Filter, TaskSelection
from steno_rollouts.tasks.task import Task

TASKS = [
    Task("django-1", {"level": 1, "metadata": {"difficulty": "easy", "tags": ["web", "sql"]}, "on": True}),
    Task("django-2", {"level": 2, "metadata": {"difficulty": "hard", "tags": ["web"]}}, {"_split": "held"}),
    Task("flask=3", {"level": 10, "metadata": {"difficulty": "hard", "tags": []}, "on": None}),
]


@pytest.mark.parametrize(
    ("filters", "taken"),
    [
        ([], [0, 1, 2]),
        (["django-*"], [0, 1]),
        (["task_id!=django-*"], [2]),
        (["task_id=flask=3"], [2]),
        (["level=1"], [0]),
        (["level=1*"], [0, 2]),
        (["metadata.difficulty=hard", "level=1", "level=2"], [1]),
        (["metadata.difficulty=[eh]a[sr][yd]", "level!=1", "level!=2"], [2]),
        (["metadata.tags=sql"], [0]),
        (["metadata.tags!=sql"], [1, 2]),
        (["on=true"], [0]),
        (["on!=true"], [1, 2]),
        (["_split=held"], [1]),
    ],
)
def test_filters_take_tasks_by_their_fields(filters: list[str], taken: list[int]) -> None:
    assert TaskSelection.of(filters).chosen(TASKS) == [TASKS[each] for each in taken]


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        (["levl=1"], "filter: none of 3 tasks has a field 'levl'"),
        (["level=4"], "filter: fits none of 3 tasks"),
        (["level=1", "django-2"], "filter: fits none of 3 tasks"),
    ],
)
def test_a_filter_that_fits_nothing_is_named(filters: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TaskSelection.of(filters).chosen(TASKS)


@pytest.mark.parametrize("text", ["", "level=", "level!="])
def test_a_filter_must_look_for_something(text: str) -> None:
    with pytest.raises(ConfigError, match=f"filter: got '{text}', must be FIELD=GLOB, FIELD!=GLOB, or GLOB"):
        Filter.of(text)


def test_a_glob_alone_may_have_a_sign_that_begins_no_field() -> None:
    assert Filter.of("3=x") == Filter("task_id", "3=x")


def test_nothing_is_read_beyond_the_limit() -> None:
    def source() -> Iterator[Task]:
        yield from TASKS[:2]
        raise AssertionError("read on")

    assert TaskSelection.of(["level=*"], limit=2).chosen(source()) == TASKS[:2]


names = st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=40)


@given(names, st.integers(1, 50), st.integers(), st.randoms())
def test_a_seed_draws_the_same_tasks_in_whatever_order_they_come(
    ids: list[str], limit: int, seed: int, chance: object
) -> None:
    tasks = [Task(name, {}) for name in ids]
    drawn = TaskSelection.of([], limit, seed).chosen(tasks)
    assert len(drawn) == min(limit, len(tasks)) and drawn == [task for task in tasks if task in drawn]
    chance.shuffle(tasks)  # type: ignore[attr-defined]
    again = TaskSelection.of([], limit, seed).chosen(tasks)
    assert {task.task_id for task in again} == {task.task_id for task in drawn}
    more = TaskSelection.of([], limit + 1, seed).chosen(tasks)
    assert {task.task_id for task in drawn} <= {task.task_id for task in more}


def test_another_seed_draws_others() -> None:
    tasks = [Task(str(number), {}) for number in range(1000)]
    first, second = (TaskSelection.of([], 10, seed).chosen(tasks) for seed in (0, 1))
    assert first != second and first != tasks[:10]

"""A refused request: the field, the value seen, the values allowed."""

from __future__ import annotations

from typing import Any

import pytest

from steno_proxy.dialects.refusals import must_be


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, "nothing"),
        (True, "true"),
        (7, "7"),
        (0.5, "0.5"),
        (10**400, "an integer of more than 300 digits"),
        ("user", "'user'"),
        ("x" * 100, repr("x" * 40)),
        ("\x1b[31m\n", r"'\x1b[31m\n'"),
        ([1], "a list"),
        ([], "a list with nothing in it"),
        ({"a": 1}, "an object"),
        ({}, "an object with nothing in it"),
    ],
)
def test_the_value_seen_is_said_in_a_few_words(value: Any, seen: str) -> None:
    error = must_be("a colour", "input.3.name", value)
    assert str(error) == f"input.3.name: got {seen}, must be a colour"
    assert error.field == "input.3.name"

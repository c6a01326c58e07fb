"""Bodies of steps and annotations: what is refused, and by which name; float16 both ways."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import pytest
from pydantic import ValidationError

from steno.contracts.records import TurnAnnotation, bytes_to_halves, halves_to_bytes
from steno.contracts.runs.training_steps import MOST_VALUES, TrainingStep


def test_differences_are_base64_in_json_and_a_list_is_read_too() -> None:
    values = [0.0, -0.12345, 65504.0, math.nan]
    raw = halves_to_bytes(values)
    assert raw == struct.pack("<4e", *values)
    one = TurnAnnotation(step=1, differences=raw)
    assert TurnAnnotation.model_validate_json(one.model_dump_json()) == one
    assert one.model_dump(mode="json")["differences"] == base64.b64encode(raw).decode()
    listed = TurnAnnotation.model_validate_json('{"step": 1, "differences": [0, -0.12345, 65504, null]}')
    assert listed.differences == raw
    assert bytes_to_halves(halves_to_bytes([1e9, -1e9])) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    ("differences", "why"),
    [("=", "not base64"), ("AAAA", "3 bytes"), (["a"], "differences"), (5, "differences"), ([[]], "differences")],
)
def test_differences_that_are_none_are_refused_by_name(differences: Any, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TurnAnnotation.model_validate({"step": 1, "differences": differences})


@pytest.mark.parametrize(
    "body",
    [
        {"step": -1}, {"step": 2**60}, {"step": "x"}, {}, {"step": 1, "values": {"loss": math.inf}},
        {"step": 1, "values": {"": 1.0}}, {"step": 1, "values": {"a" * 129: 1.0}}, {"step": 1, "values": {"loss": "much"}},
        {"step": 1, "values": {str(n): 0.0 for n in range(MOST_VALUES + 1)}}, {"step": 1, "ledger": {"sampled": -1}},
        {"step": 1, "groups": ["g"] * 4097}, {"step": 1, "version": "v" * 257}, {"step": 1, "at": math.nan},
        {"step": 1, "losses": {}}, {"step": 1, "values": {"\ud800": 1.0}},
    ],
)  # fmt: skip
def test_a_step_that_can_not_be_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainingStep.model_validate(body)

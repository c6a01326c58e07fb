"""Records as JSON and as numpy arrays: what a user expects of `model_dump_json` and `to_numpy`."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from types import ModuleType

import numpy
import pytest
from pydantic import BaseModel, ValidationError

from steno.contracts import policy, records, rest, worker_view
from steno.contracts.records import Sample, Timings, Turn, floats_to_bytes, ids_to_bytes, readable
from steno.contracts.rest import SampleList
from steno.contracts.runs import leases

TURN = Turn(
    turn_id="a",
    new_prompt_ids=ids_to_bytes([1, -2, 2**31 - 1]),
    prompt_digest=b"\x00\xff",
    completion_ids=ids_to_bytes([4, 5]),
    sampling_logprobs=floats_to_bytes([-0.5, -1.25]),
    timings=Timings(queued=1.0),
)
SAMPLE = Sample(
    trial_id="t",
    leaf_id="a",
    turn_ids=["a"],
    token_ids=ids_to_bytes([1, 2, 3]),
    loss_mask=b"\x00\x01\x01",
    sampling_logprobs=floats_to_bytes([math.nan, -0.5, -1.25]),
    spans=[],
)


def test_arrays_are_lists_in_json_and_bytes_in_python() -> None:
    shown = json.loads(TURN.model_dump_json())
    assert shown["new_prompt_ids"] == [1, -2, 2**31 - 1]
    assert shown["completion_ids"] == [4, 5]
    assert shown["sampling_logprobs"] == [-0.5, -1.25]
    assert shown["prompt_digest"] == "00ff"
    shown = json.loads(SampleList(items=[SAMPLE]).model_dump_json())["items"][0]  # nested as well
    assert shown["token_ids"] == [1, 2, 3]
    assert shown["loss_mask"] == [False, True, True]
    assert shown["sampling_logprobs"] == [None, -0.5, -1.25]
    assert readable(SAMPLE) == shown
    assert TURN.model_dump()["completion_ids"] == ids_to_bytes([4, 5])


@pytest.mark.parametrize("record", [TURN, SAMPLE], ids=["turn", "sample"])
def test_a_record_reads_its_own_json(record: BaseModel) -> None:
    assert type(record).model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize("value", [[1, "x"], [1.5], [2**31], 7, "abc", None])
def test_what_is_no_list_of_ids_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        Turn.model_validate({"turn_id": "a", "timings": {"queued": 1.0}, "completion_ids": value})


@pytest.mark.parametrize("mode", ["serialization", "validation"])
def test_the_json_schema_is_that_of_the_json(mode: str) -> None:
    fields = Sample.model_json_schema(mode=mode)["properties"]  # type: ignore[arg-type]
    assert fields["token_ids"]["items"] == {"type": "integer", "format": "int32"}
    assert fields["loss_mask"]["items"] == {"type": "boolean"}
    assert {"type": "null"} in fields["sampling_logprobs"]["items"]["anyOf"]


def models() -> list[type[BaseModel]]:
    modules: list[ModuleType] = [records, rest, leases, policy, worker_view]
    found = {kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)}
    return sorted((kind for kind in found if issubclass(kind, BaseModel) and kind is not BaseModel), key=str)


@pytest.mark.parametrize("kind", models(), ids=lambda kind: kind.__name__)
def test_no_record_has_bytes_that_json_would_show_as_text(kind: type[BaseModel]) -> None:
    text = json.dumps(kind.model_json_schema(mode="serialization"))
    assert "binary" not in text and "contentMediaType" not in text and "octet-stream" not in text


def test_arrays_as_numpy() -> None:
    ids, mask, logprobs = SAMPLE.to_numpy()
    assert (ids.dtype, mask.dtype, logprobs.dtype) == (numpy.int32, numpy.bool_, numpy.float32)
    assert ids.tolist() == [1, 2, 3] and ids[mask].tolist() == [2, 3]
    assert numpy.isnan(logprobs[~mask]).all() and logprobs[mask].tolist() == [-0.5, -1.25]
    assert not ids.flags.writeable
    assert TURN.to_numpy().new_prompt_ids.tolist() == [1, -2, 2**31 - 1]
    empty = Turn(turn_id="b", timings=Timings(queued=1.0)).to_numpy()
    assert [len(each) for each in empty] == [0, 0, 0]


def test_without_numpy_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from steno.contracts.records import Timings, Turn\n"
        "try: Turn(turn_id='b', timings=Timings(queued=1.0)).to_numpy()\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install numpy" in done.stdout

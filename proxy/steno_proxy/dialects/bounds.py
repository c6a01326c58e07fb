"""The bounds of the numbers in requests: msgspec checks them while it reads a body, and writes them into `/openapi.json`.

What is refused names the field, the value seen and the value allowed. An integer may be written as 4096.0.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from steno.contracts.errors import BadRequest

MAX_CHOICES = 64
MAX_TOKENS = 2**31 - 1
_INT64 = 2**63 - 1

Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
"""-1 and 0: all tokens."""
PlainTopK = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-3, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
MinTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Limit = Annotated[int, Meta(ge=1, le=_INT64)]
"""Of tokens or calls. One of tokens that is above MAX_TOKENS counts as MAX_TOKENS."""
Seed = Annotated[int, Meta(ge=-_INT64 - 1, le=_INT64)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
ThinkingBudget = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
"""-1: as much as the model likes."""
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]

_NUMBERS = re.compile(rb"\s*(?:\[\s*)?-?[0-9]")
_OUTSIDE = re.compile(r"Expected `(?:int|float)` (>=|>|<=) (\S+)")
_WORDS = {">=": "at least", ">": "above", "<=": "at most"}
_HOLDS = {">=": operator.ge, ">": operator.gt, "<=": operator.le}
_PLACE = re.compile(r"\$\.([^.\[]+)(?:\[(\d+|\.\.\.)\])?")


def schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema of one of the types above."""
    return msgspec.json.schema(kind)


def check(path: str, value: float, kind: Any) -> None:
    """For a number that was read by hand. Raises: BadRequest naming the field: it is outside the bounds of `kind`."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if (found := _OUTSIDE.fullmatch(str(error))) is None:  # an integer that is larger than any float
            [allowed] = [meta for meta in kind.__metadata__ if isinstance(meta, Meta)]
            lowest = f"above {allowed.gt}" if allowed.ge is None else f"at least {allowed.ge}"
            bound = f"at most {allowed.le}" if value > 0 else lowest
            raise BadRequest(f"{path}: got {number(value)}, must be {bound}", field=path) from None
        raise _refusal(path, value, found) from None


def outside(message: str, where: str, body: bytes) -> BadRequest | None:
    """The error for a body that msgspec refused because of a number. None: it refused it for another reason, or a number that
    can't be found again.

    Args:
        message, where: what msgspec says: "Expected `int` >= 1", "$.n". Its words lack the value, so that is read once more,
            in one pass that makes no objects of the other fields.
    """
    found, place = _OUTSIDE.fullmatch(message), _PLACE.fullmatch(where)
    if found is None or place is None:
        return None
    name, member = place.groups()
    given = msgspec.json.decode(msgspec.json.decode(body, type=dict[str, msgspec.Raw])[name])
    values: Iterable[tuple[str | None, Any]] = [(None, given)]
    if member == "...":  # msgspec does not say which member of an object
        values = given.items() if isinstance(given, dict) else []
    elif member is not None:
        at = int(member)
        values = [(member, value) for value in given[at : at + 1]] if isinstance(given, list) else []
    holds, limit = _HOLDS[found[1]], _limit(found)
    for key, value in values:
        if isinstance(value, (int, float)) and not holds(value, limit):
            return _refusal(name if key is None else f"{name}.{key[:40]}", value, found)
    return None  # a field that stands twice in the body: the other one was refused


def whole_numbers(body: bytes) -> bytes:
    """A JSON object whose fields that are numbers, or lists of them, have 4096 for 4096.0.

    Raises: msgspec.DecodeError, RecursionError: it is no JSON object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({name: _whole(value) for name, value in fields.items()})


def _whole(value: msgspec.Raw) -> Any:
    if not _NUMBERS.match(value):
        return value
    given = msgspec.json.decode(value)
    return [integral(one) for one in given] if isinstance(given, list) else integral(given)


def integral(value: Any) -> Any:
    """The integer that a float is; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def _refusal(path: str, value: float, found: re.Match[str]) -> BadRequest:
    said = f"{path}: got {number(value)}, must be {_WORDS[found[1]]} {number(_limit(found))}"
    return BadRequest(said, field=path)


def _limit(found: re.Match[str]) -> float:
    return float(found[2]) if "." in found[2] or "e" in found[2] else int(found[2])


def number(value: float) -> str:
    """As it stands in an error: an integer with all its digits, up to 300 of them, a float as Python writes it."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e22 else repr(value)
    return str(value) if abs(value) < 10**300 else "an integer of more than 300 digits"

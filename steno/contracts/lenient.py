"""Reading what another program of Steno wrote, maybe a later version of it: fields that this one does not know are left out,
at every level. So replicas, workers and trainers can be upgraded in any order, as long as the format or protocol is the same.

What people write is read strictly instead: a misspelt field is refused by its name.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound=msgspec.Struct)


def read(model: type[M], told: Any) -> M:
    """A record, of what its program said as objects. Raises: pydantic.ValidationError."""
    return model.model_validate(told, extra="ignore")


def read_json(model: type[M], told: str | bytes) -> M:
    """The same, of JSON."""
    return model.model_validate_json(told, extra="ignore")


def read_struct(kind: type[S], told: Any) -> S:
    """The same of a record that is a msgspec struct. Raises: msgspec.ValidationError."""
    return msgspec.convert(told, kind)

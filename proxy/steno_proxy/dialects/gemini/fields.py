"""Reading JSON as Google's APIs do: a field may be spelt `maxOutputTokens` or `max_output_tokens`, integers may come as
strings or as `64.0`, an object may stand for a list of one, null is absent, and what is not known is ignored. Each refusal names
the field by its dotted path.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, overload

from steno.contracts.errors import BadRequest
from steno_proxy.dialects import bounds
from steno_proxy.dialects.refusals import must_be, shown

_HUMP = re.compile(r"(?<!^)([A-Z])")


@lru_cache(256)
def snake(name: str) -> str:
    """`maxOutputTokens` -> `max_output_tokens`."""
    return _HUMP.sub(r"_\1", name).lower()


class Fields:
    """One JSON object of a request. `path`: where it stands, "" for the body. Every getter returns None for what is absent."""

    __slots__ = ("given", "path")

    def __init__(self, given: Any, path: str = "") -> None:
        """Raises: BadRequest: not an object."""
        if not isinstance(given, dict):
            raise BadRequest(f"{path or 'the body'}: got {shown(given)}, must be an object", field=path or None)
        self.given: dict[str, Any] = given
        self.path = path

    def get(self, name: str) -> Any:
        """The value as it came; `name` in camel case."""
        value = self.given.get(name)
        return self.given.get(snake(name)) if value is None else value

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise must_be("a string", self.at(name), value)
        return value

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise must_be("true or false", self.at(name), value)
        return value

    def number(self, name: str, kind: Any) -> float | None:
        """Args: kind: of `bounds.py`."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise must_be("a number", self.at(name), value)
        if value is not None:
            bounds.check(self.at(name), value, kind)
        return value

    def integer(self, name: str, kind: Any) -> int | None:
        """Args: kind: of `bounds.py`."""
        value = self.get(name)
        spelt = isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value)
        value = int(value) if spelt else bounds.integral(value)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise must_be("an integer", self.at(name), value)
        if value is not None:
            bounds.check(self.at(name), value, kind)
        return value

    def items(self, name: str) -> list[Any]:
        """[] for what is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise must_be("a list", self.at(name), value)
        return value or []

    def texts(self, name: str) -> list[str]:
        found = self.items(name)
        for i, value in enumerate(found):
            if not isinstance(value, str):
                raise must_be("a string", f"{self.at(name)}.{i}", value)
        return found

    def each(self, name: str) -> list[Fields]:
        """The objects of a list. An object alone is a list of one."""
        value = self.get(name)
        found = [value] if isinstance(value, dict) else self.items(name)
        return [Fields(item, f"{self.at(name)}.{i}") for i, item in enumerate(found)]

    @overload
    def sub(self, name: str) -> Fields | None: ...
    @overload
    def sub(self, name: str, default: dict[str, Any]) -> Fields: ...
    def sub(self, name: str, default: dict[str, Any] | None = None) -> Fields | None:
        value = self.get(name)
        value = default if value is None else value
        return None if value is None else Fields(value, self.at(name))

    def refuse(self, name: str, why: str) -> BadRequest:
        """The error to raise about a field: its path, and `why`."""
        return BadRequest(f"{self.at(name)}: {why}", field=self.at(name))

"""Which tasks of a source are taken. Pure: the same tasks give the same selection, which a resumed rollout needs.

A filter is `FIELD=GLOB` or `FIELD!=GLOB`, and `GLOB` alone is one on the task's name. Filters with `=` on one field are
alternatives; those on different fields, and all with `!=`, must hold together.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from steno.contracts.errors import ConfigError

_FILTER = re.compile(r"(?P<field>[A-Za-z_][\w.-]*)(?P<sign>!?=)(?P<glob>.*)", re.DOTALL)
NAME = "task_id"


class Selectable(Protocol):
    @property
    def task_id(self) -> str: ...
    def field(self, path: str) -> Any:
        """None: there is none."""


T = TypeVar("T", bound=Selectable)


@dataclass(frozen=True)
class Filter:
    """One condition. field: `metadata.difficulty` is one inside another."""

    field: str
    glob: str
    negated: bool = False

    @classmethod
    def of(cls, text: str) -> Filter:
        """Raises: ConfigError: nothing to look for."""
        found = _FILTER.fullmatch(text)
        field, sign, glob = (found["field"], found["sign"], found["glob"]) if found else (NAME, "=", text)
        if not glob:
            raise ConfigError(
                f"filter: got {text!r}, must be FIELD=GLOB, FIELD!=GLOB, or GLOB for the task's name", field="filter"
            )
        return cls(field, glob, sign == "!=")

    def holds(self, value: Any) -> bool:
        """Whether the filter holds for a field's value; None: there is none. What is no text is compared as JSON; a list matches
        if one of its items does."""
        values = value if isinstance(value, list) else [value]
        return self.negated != any(fnmatchcase(_text(each), self.glob) for each in values if each is not None)


@dataclass(frozen=True)
class TaskSelection:
    """filters: as `Filter.of` reads them. limit: at most so many; the first, or with a seed those that it draws."""

    filters: Sequence[Filter] = ()
    limit: int | None = None
    seed: int | None = None

    @classmethod
    def of(cls, filters: Iterable[str], limit: int | None = None, seed: int | None = None) -> TaskSelection:
        return cls(tuple(map(Filter.of, filters)), limit, seed)

    def takes(self, task: Selectable) -> bool:
        wanted: dict[str, bool] = {}
        for each in self.filters:
            holds = each.holds(task.field(each.field))
            if each.negated and not holds:
                return False
            if not each.negated:
                wanted[each.field] = wanted.get(each.field, False) or holds
        return all(wanted.values())

    def chosen(self, tasks: Iterable[T]) -> list[T]:
        """In the order in which they came. Nothing is read beyond the limit where no seed draws."""
        taken = self._taken(tasks)
        if self.limit is None:
            return list(taken)
        if self.seed is None:
            found = []
            for task in taken:
                found.append(task)
                if len(found) == self.limit:
                    break
            return found
        drawn = heapq.nsmallest(self.limit, enumerate(taken), key=lambda each: (self._draw(each[1]), each[0]))
        return [task for _, task in sorted(drawn, key=lambda each: each[0])]

    def _taken(self, tasks: Iterable[T]) -> Iterator[T]:
        """Raises: ConfigError: none fits."""
        known: set[str] = set()
        read, taken = 0, 0
        for task in tasks:
            read += 1
            known.update(each.field for each in self.filters if task.field(each.field) is not None)
            if self.takes(task):
                taken += 1
                yield task
        unknown = next((each.field for each in self.filters if read and each.field not in known), None)
        if unknown is not None:
            raise ConfigError(f"filter: none of {read} tasks has a field {unknown!r}", field="filter")
        if read and not taken:
            raise ConfigError(f"filter: fits none of {read} tasks", field="filter")

    def _draw(self, task: Selectable) -> bytes:
        """Of the seed and the name alone: other tasks change nothing, nor does a release of Python."""
        return blake2b(f"{self.seed}\0{task.task_id}".encode(errors="surrogatepass"), digest_size=16).digest()


def lookup(fields: Mapping[str, Any], path: str) -> Any:
    """`metadata.difficulty` in fields inside one another. None: there is none (or it is null, which says nothing either)."""
    if path in fields:
        return fields[path]
    found: Any = fields
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""Whether the arguments in a request are the sampled ones as the client's parser rewrites them, by the schema of the tool.

Clients that parse what a model says (Roo Code, Vercel's AI SDK with zod) send back what they parsed. That differs in:

    nulls       a key with null, and none
    unknown     keys that the schema does not have are gone, where it lists its properties and says nothing of others
    defaults    keys that were not sampled have the default that the schema says
    spelling    a number, true or false as a text that spells it, or the other way round

in objects and arrays within them, too. All else is another value: a text that is shorter or empty, a key of the schema that is
gone, an object of which nothing is left (agents empty arguments on purpose). Pure; linear in the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from steno.contracts.chat import Tool
from steno_proxy.sessions.messages.normalise import same_value

_SAYS_MORE = frozenset(
    ("patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
     "dependentSchemas")
)  # fmt: skip
"""Keywords of a schema by which it may know keys that are not among its `properties`."""


def schemas_of(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of each tool's arguments, by name; None for a name that two tools have, since either may be meant."""
    found: dict[str, Any] = {}
    for tool in tools:
        function = tool["function"]
        found[function["name"]] = None if function["name"] in found else function.get("parameters")
    return found


def is_as_parsed(said: dict[str, Any], given: dict[str, Any], schema: Any) -> bool:
    """Whether `said` is what a parser makes of `given`. schema: of the object; None: it is not known."""
    try:
        return _object(said, given, schema)
    except RecursionError:
        return False


def _value(said: Any, given: Any, schema: Any) -> bool:
    if isinstance(said, dict) and isinstance(given, dict):
        return _object(said, given, schema)
    if isinstance(said, list) and isinstance(given, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return len(said) == len(given) and all(_value(*pair, items) for pair in zip(said, given, strict=True))
    if isinstance(said, (dict, list)) or isinstance(given, (dict, list)):
        return False
    if type(said) is type(given) and said == given:
        return True
    if isinstance(said, str) == isinstance(given, str):
        return same_value(said, given)
    text, other = (said, given) if isinstance(said, str) else (given, said)
    return other is not None and text == msgspec.json.encode(other).decode()


def _object(said: dict[str, Any], given: dict[str, Any], schema: Any) -> bool:
    known = _properties(schema)
    left = [value for key, value in given.items() if key not in said and value is not None]
    if left and (not said or not _is_closed(schema)):
        return False
    for key, value in given.items():
        if key in said and not _value(said[key], value, known.get(key)):
            return False
        if key not in said and value is not None and key in known:
            return False
    return all(value is None or _is_default(value, known.get(key)) for key, value in said.items() if key not in given)


def _properties(schema: Any) -> Mapping[str, Any]:
    known = schema.get("properties") if isinstance(schema, dict) else None
    return known if isinstance(known, dict) else {}


def _is_closed(schema: Any) -> bool:
    """Whether a parser drops other keys: `properties` are listed, `additionalProperties` is absent or false, and no keyword of
    `_SAYS_MORE` is there."""
    if not _properties(schema) or not _SAYS_MORE.isdisjoint(schema):
        return False
    return schema.get("additionalProperties") in (None, False)


def _is_default(value: Any, schema: Any) -> bool:
    return isinstance(schema, dict) and "default" in schema and same_value(value, schema["default"])

"""What a forked trial may ask otherwise than its origin was asked, rule by rule (`records.MayDiffer`). Pure.

Texts are compared with each place that a rule finds replaced by the rule's name, so that something must stand there in both. Each
pattern reads a text once: none can take longer than in proportion to it, whatever an agent sends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from steno.contracts.chat import Message, Tool
from steno.contracts.records import MayDiffer
from steno_proxy.sessions.messages.normalise import message_digest

_MONTHS = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    "|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},?[ ]{1,3})?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:[ ]?[AaPp][Mm]\b)?(?:[ ]?(?:Z\b|UTC\b|GMT\b|[+-]\d{2}:?\d{2}\b))?"
_DATE = (
    rf"(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{4}}"
    rf"|{_DAY}{_MONTHS}\.?[ ]{{1,3}}\d{{1,2}}(?:st|nd|rd|th)?(?:,?[ ]{{1,3}}\d{{4}})?"
    rf"|{_DAY}\d{{1,2}}[ ]{_MONTHS}\.?,?[ ]\d{{4}})"
)
_IN_PATH = r"""[^\s"'`<>|;,:()\[\]{}\\]"""
_PATTERNS = {
    MayDiffer.DATES: rf"\b{_DATE}(?:[T ,]{{1,2}}{_CLOCK}(?:[ ](?:[A-Z]{{3,4}}[ ])?\d{{4}})?)?|\b{_CLOCK}",
    MayDiffer.TEMPORARY_PATHS: rf"(?<![\w./-])/(?:private/)?(?:(?:var/)?tmp|var/folders|dev/shm)(?:/{_IN_PATH}*+|\b)",
    MayDiffer.IDS: (
        r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
        r"|\b(?:call|toolu|fc|msg|resp|rs|req|chatcmpl|run|session|trial)[_-][0-9A-Za-z_-]{6,}"
        r"|(?<![0-9A-Za-z])(?=[0-9]{0,64}[a-f])(?=[a-f]{0,64}[0-9])[0-9a-f]{7,64}(?![0-9A-Za-z])"
    ),
    MayDiffer.PATHS: rf"(?<![\w./<-])/{_IN_PATH}++",
    MayDiffer.NUMBERS: r"\d++(?:\.\d++)?",
}
_ORDER = (MayDiffer.TEMPORARY_PATHS, MayDiffer.PATHS, MayDiffer.DATES, MayDiffer.IDS, MayDiffer.NUMBERS)
"""Longer things before those that may stand in them."""


class ForkComparison:
    """How requests of a forked trial are compared with those of its origin."""

    def __init__(self, rules: Iterable[MayDiffer]) -> None:
        chosen = set(rules)
        self._rules = [(re.compile(_PATTERNS[rule]), f"<{rule.value}>") for rule in _ORDER if rule in chosen]

    def text(self, text: str) -> str:
        """Return the text, with all that may differ replaced by the names of the rules."""
        for pattern, name in self._rules:
            text = pattern.sub(name, text)
        return text

    def message(self, message: Message) -> bytes:
        """Equal for messages that are the same but for what may differ."""
        return message_digest(self.without(message))

    def without(self, message: Message) -> Message:
        """The message with its texts as they are compared. A plain prompt stays as it is: its text is tokenised whole each
        time, so that another text would not go on from the same ids."""
        if not self._rules or message.get("role") == "prompt":
            return message
        found = {**message}
        content = message.get("content")
        if isinstance(content, str):
            found["content"] = self.text(content)
        elif content:
            found["content"] = [self._part(part) for part in content]
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [self._call(call) for call in calls]
        return found

    def tools(self, tools: Sequence[Tool] | None) -> bytes:
        """8 bytes. `strict` does not count: whether it is taken out is up to the trial's sampling policy."""
        kept = [_loose(tool) for tool in tools or ()]
        text = self.text(msgspec.json.encode(kept, order="sorted").decode())
        return blake2b(text.encode(), digest_size=8).digest()

    def _part(self, part: Any) -> Any:
        if isinstance(part, str):
            return self.text(part)
        return {**part, "text": self.text(part["text"])} if isinstance(part.get("text"), str) else part

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            return call
        return {**call, "function": {**function, "arguments": self.text(arguments)}}


def _loose(tool: Tool) -> Tool:
    kept = {key: value for key, value in tool.items() if value is not None and key not in ("cache_control", "strict")}
    if isinstance(function := kept.get("function"), dict):
        kept["function"] = {k: v for k, v in function.items() if v is not None and k not in ("cache_control", "strict")}
    return kept

"""What an agent of one version sent, and how it was recognised: `tests/wire/<agent>-<version>.jsonl`.

The first line names agent and version. Each other line is one of:

    {"item": N, "value": …}     a message, item or tool that requests have in common, written once
    {"request": N, …}           the Nth request of its trial, from 0 in the order of arrival; its fields are those of `Exchange`

In a request's body the lists of `LISTS` hold numbers of items. `{{turn N}}` in a string stands for the id of the turn that
answered the trial's request N, and `{{base64 …}}` for the base64 of what is in it.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LISTS = ("messages", "input", "contents", "tools", "system")
_BASE64 = re.compile(r"\{\{base64 (.*?)\}\}(?=\"|$)")
_TURN = re.compile(r"\{\{turn (\d+)\}\}")


@dataclass
class Answer:
    """The turn that a request became.

    parent: number of the request whose turn it goes on from, None at a root. calls: (name, arguments). closed: where the answer
    broke off (finish_reason `error` or `cancelled`), whether a block of it had been closed: then content, reasoning and calls are
    those that the client has whole. retry_of: number of the request whose turn this one supersedes.
    """

    parent: int | None
    fork_reason: str | None
    finish_reason: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    closed: bool = False
    retry_of: int | None = None

    @property
    def broke(self) -> bool:
        return self.finish_reason in ("error", "cancelled")


@dataclass
class Exchange:
    """One request. headers: those that mean something with their values, of others the name alone ("").

    status: of the answer. events: the kinds of events that it was streamed in, in order of their first. dropped: types of the
    items that were left out. answer: None where nothing is recorded (`models`, `count_tokens`, what was refused).
    """

    trial: str
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any] | None
    status: int
    events: list[str]
    dropped: list[str]
    answer: Answer | None


@dataclass
class Recording:
    agent: str
    version: str
    exchanges: list[Exchange]

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.agent}-{self.version}.jsonl"


def write(recording: Recording, path: Path) -> None:
    numbers: dict[str, int] = {}
    lines = [json.dumps({"agent": recording.agent, "version": recording.version})]

    def number(value: Any) -> int:
        text = json.dumps(value, ensure_ascii=False)
        if text not in numbers:
            numbers[text] = len(numbers)
            lines.append(json.dumps({"item": numbers[text], "value": value}, ensure_ascii=False))
        return numbers[text]

    counts: Counter[str] = Counter()
    for exchange in recording.exchanges:
        fields = asdict(exchange)
        for name, value in (exchange.body or {}).items():
            if name in LISTS and isinstance(value, list):
                fields["body"][name] = [number(each) for each in value]
        lines.append(json.dumps({"request": counts[exchange.trial], **fields}, ensure_ascii=False))
        counts[exchange.trial] += 1
    path.write_text("\n".join(lines) + "\n")


def read(path: Path) -> Recording:
    first, *lines = [json.loads(line) for line in path.read_text().removesuffix("\n").split("\n")]
    items = {line["item"]: line["value"] for line in lines if "item" in line}
    exchanges = []
    for line in lines:
        if line.pop("request", None) is None:
            continue
        for name, value in (line["body"] or {}).items():
            if name in LISTS and isinstance(value, list):
                line["body"][name] = [items[number] for number in value]
        if answer := line.pop("answer"):
            answer["calls"] = [(name, arguments) for name, arguments in answer["calls"]]
        exchanges.append(Exchange(**line, answer=Answer(**answer) if answer else None))
    return Recording(first["agent"], first["version"], exchanges)


def of_agent(agent: str) -> list[Path]:
    """Its fixtures, oldest version first."""

    def version(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", path.stem.removeprefix(agent))]

    return sorted((path for path in FOLDER.glob("*.jsonl") if re.fullmatch(agent + r"-\d.*", path.stem)), key=version)


def named(text: str, turns: dict[str, int]) -> str:
    """JSON text with `{{turn N}}` for the ids in `turns`, those inside of base64 too."""

    def opened(found: re.Match[str]) -> str:
        try:
            inner = base64.b64decode(found[1], validate=True).decode("ascii")
        except ValueError:
            return found[0]
        known = any(turn in inner for turn in turns)
        return f'"{{{{base64 {inner}}}}}"' if known else found[0]

    text = re.sub(r'"([A-Za-z0-9+/]{16,88}={0,2})"', opened, text)
    return re.sub(r"(?<![0-9a-f])[0-9a-f]{12}(?![0-9a-f])", lambda id: _name(turns, id[0]), text)


def _name(turns: dict[str, int], found: str) -> str:
    return f"{{{{turn {turns[found]}}}}}" if found in turns else found


def renamed(text: str, turn_id: Callable[[int], str]) -> str:
    """The other way round: JSON text with the ids of this run."""
    text = _TURN.sub(lambda found: turn_id(int(found[1])), text)
    return _BASE64.sub(lambda found: base64.b64encode(found[1].encode()).decode(), text)

"""The trial that a forked one begins with: which of its answers are told again, found by what was asked. Pure.

Every request that was asked before the turn of the fork had its answer is answered from the record, those of other branches too;
so is that turn itself, unless it is to be sampled anew. A request is found by its whole conversation, its tools and its template
options, compared as `may_differ.py` says; what was asked several times is answered in the order in which it was. Kept are
digests, so that an origin costs a few hundred bytes a turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from steno.contracts.chat import Message, Tool
from steno.contracts.errors import Conflict, NotFound
from steno.contracts.records import ForkOf, Turn
from steno_proxy.sessions import prompt_index
from steno_proxy.sessions.may_differ import ForkComparison
from steno_proxy.sessions.messages.normalise import options_digest


@dataclass(slots=True)
class RecordedTurn:
    """number: in commit order. asked: digest of what it was asked. queued, ended: Unix seconds. whole: it can be told again."""

    number: int
    turn_id: str
    parent_id: str | None
    asked: bytes
    answer_id: str | None
    choice: int
    queued: float
    ended: float
    whole: bool


@dataclass(slots=True)
class OriginAnswer:
    """The turns that answered one request, by choice."""

    turns: list[RecordedTurn] = field(default_factory=list)


class ForkOrigin:
    """The origin of one `ForkOf`. Filled by `add`, turn after turn in commit order, then `settle`d.

    ended: conversations, by the turn that ended them. before: the turns that are answered from the record, in commit order.
    """

    def __init__(self, fork: ForkOf) -> None:
        self.fork = fork
        self.comparison = ForkComparison(fork.may_differ)
        self.ended: dict[str, bytes] = {}
        self.before: list[RecordedTurn] = []
        self.forked: RecordedTurn
        self._turns: list[RecordedTurn] = []
        self._answers: dict[bytes, list[OriginAnswer]] = {}

    def add(self, turn: Turn) -> None:
        """Linear in what the turn says."""
        asked = self._conversation(turn)
        self.ended[turn.turn_id] = _chained(asked, self.comparison.message(turn.reply))
        timings = turn.timings
        self._turns.append(
            RecordedTurn(
                turn.index, turn.turn_id, turn.parent_id, self._key(asked, turn.tools, _options(turn)),
                turn.answer_id, turn.choice,
                timings.queued, timings.last_token or timings.started or timings.queued,
                whole=not turn.partial and turn.superseded_by is None,
            )
        )  # fmt: skip

    def settle(self, last: Turn | None) -> None:
        """To be called once all turns are added. last: the turn of the fork; None: there is none. Raises: NotFound, Conflict: no
        trial can be forked there."""
        where = f"turn {self.fork.turn_id} of trial {self.fork.trial_id}"
        if last is None:
            raise NotFound(
                f"fork_of.turn_id: trial {self.fork.trial_id} has no turn {self.fork.turn_id!r}",
                field="fork_of.turn_id",
            )
        self.forked = next(turn for turn in self._turns if turn.turn_id == last.turn_id)
        if last.partial and not self.fork.resample:
            raise Conflict(f"fork_of.turn_id: {where} was cut off ({last.finish_reason})", field="fork_of.turn_id")
        if last.upstream_tokens is not None:
            raise Conflict(
                f"fork_of.turn_id: {where} has no token ids: an upstream gave text alone", field="fork_of.turn_id"
            )
        self.before = [turn for turn in self._turns if turn.whole and self._is_before(turn)]
        self._turns = []
        by_answer: dict[str, OriginAnswer] = {}
        for turn in sorted(self.before, key=lambda turn: (turn.queued, turn.number)):
            name = turn.answer_id or turn.turn_id
            if name not in by_answer:
                by_answer[name] = OriginAnswer()
                self._answers.setdefault(turn.asked, []).append(by_answer[name])
            by_answer[name].turns.append(turn)
        for answer in by_answer.values():
            answer.turns.sort(key=lambda turn: turn.choice)

    def _is_before(self, turn: RecordedTurn) -> bool:
        forked, resample = self.forked, self.fork.resample
        if turn.turn_id == forked.turn_id or (turn.answer_id is not None and turn.answer_id == forked.answer_id):
            return not resample
        return turn.number < forked.number or turn.queued < forked.ended

    def key(
        self, after: str | None, messages: Sequence[Message], prompt_ids: bytes | None, tools: Sequence[Tool] | None,
        options: bytes,
    ) -> bytes | None:  # fmt: skip
        """Digest of what a request asks, as `RecordedTurn.asked`. None: nothing like it can be on record.

        Args: after: the turn that it goes on from; None: it is a whole conversation. messages: those after that. prompt_ids: of a
            request without messages. options: digest of its template options.
        """
        if after is not None and after not in self.ended:
            return None
        digest = None if prompt_ids is None else blake2b(prompt_ids, digest_size=16).digest()  # as `Turn.prompt_digest`
        asked = _asked(self.comparison, self.ended[after] if after is not None else b"", messages, digest)
        return self._key(asked, tools, options)

    def answer(self, key: bytes | None, n: int, used: Container[str]) -> OriginAnswer | None:
        """The first recorded answer to a request for `n` choices of which no turn is in `used`; None: there is none."""
        for answer in self._answers.get(key or b"", ()):
            if len(answer.turns) == n and not any(turn.turn_id in used for turn in answer.turns):
                return answer
        return None

    def knows(self, key: bytes | None, n: int) -> bool:
        """Whether a request for `n` choices is on record, or is the turn of the fork."""
        return key is not None and (key == self.forked.asked or self.last_answer(key, n) is not None)

    def last_answer(self, key: bytes | None, n: int) -> OriginAnswer | None:
        """The last recorded answer, for an agent that asks this more often than was asked in the origin. None: no answer."""
        found = [answer for answer in self._answers.get(key or b"", ()) if len(answer.turns) == n]
        return found[-1] if found else None

    def nearest(self, after: str | None, used: Container[str]) -> RecordedTurn | None:
        """Of the turns not in `used`, the first that goes on from `after`, else the first; None: there are none. The turn of the
        fork is among them, also if it is sampled anew."""
        waiting = [turn for turn in (*self.before, self.forked) if turn.turn_id not in used]
        return next((turn for turn in waiting if turn.parent_id == after), waiting[0] if waiting else None)

    def _conversation(self, turn: Turn) -> bytes:
        before = self.ended.get(turn.parent_id, b"") if turn.parent_id is not None else b""
        return _asked(self.comparison, before, turn.messages, turn.prompt_digest if _is_ids(turn) else None)

    def _key(self, asked: bytes, tools: Sequence[Tool] | None, options: bytes) -> bytes:
        return _chained(asked, self.comparison.tools(tools) + options)


def _asked(
    comparison: ForkComparison, before: bytes, messages: Iterable[Message], prompt_digest: bytes | None
) -> bytes:
    """Digest of `before` and then these messages. A plain prompt is a whole conversation by itself. Results of a turn's
    calls are the same in any order: agents that run them at the same time give them as they come, and each names its call."""
    asked = before
    for role, group in itertools.groupby(messages, key=lambda message: message.get("role")):
        digests = map(comparison.message, group)
        for digest in sorted(digests) if role == "tool" else digests:
            asked = _chained(b"" if role == "prompt" else asked, digest)
    return asked if prompt_digest is None else _chained(b"", prompt_digest)


def _options(turn: Turn) -> bytes:
    if _is_ids(turn):
        return prompt_index.IDS
    if turn.messages and turn.messages[0].get("role") == "prompt":
        return prompt_index.TEXT
    return options_digest(turn.options.get("template_kwargs"))


def _is_ids(turn: Turn) -> bool:
    """Whether it was asked a prompt of ids."""
    return turn.dialect == "completions" and not turn.messages


def _chained(before: bytes, more: bytes) -> bytes:
    return blake2b(before + more, digest_size=16).digest()

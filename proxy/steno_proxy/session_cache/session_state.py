"""One session as this process knows it: its conversation tree, the rows that it has read, and the turns in flight.

A cache without I/O: `cache.py` reads and writes the store for it. A turn may be on record while it is still open, at this
replica or at another (docs/adr/0007): which of them the tree may be gone on from, and what is to be read again, is kept here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from steno.contracts.chat import Message
from steno.contracts.errors import StenoError
from steno.contracts.records import OPEN, IndexRow, Session
from steno_proxy.session_cache.path_cache import text_bytes
from steno_proxy.sessions.messages.echoes import Echo
from steno_proxy.sessions.prompt_index import IDS, TEXT, PromptIndex
from steno_proxy.sessions.tree import Tree

_OVERHEAD_BYTES = 4000
"""What a recording takes beside its tree's own count: the session record, mostly. About."""
_MARK_BYTES = 700
"""What a turn of a plain prompt takes in `PromptIndex`, beside what it takes in the tree. Measured, CPython 3.11."""
_ECHO_BYTES = 600
"""What an echo takes beside the texts of its reply. About."""
MOST_REPLIES = 64
OPEN_WAIT_S = 600.0
"""How long a turn that is open on record is looked at again: about the longest that agents wait for an answer. Seconds."""


class AnswerSoFar(NamedTuple):
    """The end of an answer that is being sampled. tokens: sampled so far. calls: name and arguments of the last. cut: there was
    more before."""

    turn_id: str
    queued: float
    tokens: int
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    cut: bool


class RunningRequest(Protocol):
    """A request of a session that is being answered."""

    done: asyncio.Event

    def unrecorded(self) -> tuple[int, int]:
        """How many of its turns, and of its tokens sampled so far, its recording does not count yet."""
        ...

    def under_way(self, most: int) -> list[AnswerSoFar]:
        """Its answers as far as they have come, of each text the last `most` characters, about. Costs no more for longer ones."""
        ...

    def abort(self, error: StenoError) -> None:
        """Stop, keep what was sampled as partial turns, answer `error` where that is still possible. Idempotent."""
        ...


class Recording:
    """One session in this process. Everything here can be rebuilt from the store, except what runs here.

    entering: how many requests are about to be in flight: they wait for the store, or for a place on a worker.
    sampled_tokens: by all turns that are known here. marks: how many of these turns are of plain prompts.
    open_here: turns that run here and are on record already, still open: turn id -> number, -1 until the tree has it.
    open_tokens: how many of `sampled_tokens` each of them has on record: turn id -> tokens.
    open_elsewhere: turns on record as open that do not run here: number -> when they are given up, Unix seconds. At another
        replica they will yet be replaced; those of a dead one stay as they are, and can be gone on from like any partial turn.
    replaying: ids of the origin's turns that answer a request here now, and may not be on record here yet.
    resampling: how many open requests sample the turn of the fork anew.
    passed_fork: whether the turn of the fork, or one sampled here, has been on record; stays True if the store loses it.
    replies: by turn number, the last MOST_REPLIES replies that were read to be compared with possible echoes.
    echoes: the echoes that were recognised, as `reading.Known`.
    """

    __slots__ = (
        "cost_bytes",
        "echo_bytes",
        "echoes",
        "entering",
        "in_flight",
        "marks",
        "open_elsewhere",
        "open_here",
        "open_tokens",
        "passed_fork",
        "prompt_index",
        "replaying",
        "replies",
        "resampling",
        "sampled_tokens",
        "session",
        "tree",
        "trial_id",
    )

    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id
        self.session: Session | None = None
        self.tree = Tree()
        self.prompt_index = PromptIndex()
        self.marks = 0
        self.in_flight: set[RunningRequest] = set()
        self.entering = 0
        self.open_here: dict[str, int] = {}
        self.open_tokens: dict[str, int] = {}
        self.sampled_tokens = 0
        self.replaying: set[str] = set()
        self.resampling = 0
        self.passed_fork = False
        self.open_elsewhere: dict[int, float] = {}
        self.cost_bytes = 0
        self.replies: OrderedDict[int, Message] = OrderedDict()
        self.echoes: dict[tuple[int, bytes, str], Echo] = {}
        self.echo_bytes = 0

    @property
    def in_use(self) -> bool:
        """Whether a request uses it. It must not be evicted then: another recording would not know of the request."""
        return bool(self.in_flight or self.entering)

    @property
    def task_step(self) -> str | None:
        """The step of its task that the trial is at, as of the last look at its session."""
        return self.session.task_step if self.session is not None else None

    @property
    def turns(self) -> int:
        """How many turns are known here, which is the number of the next row to read."""
        return len(self.tree)

    def add(self, row: IndexRow, now: float) -> None:
        self._note_fork(row)
        number = len(self.tree)
        runs_here = row.finish == OPEN and row.turn_id in self.open_here
        if runs_here:
            self.open_here[row.turn_id] = number
            self.open_tokens[row.turn_id] = row.completion_tokens or 0
        elif row.finish == OPEN:
            self.open_elsewhere[number] = now + OPEN_WAIT_S
        self.sampled_tokens += row.completion_tokens or 0
        self.prompt_index.add(number, row)
        self.marks += row.options in (IDS, TEXT)
        self.tree.add(row, running=runs_here)

    def ended(self, number: int, row: IndexRow, now: float) -> None:
        """Take in the final row of a turn that ran here: it was committed whole, as turn `number`."""
        self._note_fork(row)
        place = self.open_here.pop(row.turn_id, -1)
        if place >= 0:
            self.sampled_tokens += (row.completion_tokens or 0) - self.open_tokens.pop(row.turn_id, 0)
            self.tree.settle(place, row)
        elif number == len(self.tree):
            self.add(row, now)

    def _note_fork(self, row: IndexRow) -> None:
        """Note that a forked trial is past its fork: replayed turns have sampled nothing, so a turn with tokens came after it."""
        fork = self.session.fork_of if self.session is not None else None
        if fork is not None and (row.turn_id == fork.turn_id or row.completion_tokens != 0):
            self.passed_fork = True

    def unrecorded(self, turn_id: str, tokens: int) -> tuple[int, int]:
        """Of a turn that runs here and has sampled so many tokens: what `turns` and `sampled_tokens` do not count of it.

        A turn that is being recorded is in the one or in the other, never in none and never in both."""
        if self.tree.number(turn_id) < 0:
            return 1, tokens
        return 0, tokens - self.open_tokens[turn_id] if turn_id in self.open_tokens else 0

    def unread(self, now: float) -> int:
        """The first row to read: after the last, or the earliest that may have changed since."""
        for number in [number for number, until in self.open_elsewhere.items() if until <= now]:
            del self.open_elsewhere[number]
        return min(self.open_elsewhere, default=len(self.tree))

    def has_open(self, now: float) -> bool:
        """Whether a turn that is on record may still be running, here or at another replica."""
        return bool(self.open_here) or any(until > now for until in self.open_elsewhere.values())

    def lost(self, first: int, known: int, rows: Sequence[IndexRow]) -> int:
        """The first of the turns [first, known) that is not on record any more under its number; -1: all are. `rows`: those from
        `first` on, asked for when `known` turns were known here, all of them confirmed."""
        ids = self.tree.ids
        for number in range(first, known):
            at = number - first
            if at >= len(rows) or rows[at].turn_id != ids[number]:
                return number
        return -1

    def contradicts(self, number: int, turn_id: str) -> bool:
        """Whether the tree has another turn under this number, or this one under another: then the store has lost some."""
        place = self.tree.number(turn_id)
        return place != number and (place >= 0 or number < self.turns)

    def outdated(self, start: int, rows: Sequence[IndexRow]) -> bool:
        """Whether a turn that was open elsewhere is whole by now, or has grown. `rows`: those from `start` on, without what
        another request has read meanwhile."""
        read = range(start, start + len(rows))
        return any(
            number in read
            and (
                rows[number - start].finish != OPEN
                or rows[number - start].path_tokens != self.tree.tokens[number]
                or not self.tree.replied_with(number, rows[number - start].digests)  # text alone grows without a count
            )
            for number in self.open_elsewhere
        )

    def ended_unseen(self, rows: Sequence[IndexRow]) -> bool:
        """Whether new rows go on from turns that run here, as far as is known here: on record these have ended, since another
        replica has sealed them (`Recorder.seal`), or their commit is done. Such turns are not taken for open from now on."""
        running = {number: turn_id for turn_id, number in self.open_here.items() if number >= 0}
        ended = {running[row.parent] for row in rows if row.parent in running}
        for turn_id in ended:
            del self.open_here[turn_id]
        return bool(ended)

    def reset(self) -> None:
        """Forget what was read, so that all rows are read again. What runs here, and `passed_fork`, are kept."""
        self.tree, self.prompt_index, self.marks, self.open_elsewhere = Tree(), PromptIndex(), 0, {}
        self.replies.clear()
        self.echoes, self.echo_bytes = {}, 0
        self.open_here = dict.fromkeys(self.open_here, -1)
        self.open_tokens, self.sampled_tokens = {}, 0

    def keep_reply(self, number: int, reply: Message) -> None:
        """Keep a reply that was read to be compared with messages that may be echoes of it."""
        if number not in self.replies:
            self.replies[number] = reply
            self.echo_bytes += text_bytes(reply)
        if len(self.replies) > MOST_REPLIES:
            self.echo_bytes -= text_bytes(self.replies.popitem(last=False)[1])

    def keep_echo(self, node: int, digest: bytes, named: str, echo: Echo) -> None:
        """Remember that a message is an echo, so that it is recognised again without reading the store (I5). named: the turn of
        this trial that its call ids name."""
        if (node, digest, named) not in self.echoes:
            self.echoes[node, digest, named] = echo
            self.echo_bytes += _ECHO_BYTES + text_bytes(echo.reply)

    def recount(self) -> int:
        """Bring `cost_bytes` up to date; returns by how much it has changed."""
        kept = self.tree.size_bytes() + _MARK_BYTES * self.marks + self.echo_bytes
        before, self.cost_bytes = self.cost_bytes, _OVERHEAD_BYTES + kept
        return self.cost_bytes - before

"""The `SessionStore` protocol: how the proxy stores and reads sessions. `memory/` and `redis/` have it; one suite tests both.

Every method is atomic. A write that returns is durable to the degree the backing store promises (I3). Methods raise
`NotFound`, `Gone`, `Conflict` or `StoreUnavailable`; where a session is in the archive, those that read it also raise
`ArchiveUnreadable`. A method that raises anything else says so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from steno.contracts.chat import Message
from steno.contracts.errors import Conflict, StoreUnavailable
from steno.contracts.notes import Note, Notes
from steno.contracts.records import Group, IndexRow, Session, Turn, TurnAnnotation
from steno_proxy.store.claims import Claimed
from steno_proxy.store.facets import EVERY_SESSION, SessionFilter
from steno_proxy.store.policies import PolicyStore
from steno_proxy.store.runs.interface import RunStore
from steno_proxy.store.token_texts import TokenTextsStore


class SessionListPage(NamedTuple):
    """One page of a list of sessions. `next_cursor` None: this was the last page. unreadable: trials of this page that can't be
    read from the archive. passed: for each of `items`, how many sessions were looked at up to and including it; looked: in
    all."""

    items: list[Session]
    next_cursor: str | None
    unreadable: Sequence[str] = ()
    passed: Sequence[int] = ()
    looked: int = 0


class SessionTail(NamedTuple):
    """A session and the index rows of its turns from `start` on: what a replica needs to bring its tree up to date."""

    session: Session
    rows: list[IndexRow]


class TokenPath(NamedTuple):
    """The tokens of a path in the conversation tree, root first, and the reply that ends it.

    ids: prompt and completion ids, int32 LE: what a continuation begins with (I2).
    """

    ids: bytes
    reply: dict[str, Any]


class ParentLost(StoreUnavailable):
    """The turn that a new one goes on from is not on record under its number any more: the store has lost what it had confirmed.
    Nothing was written. The request may be sent again, and finds its place in what is left."""

    def __init__(self, turn_id: str | None, number: int) -> None:
        super().__init__(f"turn {turn_id}, number {number}, which this answer continues, is not on record any more")


class EndedOtherwise(Conflict):
    """The session has ended already, with another status or reward than is asked for now."""

    def __init__(self, trial_id: str, status: str, reward: float | None, where: str = "") -> None:
        super().__init__(f"session {trial_id} has ended with status {status} and reward {reward}{where}")


class RecordedOtherwise(Conflict):
    """Something else is on record of the turn, and stays: a request at another replica has gone on from what was there of it.

    recorded_tokens: how many completion tokens that is. What was sampled beyond them is booked as `late`."""

    def __init__(self, turn_id: str, recorded_tokens: int) -> None:
        super().__init__(f"turn {turn_id} ends on record after {recorded_tokens} tokens: its client went on from there")
        self.recorded_tokens = recorded_tokens


def ends_alike(recorded: IndexRow, sent: IndexRow) -> bool:
    """Whether the ended turn on record ends like the one that was sent: then a repeated commit has succeeded. Its place in the
    tree and its request may differ: a turn that is replayed from a record has another request."""
    ends = [(row.finish, row.partial, row.path_tokens, row.completion_tokens) for row in (recorded, sent)]
    return ends[0] == ends[1]


class RetryKey(NamedTuple):
    """Which request a turn answers, for those that clients send again.

    key: 16 bytes, equal for equal requests of a trial. found: it is a retry, and what it repeats was on record when it came.
    """

    key: bytes
    found: bool = False


class SessionStore(Protocol):
    """All that the proxy remembers: sessions, and in stores of their own policies and their updates (`policies`), runs and leases
    (`runs`), and the token texts of tokenizers (`token_texts`)."""

    @property
    def policies(self) -> PolicyStore: ...
    @property
    def runs(self) -> RunStore: ...
    @property
    def token_texts(self) -> TokenTextsStore: ...
    @property
    def waited_replicas(self) -> int:
        """How many replicas have each write before it returns."""
        ...

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def ping(self) -> None:
        """Raises StoreUnavailable."""
        ...

    async def now(self) -> float:
        """Unix seconds by the clock that deadlines and leases are timed by, whichever replica asks."""
        ...

    def clock(self) -> float:
        """What `now` would say, without asking: replicas whose own clocks differ stamp by it what they record."""
        ...

    async def earliest(self) -> float:
        """As `now`; after its clock was set forward, the time by the clock as it was before: limits of time are over by this
        one, so that no trial ends too early. As far as this process knows."""
        ...

    async def keep(self, name: str, value: bytes) -> bytes:
        """Keep a value under this name for good, unless there is one already. Returns the value that came first: replicas agree
        on it."""
        ...

    async def kept(self, name: str) -> bytes | None:
        """What `keep` has kept under this name."""
        ...

    # -- groups and sessions
    async def create_group(self, group: Group, sessions: Sequence[Session]) -> Group:
        """Create a group and its sessions. If the same group is on record, return that one, and create its missing sessions
        again, except deleted ones. Raises: Conflict: a different group has this id, or a session of another group, or of none,
        has one of the trial ids. Gone: all sessions were deleted, or, of a group that is not on record, any."""
        ...

    async def group(self, group_id: str) -> Group: ...
    async def register(self, session: Session) -> Session:
        """Create the session if there is none; return the recorded one. Deleted (tombstone): Gone."""
        ...

    async def session(self, trial_id: str) -> Session:
        """NotFound; Gone when deleted."""
        ...

    async def list_sessions(
        self,
        *,
        status: str | None,
        group_id: str | None,
        since: float | None,
        until: float | None,
        cursor: str | None,
        limit: int,
        wanted: SessionFilter = EVERY_SESSION,
        newest_first: bool = False,
        most_looked: int | None = None,
    ) -> SessionListPage:
        """By creation time, oldest first or newest first. The cursor is opaque, of lists in one order, stable under concurrent
        inserts; a bad one is BadRequest. Sessions that `wanted` does not take are passed over by their facets: their records are
        not read, and those that are listed match by their records. most_looked: the page ends, maybe empty, soon after so many
        were looked at; None: when it is full."""
        ...

    def due(self, *, now: float) -> AsyncIterator[Session]:
        """The open sessions whose limit of time (`max_wall_s`, `max_idle_s`) is spent according to their records, which do not
        know of running turns. A session is read only once its limit can be spent; one of an older release, within minutes."""
        ...

    async def complete(
        self,
        trial_id: str,
        *,
        status: str,
        reward: float | None,
        end_reason: str,
        metrics: dict[str, float],
        now: float,
        final: bool = True,
        claim: int | None = None,
    ) -> Session:
        """End a session: freeze it. The same values again change nothing; another reward or status is Conflict. Deleted: Gone.

        claim: epoch of the claim under which its launcher ends it; Conflict if another launcher has the trial by now.

        The caller calls `settle` next. final False: a limit of the trial's own ended it, or it is scored later. Its harness may
        still post a reward, with more metrics, or give it up; the trial's group waits for that until its deadline. The launcher
        that scores it may claim it anew.
        """
        ...

    async def settle(self, trial_id: str, *, now: float) -> None:
        """Tell an ended session's group and run what became of it (I4): its group may get ready by this. From here on its record
        takes no turn. Idempotent; nothing for a session that is open, or that is not there (any more).

        The caller of `complete` calls it once the turns that were in flight are recorded. If its process died before that,
        `expire` does it half a minute later.
        """
        ...

    async def delete(self, trial_id: str, *, now: float, tombstone_s: float) -> None:
        """Remove everything, leave a tombstone. Idempotent. NotFound if there never was one."""
        ...

    async def expire(self, *, now: float, retention_s: float) -> int:
        """Drop ended sessions older than retention_s; returns how many. Safe to call from several replicas.

        Those of a group that waits for a lease, or is leased, are kept. A group that still runs is served as it is instead.
        """
        ...

    # -- the recording
    async def tail(self, trial_id: str, start: int, *, known: int = 0) -> SessionTail:
        """The session, and index rows from turn number `start` on, as durable as `commit` promises; mostly in one round trip.

        known: how many rows from `start` on the caller has already; it asks for them to check that they are still there.
        Raises: NotFound; Gone when deleted; StoreUnavailable."""
        ...

    async def path(self, trial_id: str, numbers: Sequence[int]) -> TokenPath:
        """Tokens of these turns (numbers as in `Turn.index`, root first), concatenated, and the last one's reply."""
        ...

    async def commit(
        self, trial_id: str, turn: Turn, row: IndexRow, *, now: float, retry_key: RetryKey | None = None
    ) -> int:
        """Append a turn in one atomic write (I3): the turn, its new messages and tools (stored once each, by digest,
        compressed), its index row, the session's counts and times. Returns the turn's number in commit order, also set
        on `turn.index`. The same turn_id again changes nothing and returns the same number, unless the turn on record is
        still open (`finish_reason` OPEN): then this one takes its place, under its number, if it has as many tokens.

        retry_key: the turn is paired with what came of the same request elsewhere (`asked_again`), whichever is recorded first.

        Raises Gone when the session is deleted; or frozen, and the turn is not partial (a partial one is kept: it was in
        flight when the session was frozen); or settled. If the session is settled or deleted, the tokens of a partial turn that
        has ended are booked in its run as `late` or `deleted`. RecordedOtherwise: the same turn_id is on record, stays, and
        differs from what was sent. ParentLost: the parent of a new turn is not on record any more."""
        ...

    async def mark_delivered(self, trial_id: str, turn_id: str, delivered: int) -> None:
        """How many completion tokens had left for the client. Silently nothing when the session is gone."""
        ...

    async def conversation(self, trial_id: str, numbers: Sequence[int]) -> list[list[Message]]:
        """What was said in these turns (numbers as in `Turn.index`): of each its new messages, then its reply."""
        ...

    async def hide(self, trial_id: str, turn_id: str) -> None:
        """The turn's answer is not to be given to its client again (`hidden`); its record stays. Idempotent;
        silently nothing when there is no such turn (any more)."""
        ...

    async def hidden(self, trial_id: str, turn_id: str) -> bool: ...
    async def supersede(self, trial_id: str, earlier: str, later: str) -> None:
        """A turn has taken the place of another (`Turn.superseded_by`). Idempotent; what is on record of either stays; silently
        nothing when the earlier one is not there (any more)."""
        ...

    async def refused(self, trial_id: str, key: bytes, *, began: float, now: float) -> None:
        """Note that a request was refused with nothing on record: its retry, at any replica, then repeats no recorded turn. Does
        nothing if a retry of it has come already, or if there is no such session (any more). Each call counts for one retry."""
        ...

    async def asked_again(self, trial_id: str, key: bytes, *, began: float, count: int, n: int, now: float) -> bool:
        """Note a request that its client marks as a retry, the `count`th. True: it was refused before; that refusal counts for
        this retry only. False: the retry is noted under `began` (its turns' `timings.queued`): a turn of an equal request that
        began before it, and comes on record after this call, is superseded by the retry's turn once both are on record.

        The retry supersedes all earlier retries with a lower count, and at most one unmarked turn, that only if the retry's own
        `RetryKey.found` is False: other unmarked turns are legitimate siblings."""
        ...

    async def note(self, trial_id: str, seen: Sequence[Note]) -> None:
        """Add notes to a session, open or ended (`notes.merged`). Raises: NotFound, Gone (deleted), StoreUnavailable."""
        ...

    async def notes(self, trial_id: str) -> Notes | None:
        """The notes of a session; None: it has none, or it is not there (any more)."""
        ...

    async def annotate(self, trial_id: str, annotations: Mapping[str, TurnAnnotation]) -> None:
        """Keep what a trainer saw in some turns, by turn id; it is read with the turns. Of each turn the newest annotation is
        kept, as long as the session. Archived sessions get no new ones. Raises: NotFound, Gone (deleted), StoreUnavailable."""
        ...

    async def add_marks(self, trial_id: str, marks: Sequence[str]) -> None:
        """Add marks to a session; each is kept once. Raises: NotFound, Gone (deleted), StoreUnavailable."""
        ...

    async def rotate_key(self, trial_id: str, generation: int | None) -> int:
        """Go on to this generation of the agent's key (None: the next), never back. Returns the one that is good now.

        Raises: NotFound, Gone (deleted), StoreUnavailable."""
        ...

    async def claim(
        self, trial_id: str, launcher: str, ttl_s: float, *, now: float, gone: Collection[str] = ()
    ) -> tuple[Session, Claimed]:
        """A launcher claims a trial, or renews its claim (`claims.claimed`). One that is taken over from another launcher has the
        next key from then on. Returns also the session as it is after that.

        Raises: NotFound, Gone (deleted), StoreUnavailable."""
        ...

    async def begin_task_step(self, trial_id: str, name: str | None) -> None:
        """`Session.task_step` from now on, in every `tail` that begins after this.

        Raises: NotFound, Gone (ended or deleted), StoreUnavailable."""
        ...

    async def turns(self, trial_id: str, *, start: int = 0, limit: int | None = None) -> list[Turn]:
        """In commit order, whole: messages and tools are put back from where they are stored once."""
        ...

    # -- what watchers see
    def events(self, trial_id: str, *, after: str | None = None) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Live events (cursor, {"type": "turn" | "completed" | "aborted" | "deleted", …}) of a session, those recorded
        after cursor `after` first (None: from the beginning), then as they happen, until the session has ended.

        Turns come in commit order, each once and whole: those after one that is still open wait for it."""
        ...

    async def fullness(self) -> float | None:
        """The share (0 to 1) of the memory allowed to the store that is in use; None: not known."""
        ...

    async def stats(self) -> dict[str, Any]:
        """For metrics and operators: backend, sessions by status, bytes where known."""
        ...

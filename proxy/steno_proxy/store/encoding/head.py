"""A stored session without its turns: a document that never changes, and a few fields that do.

In Redis the fields are a hash of strings (small enough for a listpack: keep every value under 64 bytes); in memory they are
this struct itself. `None` is an absent field.
"""

from __future__ import annotations

from typing import Any

import msgspec

from steno.contracts.lenient import read
from steno.contracts.records import Counts, Session
from steno_proxy.store.claims import TrialClaim
from steno_proxy.store.encoding.codec import FORMAT
from steno_proxy.store.encoding.texts import pack, to_json, unpack

_JSON_FIELDS = ("metrics", "marks")


class Head(msgspec.Struct, kw_only=True):
    """What changes of a session. Times are Unix seconds; counts as in `Counts`.

    final: 1 once nothing may come that changes its outcome: a reward, say, after a limit of its own has ended it. sealed: see
    `settlement.py`. owed: 1 while a tombstone has still to be accounted for. rotations: of the trial's key. task_step: of turns
    that begin now. claim: epoch of the newest launcher's, claim_by, and when it runs out.
    """

    status: str = "open"
    group: str | None = None
    created: float
    updated: float
    first_turn: float | None = None
    ended: float | None = None
    end_reason: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = {}
    marks: list[str] = []
    turns: int = 0
    prompt: int = 0
    completion: int = 0
    constrained: int = 0
    forks: int = 0
    final: int = 0
    sealed: int = 0
    owed: int = 0
    rotations: int = 0
    task_step: str | None = None
    claim: int = 0
    claim_by: str | None = None
    claim_until: float | None = None

    @property
    def awaits_reward(self) -> bool:
        """It has ended by a limit of its own, or is yet to be scored: it may get its reward, or be given up."""
        return self.status == "completed" and self.reward is None and not self.final

    @property
    def claimed(self) -> TrialClaim:
        return TrialClaim(self.claim, self.claim_by or "", self.claim_until or 0.0)


def head_of(session: Session) -> Head:
    """The head of a new session."""
    counts = session.counts
    return Head(
        status=session.status, group=session.group_id, created=session.created_at, updated=session.updated_at,
        first_turn=session.first_turn_at, ended=session.ended_at, end_reason=session.end_reason, reward=session.reward,
        metrics=dict(session.metrics), marks=list(session.marks), turns=counts.turns, prompt=counts.prompt_tokens,
        completion=counts.completion_tokens, constrained=counts.constrained_tokens, forks=counts.forks,
        rotations=session.key_generation - 1, task_step=session.task_step,
    )  # fmt: skip


def doc_of(session: Session) -> bytes:
    """The part that never changes, packed like a text."""
    kept = session.model_dump(
        mode="json",
        include={"run_id", "metadata", "sampling", "limits", "fork_of", "rescore_of"},
        exclude_defaults=True,
    )
    return pack(to_json({"format": FORMAT, **kept}))


def run_of(doc: bytes) -> str | None:
    """The run_id in a document."""
    run_id: str | None = unpack(doc).get("run_id")
    return run_id


def borrows(doc: bytes) -> bool:
    """Whether a document is of a session that has another's turns (`Session.rescore_of`)."""
    return unpack(doc).get("rescore_of") is not None


def session_of(trial_id: str, head: Head, doc: bytes) -> Session:
    """A session, from its head and its document. Raises ValueError for a document of another format."""
    kept: dict[str, Any] = unpack(doc)
    if kept.pop("format") != FORMAT:
        raise ValueError(f"the recording of trial {trial_id} is of another format than {FORMAT}")
    return read(Session, dict(
        trial_id=trial_id, group_id=head.group, status=head.status, end_reason=head.end_reason, reward=head.reward,
        awaits_reward=head.awaits_reward, metrics=dict(head.metrics), marks=list(head.marks), created_at=head.created,
        updated_at=head.updated, first_turn_at=head.first_turn, ended_at=head.ended,
        key_generation=head.rotations + 1, task_step=head.task_step, **kept,
        counts=Counts(
            turns=head.turns, prompt_tokens=head.prompt, completion_tokens=head.completion,
            constrained_tokens=head.constrained, forks=head.forks,
        ),
    ))  # fmt: skip


def head_to_hash(head: Head) -> list[str | bytes]:
    """A head as the fields of a Redis hash: field, value, field, value…; absent and zero ones are left out."""
    flat: list[str | bytes] = []
    for name in Head.__struct_fields__:
        value = getattr(head, name)
        if value or name in ("created", "updated") or (value == 0.0 and isinstance(value, float)):
            flat += [name, to_json(value) if name in _JSON_FIELDS else str(value)]
    return flat


def head_from_hash(fields: dict[bytes, bytes]) -> Head:
    """A head, from the fields of its Redis hash. Numbers are parsed by the struct's own types; `str(float)` is exact, so
    nothing is lost on the way."""
    values: dict[str, Any] = {}
    for key, raw in fields.items():
        name = key.decode()
        values[name] = msgspec.json.decode(raw) if name in _JSON_FIELDS else raw.decode()
    return msgspec.convert(values, Head, strict=False)

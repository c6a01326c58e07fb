"""The ledger of invariant I4: sampled tokens = trained + not trained, by an enumerated reason, per policy version.

It only counts. Who samples, trains or drops says so here; the left side comes from the record of the turns (`received`) and the
right side from what became of the samples, so that a token lost or trained twice between the two shows as an imbalance.
What one step does is best written to a ledger of its own and added when that step is durable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from enum import StrEnum

import msgspec

from steno.contracts.records import Sample, Turn
from steno_trainer.errors import LedgerImbalance, TrainerError

FORMAT = 1
UNKNOWN_VERSION = "unknown"
"""Where tokens are booked whose version the record does not tell (a session in which a script spoke)."""


class Reason(StrEnum):
    """Why a sampled token was not trained."""

    CONSTRAINED = "constrained"  # drawn under a bent law (I1)
    TEXT_ONLY = "text_only"  # an upstream gave text and no token ids, for some turns of the session at least
    SYNTHETIC = "synthetic"  # said by a script: no log-probabilities
    SUPERSEDED = "superseded"  # the client asked again, and another turn took the place of its turn
    OTHER_POLICY = "other_policy"  # drawn by another policy than the one in training: a frozen one
    OTHER_MODEL = "other_model"  # its call asked for a model by another name than those that are trained
    EVALUATION = "evaluation"  # the group's purpose is eval
    ABORTED = "aborted"  # the trial was given up
    UNSCORED = "unscored"  # the trial ended without a reward
    UNGROUPED = "ungrouped"  # the trial is in no group, so nothing says what its reward is worth
    LATE = "late"  # the trial ended after its group had been served
    DELETED = "deleted"  # the session was deleted, or expired, before it was leased
    GROUP_TOO_SMALL = "group_too_small"  # a single scored trial: nothing to compare it with
    ZERO_VARIANCE = "zero_variance"  # all rewards of the group are equal
    STALE = "stale"  # the sample's oldest version is further back than the bound
    ORPHANED = "orphaned"  # a version of no start of this run that its checkpoint folder knows of
    BAD_VERSION = "bad_version"  # a version that is no <lineage>/<step>, or is ahead of the trainer
    TOO_LONG = "too_long"  # the sample exceeds what one micro-batch may hold
    UNREADABLE = "unreadable"  # its turn, or one that it goes on from, does not add up on record
    MALFORMED = "malformed"  # the sample contradicts itself, or a reward of its group is no number that can be trained
    POISONED = "poisoned"  # its loss or gradient was no number, so the update was skipped
    OVERLONG = "overlong"  # its completion was cut, or its trial at a limit (overlong filtering)
    MISSING_LOGPROB = "missing_logprob"  # a token to be trained has no finite log-probability (I1)
    MISMATCH = "mismatch"  # masked: rollout and trainer disagree too much about this token


class Account(msgspec.Struct):
    """Of one version, in tokens."""

    sampled: int = 0
    trained: int = 0
    untrained: dict[Reason, int] = msgspec.field(default_factory=dict)

    @property
    def unsettled(self) -> int:
        """Sampled, and neither trained nor given up so far."""
        return self.sampled - self.trained - sum(self.untrained.values())


class _SavedLedger(msgspec.Struct):
    format: int
    accounts: dict[str, Account]


class Ledger:
    """Accounts by version. Not thread-safe."""

    def __init__(self, accounts: Mapping[str, Account] | None = None) -> None:
        self._accounts: dict[str, Account] = dict(accounts or {})

    def sampled(self, version: str, tokens: int) -> None:
        self._account(version, tokens).sampled += tokens

    def trained(self, version: str, tokens: int) -> None:
        self._account(version, tokens).trained += tokens

    def untrained(self, version: str, reason: Reason, tokens: int) -> None:
        untrained = self._account(version, tokens).untrained
        if tokens:
            untrained[Reason(reason)] = untrained.get(reason, 0) + tokens

    def add(self, other: Ledger) -> None:
        """Book everything of another ledger here too."""
        for version, account in other._accounts.items():
            self.sampled(version, account.sampled)
            self.trained(version, account.trained)
            for reason, tokens in account.untrained.items():
                self.untrained(version, reason, tokens)

    def accounts(self) -> dict[str, Account]:
        """Copies, by version."""
        return {version: _copy(account) for version, account in sorted(self._accounts.items())}

    def total(self) -> Account:
        """Over all versions."""
        total = Account()
        for account in self._accounts.values():
            total.sampled += account.sampled
            total.trained += account.trained
            for reason, tokens in account.untrained.items():
                total.untrained[reason] = total.untrained.get(reason, 0) + tokens
        return total

    def check(self, in_hand: Mapping[str, int] | None = None) -> None:
        """Whether it balances, version by version.

        Args: in_hand: version -> tokens that are sampled and rightly unsettled (read, and in no finished step yet).
        Raises: LedgerImbalance: naming each version that does not balance, and by how many tokens.
        """
        waiting = in_hand or {}
        wrong = []
        for version in sorted({*self._accounts, *waiting}):
            account = self._accounts.get(version, Account())
            excess = account.unsettled - waiting.get(version, 0)
            if excess:
                wrong.append(
                    f"{version}: {account.sampled} sampled, {account.trained} trained, "
                    f"{sum(account.untrained.values())} not trained, {waiting.get(version, 0)} in hand ({excess:+d})"
                )
        if wrong:
            raise LedgerImbalance("the ledger does not balance: " + "; ".join(wrong))

    def to_bytes(self) -> bytes:
        """For the checkpoint. The same accounts give the same bytes."""
        accounts = self.accounts()
        for account in accounts.values():
            account.untrained = dict(sorted(account.untrained.items()))
        return msgspec.msgpack.encode(_SavedLedger(FORMAT, accounts))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Ledger:
        """Raises: TrainerError: not a ledger, of another format, or with a reason that is not known."""
        try:
            saved = msgspec.msgpack.decode(raw, type=_SavedLedger)
        except msgspec.DecodeError as error:
            raise TrainerError(f"the saved ledger can't be read: {error}") from error
        if saved.format != FORMAT:
            raise TrainerError(f"the saved ledger has format {saved.format}, this release reads format {FORMAT}")
        return cls(saved.accounts)

    def _account(self, version: str, tokens: int) -> Account:
        if tokens < 0:
            raise LedgerImbalance(f"{version}: {tokens} tokens can't be booked")
        return self._accounts.setdefault(version, Account())


def received(turns: Iterable[Turn]) -> Counter[str]:
    """Sampled tokens on record, by version: the left side of the ledger. Tokens without a version are UNKNOWN_VERSION's."""
    tokens: Counter[str] = Counter()
    for turn in turns:
        known = 0
        for span in turn.versions:
            tokens[span.version] += span.end - span.start
            known += span.end - span.start
        tokens[UNKNOWN_VERSION] += turn.completion_tokens - known
    return +tokens


def book_missing(turns: Iterable[Turn], samples: Iterable[Sample], unreadable: Container[str], ledger: Ledger) -> None:
    """Book the tokens that no sample holds, so that a session's turns and samples add up: of superseded turns, and of those that
    can't be read. What else no sample holds is not explained by this, and shows as an imbalance.

    Args: unreadable: turn ids (`SampleList.unreadable`).
    """
    held = {turn_id for sample in samples for turn_id in sample.turn_ids}
    for turn in turns:
        if turn.turn_id in held:
            continue
        reason = Reason.SUPERSEDED if turn.superseded_by is not None else Reason.UNREADABLE
        if reason is Reason.SUPERSEDED or turn.turn_id in unreadable:
            for version, tokens in received([turn]).items():
                ledger.untrained(version, reason, tokens)


def _copy(account: Account) -> Account:
    return Account(account.sampled, account.trained, dict(account.untrained))

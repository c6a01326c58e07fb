"""I4: what was sampled is trained or not trained, by reason and version, or the ledger refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from steno.contracts.records import Timings, TokenSpan, Turn, ids_to_bytes
from steno_trainer.data.ledger import UNKNOWN_VERSION, Account, Ledger, Reason, book_missing, received
from steno_trainer.errors import LedgerImbalance, TrainerError


def turn(tokens: int, *spans: tuple[str, int, int], **fields: Any) -> Turn:
    """Args: spans: (version, start, end) in sampled tokens."""
    return Turn(
        completion_ids=ids_to_bytes(list(range(tokens))), timings=Timings(queued=0.0),
        versions=[TokenSpan(version=v, start=a, end=b) for v, a, b in spans], **{"turn_id": "t", **fields},
    )  # fmt: skip


def balanced() -> Ledger:
    ledger = Ledger()
    ledger.sampled("a/1", 10)
    ledger.sampled("a/2", 5)
    ledger.trained("a/1", 6)
    ledger.untrained("a/1", Reason.STALE, 3)
    ledger.untrained("a/1", Reason.CONSTRAINED, 1)
    ledger.untrained("a/2", Reason.STALE, 5)
    return ledger


def test_a_balanced_ledger_passes_and_totals_over_versions():
    ledger = balanced()
    ledger.check()
    assert ledger.total() == Account(15, 6, {Reason.STALE: 8, Reason.CONSTRAINED: 1})
    assert ledger.accounts()["a/2"] == Account(5, 0, {Reason.STALE: 5})


def test_a_token_too_few_or_too_many_is_named_with_its_version():
    ledger = balanced()
    ledger.sampled("a/2", 1)
    with pytest.raises(LedgerImbalance, match=r"a/2: 6 sampled, 0 trained, 5 not trained, 0 in hand \(\+1\)"):
        ledger.check()
    ledger.trained("a/2", 2)
    with pytest.raises(LedgerImbalance, match=r"a/2: .*\(-1\)"):
        ledger.check()


def test_versions_do_not_make_up_for_each_other():
    ledger = Ledger()
    ledger.sampled("a/1", 1)
    ledger.trained("a/2", 1)
    with pytest.raises(LedgerImbalance, match=r"a/1: .*\(\+1\); a/2: .*\(-1\)"):
        ledger.check()


def test_what_is_in_hand_is_neither_lost_nor_trained():
    ledger = balanced()
    ledger.sampled("a/3", 7)
    ledger.check(in_hand={"a/3": 7})
    with pytest.raises(LedgerImbalance, match="a/3"):
        ledger.check(in_hand={"a/3": 6})
    with pytest.raises(LedgerImbalance, match="a/4"):
        ledger.check(in_hand={"a/3": 7, "a/4": 1})


def test_a_steps_entries_are_added_whole():
    whole, step = balanced(), balanced()
    whole.add(step)
    whole.check()
    assert whole.total() == Account(30, 12, {Reason.STALE: 16, Reason.CONSTRAINED: 2})
    assert step.total().sampled == 15


def test_accounts_are_copies():
    ledger = balanced()
    ledger.accounts()["a/1"].untrained[Reason.STALE] = 99
    ledger.check()


def test_negative_counts_and_unknown_reasons_are_refused():
    ledger = Ledger()
    with pytest.raises(LedgerImbalance, match="-1 tokens"):
        ledger.trained("a/1", -1)
    with pytest.raises(ValueError, match="whim"):
        ledger.untrained("a/1", "whim", 1)


def test_it_survives_a_checkpoint_and_equal_ledgers_have_equal_bytes():
    ledger = balanced()
    again = Ledger.from_bytes(ledger.to_bytes())
    assert again.accounts() == ledger.accounts()
    other = Ledger()
    other.untrained("a/2", Reason.STALE, 5)
    other.untrained("a/1", Reason.CONSTRAINED, 1)
    other.untrained("a/1", Reason.STALE, 3)
    other.trained("a/1", 6)
    other.sampled("a/2", 5)
    other.sampled("a/1", 10)
    assert other.to_bytes() == ledger.to_bytes()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"format": 2, "accounts": {}}),
        msgspec.msgpack.encode({"format": 1, "accounts": {"a/1": {"untrained": {"whim": 1}}}}),
    ],
)
def test_what_is_no_ledger_is_refused(raw):
    with pytest.raises(TrainerError, match="saved ledger"):
        Ledger.from_bytes(raw)


def test_received_counts_the_record_by_version():
    turns = [turn(5, ("a/1", 0, 2), ("a/2", 2, 5)), turn(3, ("a/2", 0, 3)), turn(2), turn(0)]
    assert received(turns) == {"a/1": 2, "a/2": 6, UNKNOWN_VERSION: 2}


def test_what_no_sample_holds_is_booked_only_where_the_record_says_why():
    turns = [
        turn(2, ("a/1", 0, 2), turn_id="replaced", superseded_by="other"),
        turn(3, ("a/1", 0, 3), turn_id="broken"),
        turn(4, ("a/2", 0, 4), turn_id="lost"),
    ]
    ledger = Ledger()
    for version, tokens in received(turns).items():
        ledger.sampled(version, tokens)
    book_missing(turns, [], {"broken"}, ledger)
    assert ledger.accounts() == {
        "a/1": Account(5, 0, {Reason.SUPERSEDED: 2, Reason.UNREADABLE: 3}),
        "a/2": Account(4, 0, {}),
    }
    with pytest.raises(LedgerImbalance, match=r"a/2: 4 sampled, 0 trained, 0 not trained, 0 in hand \(\+4\)$"):
        ledger.check()

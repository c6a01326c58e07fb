"""Samples become rows, and each sampled token that does not is in the ledger with its reason and version (I4)."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import replace

import pytest
import torch

from steno.contracts.records import SampledRange, TokenSpan, bytes_to_ids
from steno_trainer.data.ledger import UNKNOWN_VERSION, Account, Ledger, Reason, book_missing, received
from steno_trainer.data.rows import TrainingTerms, drop_groups, read_samples
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.errors import LedgerImbalance
from tests.unit.trainer.recorded import VOCABULARY, Recording, session

HISTORY = VersionHistory((PolicyVersion("base", 0), PolicyVersion("a", 5)))
TERMS = TrainingTerms(HISTORY, max_staleness_steps=4, max_tokens=1000, vocabulary=VOCABULARY)


def read(recording, terms=TERMS, **fields):
    """(rows, ledger) of a session; the ledger's left side comes from the turns. It balances with what the rows hold."""
    ledger = Ledger()
    for version, tokens in received(recording.turns).items():
        ledger.sampled(version, tokens)
    made = recording.samples(session(**fields))
    book_missing(recording.turns, made, (), ledger)
    rows = read_samples(made, terms, ledger)
    in_hand = sum((row.trained_by_version() for row in rows), start=type(received([]))())
    ledger.check(in_hand)
    return rows, ledger


def test_a_row_is_the_sample_as_tensors():
    recording = Recording()
    first = recording.turn(None, 3, 2, version="a/4")
    recording.turn(first, 1, 3, version="a/5", law={"temperature": 0.5})
    [row], ledger = read(recording)
    [sample] = recording.samples()
    assert row.token_ids_T.tolist() == bytes_to_ids(sample.token_ids).tolist()
    assert row.loss_mask_T.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 3
    assert row.sampling_logprobs_T[row.loss_mask_T].isfinite().all()
    assert row.sampling_logprobs_T[~row.loss_mask_T].isnan().all()
    assert row.temperatures_T.tolist() == [1.0] * 6 + [0.5] * 3
    assert (row.trial_id, row.group_id, row.tokens, row.trained_tokens) == ("g.0", "g", 9, 5)
    assert row.trained_by_version() == {"a/4": 2, "a/5": 3}
    assert (row.verdict.staleness_steps, row.verdict.in_flight_steps, row.verdict.queue_steps) == (1, 1, 0)
    assert ledger.total().untrained == {}


def test_a_turn_that_spans_two_updates_has_three_versions():
    recording = Recording()
    spans = [TokenSpan(version=f"a/{v}", start=s, end=e) for v, s, e in ((3, 0, 2), (4, 2, 3), (5, 3, 6))]
    recording.turn(None, 2, 6, versions=spans)
    [row], _ = read(recording)
    assert row.trained_by_version() == {"a/3": 2, "a/4": 1, "a/5": 3}
    assert [row.versions[i] if i >= 0 else None for i in row.version_T] == [None] * 2 + ["a/3"] * 2 + ["a/4"] + [
        "a/5"
    ] * 3


def test_a_shared_token_is_accounted_for_once():
    recording = Recording()
    root = recording.turn(None, 4, 5)
    recording.turn(root, 1, 2)
    recording.turn(root, 2, 3)
    rows, ledger = read(recording)
    assert [row.trained_tokens for row in rows] == [7, 3]
    assert ledger.total() == Account(10, 0, {})


def test_constrained_tokens_are_not_trained_and_counted():
    recording = Recording()
    root = recording.turn(None, 2, 6, version="a/3", constrained=[(1, 4)])
    recording.turn(root, 1, 2, law={"top_p": 0.9}, version="a/5")
    [row], ledger = read(recording)
    assert row.trained_tokens == 3
    assert ledger.accounts()["a/3"].untrained == {Reason.CONSTRAINED: 3}
    assert ledger.accounts()["a/5"].untrained == {Reason.CONSTRAINED: 2}


def test_another_policys_tokens_are_context():
    recording = Recording()
    root = recording.turn(None, 2, 4)
    recording.turn(root, 1, 3, policy="frozen", version="reference/0")
    [row], ledger = read(recording)
    assert row.trained_tokens == 4
    assert ledger.accounts()["reference/0"].untrained == {Reason.OTHER_POLICY: 3}


def test_only_calls_by_the_names_that_are_trained_are_trained():
    recording = Recording()
    root = recording.turn(None, 2, 4, model="main", version="a/5")
    recording.turn(root, 1, 3, model="explorer", version="a/4", constrained=[(0, 1)])
    recording.turn(None, 2, 5, model="main-2", version="a/5")
    recording.turn(None, 2, 6, model="explorer", version="gone/3")
    rows, ledger = read(recording, replace(TERMS, models=("main", "main-?")))
    assert [row.trained_tokens for row in rows] == [4, 5]
    assert rows[0].verdict.staleness_steps == 1, "it goes on from what older weights said, whoever asked"
    assert ledger.accounts()["a/4"].untrained == {Reason.OTHER_MODEL: 3}
    assert ledger.accounts()["gone/3"].untrained == {Reason.OTHER_MODEL: 6}


def test_superseded_turns_are_booked_whether_a_sample_holds_them_or_not():
    recording = Recording()
    root = recording.turn(None, 2, 4)
    gone = recording.turn(root, 1, 3, superseded_by="f" * 12)
    recording.turn(root, 2, 5, superseded_by="f" * 12)
    recording.turn(gone, 1, 1)
    [row], ledger = read(recording)
    assert row.trained_tokens == 5
    assert ledger.total().untrained == {Reason.SUPERSEDED: 8}


def test_a_scripted_session_is_booked_as_synthetic():
    recording = Recording()
    recording.turn(None, 2, 4, sampling_logprobs=b"", versions=[])
    rows, ledger = read(recording, marks=["synthetic"])
    assert rows == []
    assert ledger.accounts() == {UNKNOWN_VERSION: Account(4, 0, {Reason.SYNTHETIC: 4})}


@pytest.mark.parametrize(
    ("reason", "version", "fields", "terms"),
    [
        (Reason.UNSCORED, "a/5", {"reward": None}, {}),
        (Reason.UNGROUPED, "a/5", {"group_id": None}, {}),
        (Reason.STALE, "base/0", {}, {}),
        (Reason.ORPHANED, "gone/3", {}, {}),
        (Reason.BAD_VERSION, "a/6", {}, {}),
        (Reason.BAD_VERSION, "latest", {}, {}),
        (Reason.TOO_LONG, "a/5", {}, {"max_tokens": 8}),
    ],
)
def test_each_reason_to_refuse_a_sample_is_counted(reason, version, fields, terms):
    recording = Recording()
    recording.turn(None, 3, 6, version=version, constrained=[(0, 2)])
    rows, ledger = read(recording, TrainingTerms(**{**vars(TERMS), **terms}), **fields)
    assert rows == []
    assert ledger.accounts()[version].untrained == {reason: 4, Reason.CONSTRAINED: 2}


def test_the_oldest_version_decides_also_if_it_is_only_context():
    recording = Recording()
    root = recording.turn(None, 2, 3, version="base/0")
    recording.turn(root, 1, 2, version="a/5")
    recording.turn(root, 2, 2, version="a/5")
    rows, ledger = read(recording)
    assert rows == []
    assert ledger.total().untrained == {Reason.STALE: 7}


def spoil(sample, **fields):
    return sample.model_copy(update=fields)


def one_sample():
    recording = Recording()
    recording.turn(None, 3, 4)
    return recording.samples()[0]


SAMPLE = one_sample()
NAN = struct.pack("<f", math.nan)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"token_ids": SAMPLE.token_ids[:-4]}, Reason.MALFORMED),
        ({"sampling_logprobs": SAMPLE.sampling_logprobs[:-4]}, Reason.MALFORMED),
        ({"loss_mask": bytes([0, 0, 0, 1, 1, 1, 2])}, Reason.MALFORMED),
        ({"loss_mask": bytes([0, 0, 1, 1, 1, 1, 1])}, Reason.MALFORMED),
        ({"token_ids": SAMPLE.token_ids[:-4] + struct.pack("<i", VOCABULARY)}, Reason.MALFORMED),
        ({"token_ids": SAMPLE.token_ids[:-4] + struct.pack("<i", -1)}, Reason.MALFORMED),
        ({"spans": [TokenSpan(version="a/1", start=3, end=6)]}, Reason.MALFORMED),
        ({"spans": [TokenSpan(version="a/1", start=2, end=7)]}, Reason.MALFORMED),
        ({"spans": [TokenSpan(version="a/1", start=3, end=8)]}, Reason.MALFORMED),
        ({"spans": [TokenSpan(version="a/1", start=3, end=7), TokenSpan(version="a/2", start=5, end=6)]}, Reason.MALFORMED),
        ({"completions": []}, Reason.MALFORMED),
        ({"completions": [SampledRange(start=3, end=9)]}, Reason.MALFORMED),
        ({"completions": [SampledRange(start=3, end=7, temperature=0.0)]}, Reason.MALFORMED),
        ({"sampling_logprobs": SAMPLE.sampling_logprobs[:-4] + NAN}, Reason.MISSING_LOGPROB),
    ],
)  # fmt: skip
def test_a_sample_that_contradicts_itself_trains_nothing(wrong, reason):
    ledger = Ledger()
    assert read_samples([spoil(SAMPLE, **wrong)], TERMS, ledger) == []
    assert set(ledger.total().untrained) == {reason}


def test_a_sample_with_an_id_that_the_reference_lacks_trains_nothing() -> None:
    held = bytes_to_ids(SAMPLE.token_ids)
    others = frozenset(range(VOCABULARY)) - {*held}
    for lacking, trains in ((frozenset(held[-1:]), False), (others, True)):
        ledger = Ledger()
        assert bool(read_samples([SAMPLE], replace(TERMS, lacking=lacking), ledger)) == trains
        assert set(ledger.total().untrained) == (set() if trains else {Reason.MALFORMED})


def test_what_a_contradictory_sample_says_to_have_sampled_is_booked_under_its_versions():
    ledger = Ledger()
    read_samples([spoil(SAMPLE, spans=[TokenSpan(version="a/1", start=3, end=6)])], TERMS, ledger)
    assert ledger.accounts() == {
        "a/1": Account(0, 0, {Reason.MALFORMED: 3}),
        UNKNOWN_VERSION: Account(0, 0, {Reason.MALFORMED: 1}),
    }


def test_a_first_token_has_nothing_that_could_predict_it():
    recording = Recording()
    recording.turn(None, 0, 4)
    rows, ledger = read(recording)
    assert (rows, ledger.total().untrained) == ([], {Reason.MALFORMED: 4})


def test_groups_without_signal_are_booked_by_their_reason():
    both = Recording()
    both.turn(None, 2, 4)
    ledger = Ledger()
    rows = read_samples([*both.samples(session("x.0", "x")), *both.samples(session("y.0", "y"))], TERMS, ledger)
    kept = drop_groups(rows, {"x": Reason.ZERO_VARIANCE}, ledger)
    assert [row.trial_id for row in kept] == ["y.0"]
    assert ledger.total().untrained == {Reason.ZERO_VARIANCE: 4}


def test_a_sample_that_is_lost_or_read_twice_shows_in_the_ledger():
    recording = Recording()
    root = recording.turn(None, 2, 4)
    recording.turn(root, 1, 3)
    recording.turn(root, 2, 2)
    for made in (recording.samples()[:1], [*recording.samples(), recording.samples()[1]]):
        ledger = Ledger()
        for version, tokens in received(recording.turns).items():
            ledger.sampled(version, tokens)
        for row in read_samples(made, TERMS, ledger):
            for version, tokens in row.trained_by_version().items():
                ledger.trained(version, tokens)
        with pytest.raises(LedgerImbalance):
            ledger.check()


@pytest.mark.parametrize("seed", range(25))
def test_whatever_a_session_looks_like_its_ledger_balances(seed):
    """Random trees, versions, laws, policies and rewards; `read` checks the balance."""
    rng = random.Random(seed)
    recording = Recording(seed)
    ids: list[str | None] = [None]
    for _ in range(rng.randint(1, 12)):
        n = rng.randint(0, 8)
        cut = rng.randint(0, n)
        old, new = rng.choices(["base/0", "a/1", "a/4", "a/5", "a/9", "lost/2"], weights=[1, 4, 9, 9, 1, 1], k=2)
        spans = [TokenSpan(version=old, start=0, end=cut), TokenSpan(version=new, start=cut, end=n)]
        ids.append(
            recording.turn(
                rng.choice(ids), rng.randint(1, 5), n,
                versions=[span for span in spans if span.end > span.start],
                constrained=[(0, cut)] if rng.random() < 0.3 else [],
                law={"temperature": rng.choice([0.7, 1.0, 1.0, 0.0])},
                policy=rng.choice(["default", "default", "frozen"]),
                superseded_by="f" * 12 if rng.random() < 0.2 else None,
            )
        )  # fmt: skip
    terms = TrainingTerms(
        HISTORY, max_staleness_steps=rng.randint(0, 5), max_tokens=rng.choice([15, 1000]), vocabulary=VOCABULARY
    )
    rows, _ = read(recording, terms, reward=rng.choice([None, 0.0, 1.0, 1.0]))
    for row in rows:
        assert row.trained_tokens > 0
        assert not row.loss_mask_T[0]
        assert row.sampling_logprobs_T[row.loss_mask_T].isfinite().all()
        assert (row.version_T[row.loss_mask_T] >= 0).all()
        assert row.token_ids_T.dtype == torch.int64

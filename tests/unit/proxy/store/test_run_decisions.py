"""Decisions about a run: said again they change nothing more, refused nothing at all; and Redis keeps what they made."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steno.contracts.errors import Conflict, NotFound
from steno.contracts.records import Group
from steno.contracts.runs.leases import LeaseName, LeaseRequest
from steno_proxy.store.redis.run.parts import STATE, WHOLE, NotRead, ReadParts, RedisRun, RunQuery, read, to_json
from steno_proxy.store.runs import decisions as decide
from steno_proxy.store.runs import leasing, overview
from steno_proxy.store.runs.account import GroupState, GroupStatus, RunAccount, TrialAccount
from steno_proxy.store.runs.settlement import EndedTrial

OUTCOMES = ("train", "unscored", "aborted", "deleted")
Act = Callable[[RunAccount, float], Any]


def made(name: str, *, size: int = 2, deadline_s: float | None = None, purpose: str = "train") -> Group:
    trials = [f"{name}.{number}" for number in range(size)]
    return Group(
        group_id=name, run_id="r", size=size, trial_ids=trials, created_at=1.0, deadline_s=deadline_s, purpose=purpose
    )  # fmt: skip


def ended(trial_id: str, outcome: str = "train", *, life: str = "1.0", final: bool = True) -> EndedTrial:
    group, borrowed = trial_id.partition(".")[0], trial_id.startswith("g2")
    tokens = {"w" if borrowed else "v": 3}
    return EndedTrial(trial_id, group, life, outcome, final, tokens, borrowed=borrowed)


def request(request_id: str | None = None, most: int = 1) -> LeaseRequest:
    return LeaseRequest(run_id="r", consumer="t", max_groups=most, ttl_s=50.0, request_id=request_id)


def _acts(draw: tuple[str, int, int]) -> Act:
    """One act that may be said again."""
    kind, a, b = draw
    name = f"g{a % 3}"
    grant = LeaseName("r", name, f"{'1.' if b % 2 else ''}n{a}{b // 2}0")

    def lease(run: RunAccount, now: float) -> Any:
        epoch = 1 if b % 2 else None
        prefix = f"{'1.' if b % 2 else ''}n{a}{b // 2}"
        return leasing.lease(run, request(f"q{a}{b}"), at_least=1, epoch=epoch, grant=prefix, now=now)[0]

    acts: dict[str, Act] = {
        "open": lambda run, now: decide.open_group(
            run, made(name, size=1 + a, deadline_s=5.0 if b else None, purpose="eval" if b == 3 else "train")
        ),
        "end": lambda run, now: decide.ended(run, ended(f"{name}.{b % 2}", OUTCOMES[b], final=a < 2), now),
        "again": lambda run, now: decide.ended(run, ended(f"{name}.{b % 2}", life="2.0"), now),
        "late": lambda run, now: decide.came_late(run, f"{name}.{b % 2}", f"turn{b}", {"v": 1}, "late", now),
        "due": lambda run, now: decide.close_due(run, now),
        "lets go": lambda run, now: decide.lets_go(run, name, now, serve=b != 0),
        "forget": lambda run, now: decide.forget(run, name, now, archived=b == 0),
        "lease": lease,
        "ack": lambda run, now: leasing.acknowledge(run, grant, now) and None,
        "release": lambda run, now: leasing.release(run, grant),
        "extend": lambda run, now: leasing.extend(run, grant, 20.0, b == 0, now),
        "take": lambda run, now: leasing.take_over(run, "r", f"t{a}", b == 0, now),
        "beat": lambda run, now: leasing.heartbeat(run, "r", f"t{a}", b, b == 3, now),
    }
    return acts[kind]


KINDS = (
    "open", "open", "end", "end", "end", "again", "late", "due", "lets go", "forget", "lease", "lease", "ack", "ack", "release",
    "extend", "take", "beat",
)  # fmt: skip
ACTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 3)), max_size=40)


def _state(run: RunAccount) -> dict[str, Any]:
    kept = {name: value for name, value in vars(run).items() if name != "_ordered"}
    return kept | {"totals": dict(run.totals), "ledger": dict(run.ledger)}


def test_a_group_that_runs_keeps_its_trials_and_goes_on_unless_it_is_to_be_served() -> None:
    run = RunAccount()
    decide.open_group(run, made("g0", size=2))
    decide.ended(run, ended("g0.0"), 2.0)
    assert not decide.lets_go(run, "g0", 3.0, serve=False) and run.groups["g0"].state == "running"
    assert not decide.lets_go(run, "g0", 3.0) and run.groups["g0"].state == "ready"
    decide.open_group(run, made("g1", size=1, purpose="eval"))
    assert decide.lets_go(run, "g1", 3.0, serve=False) and decide.lets_go(run, "nobody's", 3.0)


@example([("end", 1, 1), ("open", 1, 0), ("end", 1, 3)])  # ended before its group was there, then deleted
@given(ACTS)
def test_what_is_said_again_changes_nothing_more_and_what_is_refused_nothing_at_all(
    drawn: list[tuple[str, int, int]],
) -> None:
    run, now = RunAccount(), 2.0
    for one in drawn:
        act, now = _acts(one), now + 1.0
        before = copy.deepcopy(_state(run))
        try:
            said = act(run, now)
        except (Conflict, NotFound):
            assert _state(run) == before
            continue
        after = copy.deepcopy(_state(run))
        assert act(run, now) == said
        assert _state(run) == after


@example([("end", 0, 0), ("open", 0, 0), ("end", 0, 2)])  # told of before its group was there, and again
@given(ACTS)
def test_what_is_borrowed_is_never_counted_as_sampled_and_either_is_in_one_place(
    drawn: list[tuple[str, int, int]],
) -> None:
    """I4: sampled + borrowed = not trained + what leases bring, or will."""
    run, now = RunAccount(), 2.0
    for one in drawn:
        now += 1.0
        with contextlib.suppress(Conflict, NotFound):
            _acts(one)(run, now)
        found = overview.view("r", run, 0, [], now)
        assert set(found.borrowed) <= {"w"} and "w" not in found.sampled
        for version, tokens in found.to_account_for.items():
            lost = sum(by_version.get(version, 0) for by_version in found.not_trained.values())
            assert 0 <= lost <= tokens


@given(ACTS)
def test_the_totals_are_the_states(drawn: list[tuple[str, int, int]]) -> None:
    run, now = RunAccount(), 2.0
    for one in drawn:
        now += 1.0
        with contextlib.suppress(Conflict, NotFound):
            _acts(one)(run, now)
        states = [(place.purpose, place.state) for place in run.groups.values()]
        assert run.totals["train:running"] == states.count(("train", GroupState.RUNNING))
        assert run.totals["eval:running"] == states.count(("eval", GroupState.RUNNING))
        assert all(place.order for place in run.groups.values() if place.queued)
        assert all(place.granted for place in run.groups.values() if place.state is GroupState.LEASED)


TIMES = st.none() | st.floats(0.0, 2e9)
WORDS = st.sampled_from(["", "a", "3.f00", 'quo"te', "π"])
OTHER = st.dictionaries(st.sampled_from(["later", "zz"]), st.sampled_from([1, [], {"o": ""}, "x", None]))
PLACES = st.builds(
    GroupStatus, state=st.sampled_from(GroupState), purpose=st.sampled_from(["train", "eval"]), size=st.integers(1, 64),
    final=st.integers(0, 64), grants=st.integers(0, 9), order=st.sampled_from(["", "1-0", "1700000000000-3"]), ready_at=TIMES,
    consumer=WORDS, granted_at=TIMES, expires_at=TIMES, granted=WORDS, let_go=WORDS, settled=WORDS, forsaken=st.integers(0, 1),
    used=st.booleans(), made_at=TIMES, other=OTHER,
)  # fmt: skip
TRIALS = st.builds(
    TrialAccount, life=st.sampled_from(["1.0", "2.5"]), outcome=st.sampled_from(OUTCOMES), final=st.integers(0, 1),
    tokens=st.dictionaries(WORDS, st.integers(0, 2**40)), other=OTHER,
)  # fmt: skip


@given(PLACES)
def test_a_group_is_read_as_it_was_written(place: GroupStatus) -> None:
    raw = to_json(place)
    assert read(GroupStatus, raw.encode()) == place
    kept = json.loads(raw)
    assert [name for name in "spnfg" if name not in kept] == [], "older releases count on them"
    assert all(isinstance(kept[name], str) for name in "ytxm" if name in kept), "Lua would cut a number"


@given(TRIALS)
def test_a_trial_is_read_as_it_was_written(trial: TrialAccount) -> None:
    raw = to_json(trial)
    assert read(TrialAccount, raw.encode()) == trial
    assert json.loads(raw)["f"] in (0, 1) and type(json.loads(raw)["f"]) is int, "older releases add it up"


def test_groups_that_older_releases_wrote_are_read() -> None:
    """As their Lua encodes them: a false flag, and no time at which it was made."""
    raw = b'{"s":"leased","p":"train","n":2,"f":2,"o":"1-0","y":"12.5","g":1,"c":"t","t":"13.000001","x":"50.500000",'
    raw += b'"l":"a0","u":false}'
    place = read(GroupStatus, raw)
    assert (place.state, place.ready_at, place.granted_at, place.expires_at) == (
        GroupState.LEASED,
        12.5,
        13.000001,
        50.5,
    )
    assert (place.used, place.made_at, place.other) == (False, None, {})
    trial = read(TrialAccount, b'{"l":"1.0","o":"train","f":1,"k":{"v":5}}')
    assert (trial.final, trial.tokens) == (1, {"v": 5})


def _query_of(act: Act) -> RunQuery:
    with pytest.raises(NotRead) as missing:
        act(RedisRun(ReadParts()), 3.0)
    return missing.value.query


def test_a_decision_asks_for_what_it_was_not_given() -> None:
    name = LeaseName("r", "g", "1.x")
    assert _query_of(lambda run, now: leasing.acknowledge(run, name, now)) == RunQuery(trainer=True)
    assert _query_of(lambda run, now: leasing.release(run, name._replace(grant="x"))) == RunQuery(groups={"g": STATE})
    assert _query_of(lambda run, now: decide.ended(run, ended("g.0"), now)) == RunQuery(taken=["g.0/1.0"])
    assert _query_of(lambda run, now: run.whole(["g", "h"])) == RunQuery(groups={"g": WHOLE, "h": WHOLE})
    assert _query_of(lambda run, now: run.trials["g.0"]) == RunQuery(trials=["g.0"])


def test_a_whole_group_is_read_when_an_end_may_complete_it_or_all_that_come() -> None:
    asked = RunQuery()
    for number in range(3):
        asked.add(RunQuery(groups={"g": 1}, trials=[f"g.{number}"]))
    asked.add(RunQuery(most=2, least=2))
    asked.add(RunQuery(most=3, least=1))
    assert asked == RunQuery(groups={"g": 3}, trials=["g.0", "g.1", "g.2"], most=5, least=1)


def test_who_takes_over_takes_also_what_was_leased_in_the_same_batch() -> None:
    whole = RunAccount()
    decide.open_group(whole, made("g", size=1))
    decide.ended(whole, ended("g.0"), 2.0)
    leasing.take_over(whole, "r", "t1", True, 3.0)
    found = ReadParts()
    found.fresh = ["g"]
    found.parts["groups"] = {"g": to_json(whole.groups["g"]).encode()}
    found.parts["docs"] = {"g": whole.records["g"].model_dump_json().encode()}
    found.parts["trials"] = {"g.0": to_json(whole.trials["g.0"]).encode()}
    found.parts["trainer"] = {"": [b"t1", b"1", b"3.0"]}
    for run in (RedisRun(found), whole):
        assert len(leasing.lease(run, request(), at_least=1, epoch=1, grant="1.n", now=4.0)[0]) == 1
        assert leasing.take_over(run, "r", "t2", True, 4.0) == 2
        assert run.groups["g"].state is GroupState.READY

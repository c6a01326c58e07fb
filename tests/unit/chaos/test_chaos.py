"""The chaos suite's own parts: a seed draws the same schedule again, and its checkers find what they are for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.records import (
    ForkReason,
    Session,
    Timings,
    TokenSpan,
    Turn,
    WorkerSpan,
    bytes_to_ids,
    floats_to_bytes,
    ids_to_bytes,
)
from steno.contracts.runs.leases import RunGroups, RunView
from tests.chaos.clients.agents import Seen, Trial
from tests.chaos.clients.formats import FORMATS, Call, Misspoken
from tests.chaos.clients.trainer import Taken
from tests.chaos.invariants import check_heard, check_ledger, check_received, check_seen, check_session, check_turns
from tests.chaos.journal import Journal, Sampled, check_sampled, read
from tests.chaos.mutants import MUTANTS, WORKER_MUTANTS
from tests.chaos.predict import Token, answer, logprob, message_of, prompt_digest, render
from tests.chaos.schedule import FAILOVERS, FAULTS, LATER, LONG, MODELS, OTHER, PACKETS, REPLICAS, Fault, draw

VERSIONS = ["base/0", "chaos/1"]


def test_a_seed_draws_the_same_schedule_again() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert str(draw(7)) == str(draw(7)) != str(draw(8))


def test_two_hundred_seeds_have_every_fault_and_every_end() -> None:
    schedules = [draw(seed) for seed in range(1, 201)]
    assert {fault.kind for schedule in schedules for fault in schedule.faults} == {
        *FAULTS,
        *LATER,
        *PACKETS,
        *FAILOVERS,
        *OTHER,
    }
    ends = {agent.end for schedule in schedules for agent in schedule.agents}
    assert ends == {"completed", "gone", "cut-short", "deleted", "deleted-early"}
    spoken = {(agent.format, agent.client, any(agent.streams)) for one in schedules for agent in one.agents}
    assert {name for name, _, _ in spoken} == set(FORMATS)
    assert {(name, "raw", True) for name in FORMATS} <= spoken and {(name, "sdk", False) for name in FORMATS} <= spoken
    assert {how for one in schedules for how in one.trainer} == {"ack", "release", "lapse", "late", "extend"}
    assert any(any(one.deadlines) for one in schedules)
    assert {one.second for one in schedules} == {"", "beside", "successor"}
    asked = [set(agent.models) for one in schedules for agent in one.agents]
    assert {"any"} in asked and set(MODELS) in asked and all(len(names) <= 2 for names in asked)
    assert all(0 <= replica < REPLICAS for one in schedules for agent in one.agents for replica in agent.replicas)


def test_a_longer_run_has_what_others_have_and_one_more_fault() -> None:
    for seed in range(1, 20):
        usual, long = draw(seed), draw(seed, long=True)
        [added] = set(long.faults) - set(usual.faults)
        assert added.kind in LONG and added.lasts_s >= 20 and long.agents == usual.agents


def test_faults_can_be_left_out() -> None:
    whole = draw(4)
    assert draw(4, only=(1, 3)).faults == (whole.faults[1], whole.faults[3])
    assert draw(4, only=(1, 3)).agents == whole.agents


def turn(turn_id: str, parent: Turn | None = None, before: bytes = b"", **changed: Any) -> tuple[Turn, bytes]:
    """A right turn, and its path's ids."""
    messages = [{"role": "user", "content": f"ask {turn_id}"}]
    new = ids_to_bytes(render(messages))
    digest = prompt_digest(before, new)
    tokens: tuple[Token, ...] = answer(digest)
    content, calls = message_of(tokens)
    split = len(tokens) // 2
    versions = [VERSIONS[position >= split] for position in range(len(tokens))]
    record = Turn(
        turn_id=turn_id,
        parent_id=parent.turn_id if parent else None,
        new_prompt_ids=new,
        served_model="chaos",
        prompt_digest=digest,
        completion_ids=ids_to_bytes([token.id for token in tokens]),
        sampling_logprobs=floats_to_bytes([logprob(digest, at, version) for at, version in enumerate(versions)]),
        versions=[
            TokenSpan(version="base/0", start=0, end=split),
            TokenSpan(version="chaos/1", start=split, end=len(tokens)),
        ],
        messages=messages,
        reply={
            "content": content,
            "tool_calls": [{"id": "", "function": {"name": n, "arguments": a}} for n, a in calls],
        },
        timings=Timings(queued=0.0),
    )
    return record.model_copy(update=changed), before + new + record.completion_ids


def test_right_turns_pass() -> None:
    first, path = turn("a")
    second, _ = turn("b", first, path)
    assert check_turns([first, second], VERSIONS) == []


RIGHT, _ = turn("a")
IDS = RIGHT.completion_ids
SPANS = RIGHT.versions
WRONG: dict[str, dict[str, Any]] = {
    "a token lost": {"completion_ids": IDS[4:]},
    "a token twice": {"completion_ids": IDS[:4] + IDS},
    "whole though cut off": {"completion_ids": IDS[:-4]},
    "a log-probability of another token": {"sampling_logprobs": RIGHT.sampling_logprobs[::-1]},
    "no log-probability": {"sampling_logprobs": b""},
    "the version that came later": {"versions": [TokenSpan(version="chaos/1", start=0, end=len(IDS) // 4)]},
    "a version that there never was": {"versions": [TokenSpan(version="chaos/9", start=0, end=len(IDS) // 4)]},
    "a gap between versions": {"versions": SPANS[1:]},
    "a gap between workers": {"workers": [WorkerSpan(worker_id="w", start=3, end=len(IDS) // 4)]},
    "another prompt": {"new_prompt_ids": RIGHT.new_prompt_ids[4:]},
    "the prompt of another model": {"served_model": "other"},
    "versions of another policy": {"policy": "other"},
    "another reply": {"reply": {"content": "no"}},
    "a parent that is not there": {"parent_id": "lost"},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_turn_is_found(name: str) -> None:
    assert check_turns([turn("a", **WRONG[name])[0]], VERSIONS)


def test_a_conversation_that_goes_on_with_another_model_is_found() -> None:
    first, path = turn("a")
    second, _ = turn("b", first, path)
    assert any(
        "goes on after tokens" in one
        for one in check_turns([first.model_copy(update={"served_model": "other"}), second], VERSIONS)
    )


def test_a_conversation_that_changes_its_tokenizer_is_rendered_from_the_record() -> None:
    messages = [{"role": "user", "content": text} for text in ("first", "as the client wrote it", "last")]
    recorded = [messages[0], {"role": "user", "content": "as it is on record"}, messages[2]]
    for rendered, reason, wrong in (
        (recorded, ForkReason.TOKENIZER_CHANGED, False), (recorded, None, True),
        (recorded[:2], ForkReason.TOKENIZER_CHANGED, True),
    ):  # fmt: skip
        changed, _ = turn("a", messages=messages, new_prompt_ids=ids_to_bytes(render(rendered)), fork_reason=reason)
        assert any("new prompt ids" in one for one in check_turns([changed], VERSIONS)) == wrong


def test_a_turn_on_record_twice_is_found() -> None:
    assert check_turns([RIGHT, RIGHT], VERSIONS)


def saw(record: Turn, **changed: Any) -> Trial:
    calls = [
        Call(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in record.reply["tool_calls"]
    ]
    seen = Seen(record.turn_id, "ask a", record.reply["content"], calls)
    for name, value in changed.items():
        setattr(seen, name, value)
    return Trial("t", draw(1).agents[0], seen=[seen], asked=["ask a"])


def test_what_an_agent_saw_is_looked_for() -> None:
    assert check_seen(saw(RIGHT), [RIGHT]) == ([], 0)
    assert check_seen(saw(RIGHT), [])[0]
    assert check_seen(saw(RIGHT, content="other"), [RIGHT])[0]
    assert check_seen(saw(RIGHT, model="any"), [RIGHT]) == check_seen(saw(RIGHT, model="chaos"), [RIGHT]) == ([], 0)
    assert check_seen(saw(RIGHT, model="other"), [RIGHT])[0]
    assert check_seen(saw(RIGHT), [RIGHT.model_copy(update={"partial": True})])[0]
    assert check_seen(saw(RIGHT), [RIGHT.model_copy(update={"superseded_by": "b"})])[0]


def test_blocks_that_an_agent_saw_closed_are_looked_for() -> None:
    acted = saw(RIGHT, content=RIGHT.reply["content"][:5], calls=[])
    acted.seen, acted.acted_on = [], acted.seen
    assert check_seen(acted, [RIGHT.model_copy(update={"partial": True})]) == ([], 0)
    assert check_seen(acted, [])[0]
    acted.acted_on[0].content = "other"
    assert check_seen(acted, [RIGHT])[0]


def test_what_an_agent_heard_of_an_answer_that_broke_is_looked_for() -> None:
    trial, view = saw(RIGHT, content=RIGHT.reply["content"][:5]), RunView(run_id="r")
    trial.seen, trial.heard = [], trial.seen
    assert check_heard(trial, [RIGHT], [], view) == []
    assert check_heard(trial, [], [Fault(0.1, "replica-kill", 1)], view), "another replica was"
    assert check_heard(trial, [], [Fault(0.1, "replica-kill", 0)], view) == []
    assert check_heard(trial, [], [], view.model_copy(update={"not_trained": {"late": {"base/0": 1}}})) == []


def test_a_request_answered_twice_is_found_unless_it_was_repeated() -> None:
    twin = RIGHT.model_copy(update={"turn_id": "twin"})
    wrong, twice = check_seen(saw(RIGHT), [RIGHT, twin])
    assert len(wrong) == 1 and twice == 1
    repeated = saw(RIGHT)
    repeated.retried.add("ask a")
    assert check_seen(repeated, [RIGHT, twin]) == ([], 1)


def test_a_session_that_is_not_as_it_was_completed_is_found() -> None:
    session = Session(trial_id="t", status="completed", reward=1.0, created_at=0.0, updated_at=0.0)
    trial = saw(RIGHT)
    assert check_session(trial, session, []) == []
    assert check_session(trial, session, [RIGHT])
    assert check_session(trial, session.model_copy(update={"status": "open"}), [])


def test_a_ledger_that_does_not_balance_is_found() -> None:
    view = RunView(
        run_id="r", groups=RunGroups(empty=1), sampled={"base/0": 5}, not_trained={"unscored": {"base/0": 5}}
    )
    right, groups = {"g.0": Counter({"base/0": 5})}, {"g": False}
    assert check_ledger(view, Taken(), right, groups) == []
    assert check_ledger(view, Taken(), {"g.0": Counter({"base/0": 4})}, groups)
    assert check_ledger(view, Taken(), right, groups | {"other": False})
    assert check_ledger(view.model_copy(update={"not_trained": {}}), Taken(), right, groups)


def test_a_replica_that_does_not_say_where_its_tokens_went_is_found() -> None:
    right = {"received": 10, "completion": 7, "unrecorded": 2, "late": 1}
    counted = {f"steno_proxy_{kind}_tokens_total": count for kind, count in right.items()}
    assert check_received(counted) == [] == check_received({})
    assert check_received({**counted, "steno_proxy_completion_tokens_total": 6})


def test_what_missed_its_groups_deadline_is_late_and_nothing_else_is() -> None:
    late = {"late": {"base/0": 5}}
    view = RunView(run_id="r", groups=RunGroups(empty=1), sampled={"base/0": 5}, not_trained=late)
    assert check_ledger(view, Taken(), {"g.0": Counter({"base/0": 5})}, {"g": True}) == []
    assert check_ledger(view, Taken(), {"g.0": Counter({"base/0": 5})}, {"g": False})
    assert check_ledger(view, Taken(), {"g.0": Counter({"base/0": 6})}, {"g": True})


def journal_of(record: Turn, worker: str = "w0", attempt: int = 0) -> list[Sampled]:
    ids = bytes_to_ids(record.completion_ids).tolist()
    versions = [span.version for span in record.versions for _ in range(span.start, span.end)]
    return [
        Sampled(worker, "t", record.turn_id, attempt, at, token, version)
        for at, (token, version) in enumerate(zip(ids, versions, strict=True))
    ]


ONE = RIGHT.model_copy(update={"worker_id": "w0"})
SAMPLED = journal_of(ONE)
CUT = ONE.model_copy(update={"completion_ids": IDS[:8], "partial": True})


def test_what_was_sampled_is_held_against_the_record() -> None:
    count = len(SAMPLED)
    assert check_sampled(SAMPLED, {"t": [ONE]}, {"t": True}) == ([], Counter(recorded=count))
    lost = journal_of(ONE, "w1")
    again = ONE.model_copy(update={"attempt": 1})
    assert check_sampled(lost + journal_of(ONE, attempt=1), {"t": [again]}, {"t": True})[1]["sampled again"] == count
    assert check_sampled(SAMPLED, {"t": [CUT]}, {}) == ([], Counter({"recorded": 2, "after the end": count - 2}))
    assert check_sampled(SAMPLED, {}, {"t": True}) == ([], Counter({"with its trial": count}))
    assert check_sampled(SAMPLED, {"t": []}, {}) == ([], Counter(unrecorded=count))


def test_a_turn_that_another_took_the_place_of_was_sampled_under_the_name_of_that_one() -> None:
    left = CUT.model_copy(update={"superseded_by": "next"})
    sampled = [one._replace(turn_id="next") for one in SAMPLED]
    wrong, fates = check_sampled(sampled, {"t": [left]}, {})
    assert wrong == []
    assert fates.total() == len(SAMPLED)
    first = CUT.model_copy(update={"turn_id": "first", "superseded_by": left.turn_id})
    last = ONE.model_copy(update={"turn_id": "next"})
    assert check_sampled(sampled, {"t": [first, left, last]}, {})[0] == [], "or of one after that"
    assert check_sampled(sampled, {"t": [CUT]}, {})[0] == [], "that one was left in its turn"
    assert check_sampled(sampled, {"t": [ONE]}, {})[0], "a whole turn is known by its own name"
    assert check_sampled([one._replace(trial_id="u") for one in sampled], {"t": [left]}, {})[0], "of another trial"


def test_what_no_engine_sampled_is_found_and_what_nobody_recorded() -> None:
    assert check_sampled(SAMPLED[1:], {"t": [ONE]}, {})[0]
    assert check_sampled(journal_of(ONE, "w1"), {"t": [ONE]}, {})[0], "another worker did"
    assert check_sampled(SAMPLED, {"t": []}, {"t": True})[0]
    assert check_sampled(SAMPLED, {"t": [CUT]}, {"t": True})[0]


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "w0", "w0")
    journal.note("run-0.1", "a", 0, 1, 7, "base/0")
    journal.note("other-0.1", "b", 0, 1, 7, "base/0")
    with (tmp_path / "w0").open("a") as file:
        file.write("\nw0 run-0.1 c 0 1")  # it was killed while it wrote
    Journal(tmp_path / "w0", "w0").note("other-0.1", "b", 0, 1, 7, "base/0")
    assert list(read([tmp_path / "w0", tmp_path / "w1"], "run")) == [Sampled("w0", "run-0.1", "a", 0, 1, 7, "base/0")]


def event(**fields: Any) -> str:
    return json.dumps(fields)


CHUNK: dict[str, Any] = {"id": "chatcmpl-a", "choices": [{"delta": {"content": "x"}, "finish_reason": None}]}
MISSPOKEN: dict[str, list[str]] = {
    "chat": [json.dumps(CHUNK), "[DONE]"],
    "messages": [event(type="content_block_stop", index=0)],
    "responses": [event(type="response.created", sequence_number=1, response={"id": "resp_a"})],
    "gemini": [event(responseId="a"), event(responseId="b")],
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_out_of_order_is_found(name: str) -> None:
    reader = FORMATS[name].reader()
    with pytest.raises(Misspoken):
        for data in MISSPOKEN[name]:
            reader.event(data)


def test_a_messages_stream_that_a_keepalive_began_may_begin_with_an_error_and_ends_with_it() -> None:
    reader = FORMATS["messages"].reader()
    reader.event(event(type="error", error={"type": "not_found_error", "message": "the session has ended (completed)"}))
    assert not reader.whole
    with pytest.raises(Misspoken, match="an event after"):
        reader.event(event(type="message_start", message={"id": "msg_a"}))


@pytest.mark.parametrize("name", [*MUTANTS, *WORKER_MUTANTS])
def test_what_is_made_wrong_is_there_to_be_made_wrong(name: str) -> None:
    code = f"from tests.chaos import mutants; (mutants.MUTANTS | mutants.WORKER_MUTANTS)[{name!r}]()"
    subprocess.run([sys.executable, "-c", code], check=True)

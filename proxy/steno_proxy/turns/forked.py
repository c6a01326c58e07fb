"""A forked trial's requests: told again from its origin's record until the turn of the fork, and sampled from there on.

    asked before, in the origin     its answer is recorded here under the same turn id, nothing sampled, and told (`replay.py`)
    the turn of the fork is here    whatever else is asked is sampled, after the same ids
    that turn, to be sampled anew   it is sampled, after the same prompt
    anything else                   the trial ends: `replay_diverged`, and what was asked is on record with what should have been

The same turn id means that tool-call ids are those of the origin, and that a turn is told once, whichever replica is
asked (ADR 28).
What an origin's turn sampled stands among this turn's new prompt ids: so it is trained once, in its own trial (I4).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from hashlib import blake2b

import msgspec

from steno.contracts.chat import CanonicalRequest, Message
from steno.contracts.errors import ReplayDiverged, StoreUnavailable
from steno.contracts.records import ForkReason, IndexRow, Timings, Turn
from steno_proxy.dialects.base import Dialect
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.session_state import Recording
from steno_proxy.sessions import prompt_index
from steno_proxy.sessions.may_differ import ForkComparison
from steno_proxy.sessions.messages.call_ids import client_call_id, parse_call_id
from steno_proxy.sessions.messages.normalise import message_digest
from steno_proxy.sessions.origin import ForkOrigin, OriginAnswer
from steno_proxy.store.interface import TokenPath
from steno_proxy.turns.continuation import Plan
from steno_proxy.turns.interfaces import TurnClient
from steno_proxy.turns.replay import Replay
from steno_proxy.turns.turn_record import options_of

MOST_CHARS = 1000
"""Of each of the two texts that differ."""
_BEFORE_CHARS = 200
"""Of these, how many before the first difference."""
_TOLD = "this trial replays a recorded trial, and this request is not the one on record; the session has ended"


async def from_record(
    recorder: Recorder, recording: Recording, dialect: Dialect, asked: CanonicalRequest, plan: Plan, client: TurnClient,
    clock: Callable[[], float], task_step: str | None,
) -> Replay | Plan:  # fmt: skip
    """Return the replay that answers a request of a forked trial, or the plan with which it is to be sampled.

    Args: task_step: the task step that the trial was at when the request came.
    Raises: ReplayDiverged, and the trial has ended. NotFound, Gone: the origin is not there any more. ArchiveUnreadable: it can't
        be read now. StoreUnavailable: also if the store has lost the turns that show that this trial is past its fork.
    """
    session = recording.session
    assert session is not None and session.fork_of is not None
    origin = await recorder.origins.of(None, session.fork_of)
    used = _Used(recording)
    key = key_of(origin, asked, plan)
    answer = origin.answer(key, asked.n, used)
    if answer is not None:
        return await _record_and_replay(
            recorder, recording, dialect, asked, plan, client, clock(), origin, answer, task_step
        )
    if origin.fork.resample and key == origin.forked.asked and not _has_own(recording, origin):
        plan = await _same_prompt(recorder, origin, plan)
        plan.resamples = True
        return plan
    if _is_past(recording, origin):
        return plan
    if (again := origin.last_answer(key, asked.n)) is not None:  # its client had not got it, or asks once more
        return await _record_and_replay(
            recorder, recording, dialect, asked, plan, client, clock(), origin, again, task_step
        )
    if recording.passed_fork:  # so a missing turn, not the agent, is the cause
        raise StoreUnavailable(f"the store has lost recorded turns of trial {recording.trial_id}")
    raise await _diverged(recorder, recording, asked, plan, clock(), origin, used, task_step)


def key_of(origin: ForkOrigin, asked: CanonicalRequest, plan: Plan) -> bytes | None:
    """The key under which the origin has what is asked; None: it can't have anything like it."""
    after = plan.parent_id if plan.parent >= 0 and not plan.is_prompt else None
    messages = plan.new_messages if after is not None else plan.messages
    key = origin.key(after, messages, plan.job.prompt_ids, plan.job.tools, plan.options)
    if after is None or origin.knows(key, asked.n):
        return key
    # An older version may have recorded it as a whole conversation, if it did not recognise an echo in it.
    whole = origin.key(None, asked.job.messages, plan.job.prompt_ids, plan.job.tools, plan.options)
    return whole if origin.knows(whole, asked.n) else key


def is_replayed(recording: Recording, plan: Plan) -> bool:
    """Whether a request of a forked trial goes on from a turn on record, whose ids may be the origin's."""
    session = recording.session
    return session is not None and session.fork_of is not None and plan.parent >= 0


class _Used:
    """The turns of the origin that are on record here, or are about to be."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __contains__(self, turn_id: object) -> bool:
        known = self._recording
        return turn_id in known.replaying or known.tree.number(str(turn_id)) >= 0


def _is_past(recording: Recording, origin: ForkOrigin) -> bool:
    """Whether the trial is past its fork, so that what it asks is new: the turn of the fork is on record, or is sampled anew."""
    if not origin.fork.resample:
        return recording.tree.number(origin.fork.turn_id) >= 0
    return recording.resampling > 0 or _has_own(recording, origin)


def _has_own(recording: Recording, origin: ForkOrigin) -> bool:
    """Whether this trial has a turn on record that is not one of the origin's."""
    return any(turn_id not in origin.ended for turn_id in recording.tree.ids)


async def _same_prompt(recorder: Recorder, origin: ForkOrigin, plan: Plan) -> Plan:
    """The plan with the messages and tools that the turn of the fork was asked, so that its prompt has the same ids."""
    if plan.is_prompt:
        return plan
    turn = await recorder.origins.turn(origin.fork, origin.forked)
    at = plan.prefix.messages
    if turn.parent_id != plan.parent_id or len(turn.messages) != len(plan.messages) - at:
        return plan
    # Results of calls may come in another order. own: the id that the worker is to see, by the call that a result names.
    own: dict[tuple[str, int] | None, str] = {}
    for asked, sent in zip(plan.messages[at:], plan.job.messages[at:], strict=True):
        if named := parse_call_id(asked.get("tool_call_id") or ""):
            own[named] = sent["tool_call_id"]
    said: list[Message] = plan.job.messages[:at]
    for theirs, sent in zip(turn.messages, plan.job.messages[at:], strict=True):
        call_id = own.get(parse_call_id(theirs.get("tool_call_id") or ""), sent.get("tool_call_id"))
        said.append({**theirs, "tool_call_id": call_id} if call_id else theirs)
    plan.job = msgspec.structs.replace(plan.job, messages=said, tools=turn.tools)
    return plan


# -- told again


async def _record_and_replay(
    recorder: Recorder, recording: Recording, dialect: Dialect, asked: CanonicalRequest, plan: Plan, client: TurnClient,
    now: float, origin: ForkOrigin, answer: OriginAnswer, task_step: str | None,
) -> Replay:  # fmt: skip
    """Record the answer here, and tell it (I3). What is on record here already stays as it is."""
    names = {turn.turn_id for turn in answer.turns}
    recording.replaying |= names
    turns = []
    try:
        for known in answer.turns:
            theirs = await recorder.origins.turn(origin.fork, known)
            place = await _place(recorder, origin, plan, theirs)
            turn, row, path = replayed(theirs, asked, dialect, place, now)
            turn.task_step = task_step
            turn.index = await recorder.commit(recording, turn, row)
            recorder.keep_path(recording, turn.turn_id, TokenPath(path, turn.reply), turn.parent_id)
            turns.append(turn)
    finally:
        recording.replaying -= names
    return Replay(recorder.store, recording.trial_id, dialect, asked, client, turns, plan.prefix.ids)


async def _place(recorder: Recorder, origin: ForkOrigin, plan: Plan, theirs: Turn) -> Plan:
    """Return the plan that the turn is recorded with here. The turn keeps all ids of its path in the origin: if they begin with
    the ids of its parent here, the rest are its new prompt ids; else it is a root with all of them."""
    if plan.parent_id == theirs.parent_id:
        return plan
    before = await _path(recorder, origin, theirs)
    if plan.parent >= 0 and before.startswith(plan.prefix.ids) and plan.prefix.ids:
        theirs.new_prompt_ids = before[len(plan.prefix.ids) :] + theirs.new_prompt_ids
        return plan
    theirs.new_prompt_ids = before + theirs.new_prompt_ids
    return plan.rerooted(theirs.fork_reason or ForkReason.NEW_CONVERSATION) if plan.parent >= 0 else plan


async def _path(recorder: Recorder, origin: ForkOrigin, theirs: Turn) -> bytes:
    """All ids before the turn's own."""
    pieces: list[bytes] = []
    known = {turn.turn_id: turn for turn in origin.before}
    parent = theirs.parent_id
    while parent is not None:
        turn = await recorder.origins.turn(origin.fork, known[parent])
        pieces += (turn.completion_ids, turn.new_prompt_ids)
        parent = turn.parent_id
    return b"".join(reversed(pieces))


def replayed(
    theirs: Turn, asked: CanonicalRequest, dialect: Dialect, plan: Plan, now: float
) -> tuple[Turn, IndexRow, bytes]:
    """A turn of the origin as this trial's: its record, its index row, and the ids of its whole path.

    What was asked stands in it as it was asked here, which is what its client will send back; ids and reply are the origin's.
    """
    before = plan.prefix.ids if plan.parent >= 0 else b""
    said = (
        theirs.completion_ids
        if theirs.replayed is None
        else theirs.new_prompt_ids[-4 * theirs.replayed or len(theirs.new_prompt_ids) :]
    )
    new_ids = theirs.new_prompt_ids + theirs.completion_ids
    path = before + new_ids
    calls = theirs.reply.get("tool_calls") or []
    named = {call["id"]: _renamed(call["id"], dialect, theirs.turn_id, i) for i, call in enumerate(calls)}
    reply = theirs.reply
    if calls:
        reply = {**reply, "tool_calls": [{**call, "id": named[call["id"]]} for call in calls]}
    messages = plan.new_messages if plan.parent >= 0 else plan.messages
    if "own_tools" not in theirs.options.get("kept", {}):  # of a release in which a conversation's tools did not go on
        for carried in (asked.kept, asked.carried):
            for name in ("own_tools", "tools_not_offered"):
                carried.pop(name, None)
    turn = theirs.model_copy(update={
        "parent_id": plan.parent_id if plan.parent >= 0 else None, "index": -1,
        "fork_reason": theirs.fork_reason if theirs.choice else plan.fork_reason,
        "dialect": dialect.name, "model": asked.model, "worker_id": "", "attempt": 0, "workers": [], "retry_of": None,
        "superseded_by": None, "replayed": len(said) // 4, "new_prompt_ids": new_ids, "prompt_tokens": len(path) // 4,
        "prompt_digest": blake2b(path, digest_size=16).digest(), "completion_ids": b"", "sampling_logprobs": b"",
        "versions": [], "constrained": [], "mixed_kv": False, "delivered": 0, "asked": asked.asked, "messages": messages,
        "reply": reply, "call_ids": {named.get(mine, mine): own for mine, own in theirs.call_ids.items()},
        "tools": plan.job.tools, "options": options_of(plan, {}, [], asked.kept), "cached_tokens": 0,
        "timings": Timings(queued=now, started=now, first_token=now, last_token=now),
    })  # fmt: skip
    row = IndexRow(
        turn_id=turn.turn_id,
        parent=plan.parent,
        digests=_digests(plan, reply, path, said),
        tools=plan.tools,
        options=plan.options,
        finish=turn.finish_reason,
        partial=False,
        path_tokens=len(path) // 4,
        own_call_ids=[theirs.call_ids.get(call["id"], "") for call in calls],
        completion_tokens=0,
        tokenizer=bytes.fromhex(theirs.tokenizer),
    )
    return turn, row, path


def _renamed(call_id: str, dialect: Dialect, turn_id: str, place: int) -> str:
    """The id of a recorded call in the form that this trial's client expects."""
    named = parse_call_id(call_id)
    return client_call_id(dialect.call_prefix, turn_id, named[1] if named else place)


def _digests(plan: Plan, reply: Message, path: bytes, said: bytes) -> bytes:
    if not plan.is_prompt:
        own = plan.digests[plan.prefix.messages :] if plan.parent >= 0 else plan.digests
        return b"".join(own) + message_digest(reply)
    if plan.options == prompt_index.IDS:
        return prompt_index.digests(path[: len(path) - len(said)], path)
    text = plan.job.prompt_text or ""
    return prompt_index.digests(text.encode(), (text + (reply.get("content") or "")).encode())


# -- diverged


async def _diverged(
    recorder: Recorder, recording: Recording, asked: CanonicalRequest, plan: Plan, now: float, origin: ForkOrigin,
    used: Container[str], task_step: str | None,
) -> ReplayDiverged:  # fmt: skip
    """End the trial, with what was asked on record as a turn that sampled nothing. Returns: the error for its agent, which says
    nothing of the other trial (I8)."""
    nearest = origin.nearest(plan.parent_id, used)
    theirs = await recorder.origins.turn(origin.fork, nearest) if nearest is not None else None
    error = f"replay_diverged: {difference(plan, theirs, origin.comparison)}"
    path = plan.prefix.ids if plan.parent >= 0 else b""
    messages = plan.new_messages if plan.parent >= 0 else plan.messages
    turn = Turn(
        turn_id=os.urandom(6).hex(), parent_id=plan.parent_id, fork_reason=plan.fork_reason, index=-1, dialect=asked.dialect,
        model=asked.model, prompt_tokens=len(path) // 4, finish_reason="error", partial=True, error=error, delivered=0,
        asked=asked.asked, messages=messages, reply={"role": "assistant", "content": ""}, tools=plan.job.tools,
        options=options_of(plan, {}, [], asked.kept), timings=Timings(queued=now),
        task_step=task_step,
    )  # fmt: skip
    row = IndexRow(
        turn_id=turn.turn_id, parent=plan.parent, digests=_digests(plan, turn.reply, plan.job.prompt_ids or b"", b""),
        tools=plan.tools, options=plan.options, finish="error", partial=True, path_tokens=len(path) // 4,
        completion_tokens=0,
    )  # fmt: skip
    await recorder.commit(recording, turn, row)
    told = ReplayDiverged(_TOLD)
    await recorder.diverged(recording.trial_id, told)
    return told


def difference(plan: Plan, theirs: Turn | None, comparison: ForkComparison) -> str:
    """In words, with the first message that differs, as it was recorded and as it was asked.

    Args: theirs: the turn that would have been next; None: all have been told.
    """
    if theirs is None:
        return "the origin has no more turns to replay: all of them have been asked for"
    where = f"turn {theirs.turn_id} of the origin"
    if plan.parent >= 0 and theirs.parent_id != plan.parent_id:
        where += ", which does not go on from the same turn"
    asked = plan.new_messages if plan.parent >= 0 else plan.messages
    for place in range(max(len(asked), len(theirs.messages))):
        pair = [messages[place] if place < len(messages) else None for messages in (theirs.messages, asked)]
        texts = [_text(message and comparison.without(message)) for message in pair]
        if texts[0] != texts[1] or None in pair:
            recorded, now = _around(texts[0], texts[1])
            return f"new message {place} differs from {where}; recorded: {recorded!r}; asked: {now!r}"
    if plan.job.prompt_ids is not None:
        return f"the ids of the prompt are others than those of {where}"
    if comparison.tools(plan.job.tools) != comparison.tools(theirs.tools):
        pair_of_tools = [
            comparison.text(msgspec.json.encode(tools).decode()) for tools in (theirs.tools, plan.job.tools)
        ]
        recorded, now = _around(*pair_of_tools)
        return f"the tools differ from those of {where}; recorded: {recorded!r}; asked: {now!r}"
    return f"template options, or the number of choices, differ from those of {where}, or that turn has been replayed already"


def _text(message: Message | None) -> str:
    if message is None:
        return "(no such message)"
    content = message.get("content")
    said = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    calls = [(call["function"]["name"], call["function"].get("arguments")) for call in message.get("tool_calls") or ()]
    return f"{message.get('role')}: {said}" + (f" calls {calls}" if calls else "")


def _around(first: str, second: str) -> tuple[str, str]:
    """The two from a little before where they part, and no more than MOST_CHARS of each."""
    part = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    start = max(0, part - _BEFORE_CHARS)
    return first[start : start + MOST_CHARS], second[start : start + MOST_CHARS]

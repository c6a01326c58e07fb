"""Stored answers: says which turns are stored answers, and puts the conversation into requests that go on from one.

Nothing is stored for it but the turn's record (I5): the conversation is put together from the turns of its path. A
turn is a stored answer if its dialect kept something of the request (`CanonicalRequest.kept`), it is whole, and its
client has not deleted it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from steno.contracts.chat import RECORDED, CanonicalRequest, Message
from steno.contracts.errors import BadRequest, NotFound, PreviousNotFound
from steno.contracts.records import Turn
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.session_state import Recording


async def answer_of(recorder: Recorder, recording: Recording, turn_id: str) -> tuple[Turn, dict[str, Any]]:
    """The turn of a stored answer, and what its dialect kept.

    Raises: NotFound: there is no such turn, or it is no stored answer; StoreUnavailable, Gone.
    """
    turn = await _turn(recorder, recording, turn_id)
    kept = turn.options.get("kept")
    if not kept or turn.partial or await recorder.store.hidden(recording.trial_id, turn_id):
        raise _not_found(turn_id)
    return turn, kept


async def _turn(recorder: Recorder, recording: Recording, turn_id: str) -> Turn:
    number = recording.tree.number(turn_id)
    if number >= 0:
        for turn in await recorder.store.turns(recording.trial_id, start=number, limit=1):
            if turn.turn_id == turn_id:  # another, or none, where the store has lost it
                return turn
    raise _not_found(turn_id)


def _not_found(turn_id: str) -> NotFound:
    return NotFound(f"no stored answer has the id {turn_id[:80]}")


async def conversation_of(recorder: Recorder, recording: Recording, turn_id: str) -> list[Message]:
    """Everything said up to a turn's end, its reply included, as its client would say it."""
    path = recording.tree.path(recording.tree.number(turn_id))
    said = await recorder.store.conversation(recording.trial_id, path)
    return [message for messages in said for message in messages]


async def complete(recorder: Recorder, recording: Recording, asked: CanonicalRequest) -> None:
    """Put into the request the conversation that it goes on from, and recorded replies where it refers to them.

    Raises: BadRequest: what it names is not stored, or can't be gone on from so; StoreUnavailable, Gone.
    """
    messages = asked.job.messages
    if asked.refers:
        messages = await _referred(recorder, recording, messages)
    if asked.after:
        turn, carried = await _before(recorder, recording, asked)
        asked.goes_on_from(carried, turn.tools)
        before = await conversation_of(recorder, recording, asked.after)
        # Instructions are the request's own: those that the earlier answer was given under are not carried over.
        before = before[int(carried.get("leading", 0)) :]
        _check_outputs(before, messages)
        messages = [*messages[: asked.leading], *before, *messages[asked.leading :]]
    asked.job = msgspec.structs.replace(asked.job, messages=messages)


async def _before(recorder: Recorder, recording: Recording, asked: CanonicalRequest) -> tuple[Turn, dict[str, Any]]:
    """The turn that the request goes on from, and what that one's request carried."""
    try:
        if asked.local is not None:
            return await _turn(recorder, recording, asked.after), asked.local
        return await answer_of(recorder, recording, asked.after)
    except NotFound:
        raise PreviousNotFound(
            f"Previous response with id 'resp_{asked.after}' not found.", field="previous_response_id"
        ) from None


def _check_outputs(before: list[Message], messages: list[Message]) -> None:
    """Raises: BadRequest: an output answers a call that neither the conversation nor the request holds. OpenAI's words."""
    calls = {call["id"] for message in (*before, *messages) for call in message.get("tool_calls") or ()}
    for message in messages:
        call_id = message.get("tool_call_id")
        if message.get("role") == "tool" and call_id not in calls:
            raise BadRequest(
                f"No tool call found for function call output with call_id {str(call_id)[:80]}.", field="input"
            )


async def _referred(recorder: Recorder, recording: Recording, messages: list[Message]) -> list[Message]:
    numbers: dict[str, int] = {}
    for message in messages:
        turn_id = message.get(RECORDED)
        if turn_id is not None:
            if turn_id in numbers:  # else forty bytes of a body could stand for megabytes, again and again
                raise BadRequest(
                    f"input: items of the response 'resp_{turn_id}' are referred to in two places; allowed: one",
                    field="input",
                )
            numbers[turn_id] = recording.tree.number(turn_id)
            if numbers[turn_id] < 0:
                raise BadRequest(f"no items of the response 'resp_{turn_id}' are stored", field="input")
    said = await recorder.store.conversation(recording.trial_id, list(numbers.values()))
    replies = {turn_id: turn[-1] for turn_id, turn in zip(numbers, said, strict=True)}
    return [replies[message[RECORDED]] if RECORDED in message else message for message in messages]

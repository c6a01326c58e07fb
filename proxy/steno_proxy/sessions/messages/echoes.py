"""Recognises assistant messages that stand for a recorded reply although their client changed them.

    BEGINNING   what a client kept of a turn that was cut off (`cuts.py`)
    SPACE       a reply but for white space around its text, which clients take off (Hermes) or put on (Inspect AI)
    CALL_IDS    a client's own writing of a whole reply: the text is the same but for space around it, there are as many calls,
                and each has the id that this very reply's call was given (`call_ids.py`). A call may differ if it was given
                another name (OpenCode makes a call that it can't run one of its tool `invalid`), if the recorded
                arguments are no JSON object, which clients can't hold and so repair, wrap or empty, if it is all that the
                client of a tool of free text was given of them, if it is what parsing by the tool's schema makes of them
                (`parsed.py`: Roo Code, Vercel's AI SDK), or if their tool is one that OpenAI defines and the same is run of both
                (`client_functions.py`: Codex's local_shell). Text around the calls may have been put together with a line end at
                each call, since the record does not say where they stood in it (Grok Build)
    CALLS       the calls of a reply, as they are and under their ids, without the text that stood beside them (CrewAI)
    SPLIT       a reply in several neighbours that say it together, where neighbours are messages of their own (`reading.py`). Any
                of the others may come in this way, too
    REASONING   a reply with its reasoning in its text, before what was said: between tags (gptme: `<think>`), or without them, as
                a part of its own (Zed), or right before the recorded text. Space around either counts for nothing. Any of the
                others may come in the first two ways, too. Also the other way round: a reply that was recorded with tags, since
                its worker has no reasoning parser, without them (LiteLLM takes them out of the text), or with the tags written
                anew (pydantic-ai)

Ids are looked up in the session's own tree, so those of another trial say nothing (I8). Same name and other arguments are a
rewritten history: an agent that empties long arguments wants a shorter prompt, and is to get it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from steno.contracts.chat import Message, Tool
from steno.contracts.client_functions import runs_the_same
from steno_proxy.sessions.messages.call_ids import parse_call_id
from steno_proxy.sessions.messages.cuts import is_beginning, same_calls, text_of
from steno_proxy.sessions.messages.normalise import message_digest
from steno_proxy.sessions.messages.parsed import is_as_parsed, schemas_of


class EchoedAs(StrEnum):
    """How an echo was recognised whose message differs from the reply on record."""

    BEGINNING = "beginning"
    SPACE = "space"
    CALL_IDS = "call_ids"
    CALLS = "calls"
    SPLIT = "split"
    REASONING = "reasoning"


_SPACE = re.compile(r"\s*")
_TAG = re.compile(r"\s*<([\w-]+)>")
_FREE_TEXT = "input"
"""The argument of a tool of free text (Responses' custom tools), whose client is given nothing else of a call."""


class Echo(NamedTuple):
    """A reply in the place of what its client made of it. digest: of the reply."""

    digest: bytes
    reply: Message
    how: EchoedAs


def echo_of(said: Message, reply: Message, turn_id: str, *, partial: bool, tools: Sequence[Tool] = ()) -> Echo | None:
    """The `Echo` if `said` stands for this turn's `reply`; else None. partial: the turn was cut off. tools: those that it was
    offered."""
    bare = _without_reasoning(said, reply)
    if partial and is_beginning(bare, reply):
        how = EchoedAs.BEGINNING
    elif bare is not said and message_digest(bare) == message_digest(reply):
        how = EchoedAs.REASONING
    elif _is_but_for_space(bare, reply):
        how = EchoedAs.SPACE if bare is said else EchoedAs.REASONING
    elif _has_its_calls(bare, reply, turn_id, tools):
        how = EchoedAs.CALL_IDS
    elif _is_its_calls(bare, reply, turn_id):
        how = EchoedAs.CALLS
    else:
        return None
    return Echo(message_digest(reply), reply, how)


def named_turn(message: Message) -> str:
    """The turn that the id of a message's first call names; "": there is no call, or its id names no turn."""
    for call in message.get("tool_calls") or ():
        named = parse_call_id(call.get("id") or "")
        return named[0] if named else ""
    return ""


def _without_reasoning(said: Message, reply: Message) -> Message:
    """The same message, or without the recorded reasoning, where that stands before its text and not in the recorded one."""
    reasoning, whole = (reply.get("reasoning_content") or "").strip(), text_of(reply.get("content"))
    if not reasoning:
        return _with_tagged_reasoning(said, whole)
    rest = _after_tags(said.get("content"), reasoning)
    if rest is None:
        rest = _after_bare_reasoning(said.get("content"), reasoning, whole)
    if rest is None:
        return said
    if rest.strip() != whole.strip():
        whole = whole[: len(whole) - len(whole.lstrip())] + rest.lstrip()
    return {**said, "content": whole}


def _with_tagged_reasoning(said: Message, whole: str) -> Message:
    """The message. If it has the tagged reasoning of the recorded text in another form, that is put in as it is recorded."""
    recorded = _tagged(whole)
    if recorded is None:
        return said
    reasoning, rest = recorded
    head = whole[: len(whole) - len(rest)]
    text = text_of(said.get("content"))
    if text.startswith(head):
        return said
    theirs = _after_tags(text, reasoning.strip())
    if theirs is None:
        if not reasoning.strip() or (said.get("reasoning_content") or "").strip() != reasoning.strip():
            return said
        theirs = text
    if theirs.strip() != rest.strip():
        whole = head + rest[: len(rest) - len(rest.lstrip())] + theirs.lstrip()
    return {**said, "content": whole}


def _after_tags(content: Any, reasoning: str) -> str | None:
    found = _tagged(text_of(content))
    return found[1] if found is not None and found[0].strip() == reasoning else None


def _tagged(text: str) -> tuple[str, str] | None:
    """What stands between the tags that a text begins with, and what follows them."""
    opened = _TAG.match(text)
    if opened is None:
        return None
    inside, closed, rest = text[opened.end() :].partition(f"</{opened[1]}>")
    return (inside, rest) if closed else None


def _after_bare_reasoning(content: Any, reasoning: str, whole: str) -> str | None:
    """The text after the reasoning; None: it does not begin with it. If the reasoning is a part of its own, any text may follow;
    else only the recorded one, since nothing says where the reasoning ends."""
    if isinstance(content, list) and len(content) > 1 and text_of(content[:1]).strip() == reasoning:
        rest = text_of(content[1:])
        if rest.strip() and not _same_words(content, whole):  # a text may begin as its reasoning does
            return rest
    text = text_of(content).strip()
    if not text.startswith(reasoning):
        return None
    rest = text[len(reasoning) :]
    return rest if rest.strip() == whole.strip() else None


def _is_but_for_space(said: Message, reply: Message) -> bool:
    calls, sampled = said.get("tool_calls") or [], reply.get("tool_calls") or []
    content, whole = said.get("content"), text_of(reply.get("content"))
    if len(calls) != len(sampled) or text_of(content) == whole or not _same_words(content, whole):
        return False
    return not calls or same_calls(calls, sampled)


def _same_words(content: Any, whole: str) -> bool:
    """Whether a text is `whole` but for space around it; around each part of it, where it has several."""
    place = 0
    for part in content if isinstance(content, list) else [content]:
        text = text_of([part] if isinstance(part, dict) else part).strip()
        if text:
            place = _after_space(whole, place)
            if not whole.startswith(text, place):
                return False
            place += len(text)
    return _after_space(whole, place) == len(whole)


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found is not None else place


def _has_its_calls(said: Message, reply: Message, turn_id: str, tools: Sequence[Tool]) -> bool:
    calls, sampled = said.get("tool_calls") or [], reply.get("tool_calls") or []
    if not calls or len(calls) != len(sampled) or not _has_its_ids(calls, turn_id):
        return False
    text, whole = text_of(said.get("content")).strip(), text_of(reply.get("content")).strip()
    if text != whole and not _is_but_for_line_ends(text, whole, len(calls)):
        return False
    schemas = schemas_of(tools)
    return all(_may_stand_for(*pair, schemas) for pair in zip(calls, sampled, strict=True))


def _is_but_for_line_ends(text: str, whole: str, joints: int) -> bool:
    """Whether a text is `whole` with line ends put in, at `joints` places at most."""
    if not 0 < len(text) - len(whole) <= joints:
        return False
    place = 0
    for letter in text:
        if place < len(whole) and letter == whole[place]:
            place += 1
        elif letter != "\n":
            return False
    return place == len(whole)


def _is_its_calls(said: Message, reply: Message, turn_id: str) -> bool:
    calls = said.get("tool_calls") or []
    if not calls or text_of(said.get("content")).strip() or not _has_its_ids(calls, turn_id):
        return False
    return message_digest(said) == message_digest({**reply, "content": ""})


def _has_its_ids(calls: Sequence[dict[str, Any]], turn_id: str) -> bool:
    return all(parse_call_id(call.get("id") or "") == (turn_id, i) for i, call in enumerate(calls))


def _may_stand_for(call: dict[str, Any], sampled: dict[str, Any], schemas: Mapping[str, Any]) -> bool:
    name, arguments = sampled["function"]["name"], sampled["function"]["arguments"]
    given = _object(arguments)
    if call["function"]["name"] != name or given is None:
        return True
    if same_calls([call], [sampled]) or _is_its_text(call, given, arguments):
        return True
    said = _object(call["function"]["arguments"])
    schema = schemas.get(name)
    return said is not None and (is_as_parsed(said, given, schema) or runs_the_same(said, given, schema))


def _is_its_text(call: dict[str, Any], given: dict[str, Any], arguments: str) -> bool:
    """Whether a call is what the client of a tool of free text was given: the sampled arguments' `input`, or all of them."""
    said = _object(call["function"]["arguments"]) or {}
    text = said.get(_FREE_TEXT)
    return len(said) == 1 and isinstance(text, str) and text in (given.get(_FREE_TEXT), arguments)


def _object(arguments: Any) -> dict[str, Any] | None:
    """Arguments that are a JSON object; None: they are none."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

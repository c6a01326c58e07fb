"""Sessions as lines of OpenAI's fine-tuning format for chat: messages and tools, without token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from steno.contracts.records import Turn
from steno_cli.exports.branches import branches_of


def conversations(turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    """A line for each branch of a session. An assistant's message has `weight` 0 if it is not to be learnt: it is in an earlier
    line, it was in the request and no turn recorded it, or its turn was cut off (at its limit of tokens, too: a line would end it
    as if the model had), superseded, ended by an error, or told again to a forked trial (that is learnt where it was sampled).

    Reasoning is left out: the format has no field for it. Tools are those of the branch's last turn.
    Args: turns: all of one session's.
    """
    for branch in branches_of(turns):
        messages: list[dict[str, Any]] = []
        for position, turn in enumerate(branch.turns):
            messages += [_shown(message, learnt=False) for message in turn.messages]
            ended = not turn.partial and turn.finish_reason != "length"
            whole = ended and turn.error is None and turn.superseded_by is None
            own = position >= branch.shared and turn.replayed is None
            messages.append(_shown({"role": "assistant"} | turn.reply, learnt=whole and own))
        yield {"messages": messages} | ({"tools": branch.leaf.tools} if branch.leaf.tools else {})


def _shown(message: dict[str, Any], *, learnt: bool) -> dict[str, Any]:
    kept = {
        name: message[name] for name in ("role", "content", "tool_call_id", "name") if message.get(name) is not None
    }
    if message["role"] != "assistant":
        return kept
    calls = message.get("tool_calls")
    if calls:
        kept["tool_calls"] = calls
    if not kept.get("content"):
        kept["content"] = None if calls else ""
    return kept | {"weight": int(learnt)}

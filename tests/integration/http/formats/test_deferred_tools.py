"""Tools that come in the middle of a conversation, as Claude Code 2.1.328 brings them: what its model is told and can call, and
where a new prompt begins."""

from __future__ import annotations

from typing import Any

from steno.contracts.wire.frames import Generate
from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine, Say

SCHEMA = {"type": "object"}
ALWAYS: list[Any] = [{"name": "Bash", "input_schema": SCHEMA}, {"name": "ToolSearch", "input_schema": SCHEMA}]
PLACEHOLDER: Any = {
    "name": "DeferredToolPlaceholder",
    "description": "never call",
    "input_schema": SCHEMA,
    "defer_loading": True,
}
FETCH: Any = {"name": "WebFetch", "input_schema": SCHEMA, "defer_loading": True}
SCRIPT = [
    ("Bash", "{}"),
    ("ToolSearch", '{"query":"nothing"}'),
    ("ToolSearch", '{"query":"select:WebFetch"}'),
    ("WebFetch", "{}"),
    ("Bash", "{}"),
]


def reply(request: Generate) -> Say:
    asked = sum(message["role"] == "assistant" for message in request.job.messages)
    return Say(calls=[("own", *SCRIPT[asked])]) if asked < len(SCRIPT) else Say("Done.")


async def converse(proxy: Proxy, said: list[Any]) -> None:
    """What each turn calls is answered, a search with what it found; the tools that were found are in the next requests."""
    tools = [*ALWAYS, PLACEHOLDER]
    while True:
        body = {"max_tokens": 99, "messages": said, "tools": tools}
        answer = (await proxy.http.post("/t/v1/messages", json=body)).json()
        if answer["stop_reason"] != "tool_use":
            return
        [block] = answer["content"]
        content: Any = "ok"
        if block["name"] == "ToolSearch":
            found = [FETCH] if "WebFetch" in block["input"]["query"] else []
            content = [{"type": "tool_reference", "tool_name": tool["name"]} for tool in found] or "No tools found"
            tools = [*ALWAYS, *found, PLACEHOLDER]
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": content}
        said += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


async def test_a_tool_that_is_looked_for_is_told_of_and_offered_and_only_then_begins_another_prompt() -> None:
    """The search is told by the tool's name, the tool's definition stands where all do: before that, and from then on, nothing
    is told twice (I2)."""
    async with running(ParrotEngine(reply)) as proxy:
        await converse(proxy, [{"role": "user", "content": "go"}])
        turns = await proxy.turns("t", at_least=6)
    offered = [[tool["function"]["name"] for tool in request.job.tools] for request in proxy.engine.requests]
    assert offered == [["Bash", "ToolSearch"]] * 3 + [["Bash", "ToolSearch", "WebFetch"]] * 3
    assert [turn.fork_reason for turn in turns] == [None, None, None, "tools_changed", None, None]
    assert [turn.parent_id is None for turn in turns] == [True, False, False, True, False, False]
    assert turns[3].messages[-1]["content"] == "Tools that can be called now: WebFetch"


async def test_system_messages_that_only_say_which_tools_there_are_change_no_branch(proxy: Proxy) -> None:
    """A tool that is named again, or that there is not, makes no other prompt."""
    said: list[Any] = [{"role": "user", "content": "go"}]
    tools = [*ALWAYS, PLACEHOLDER]
    for name in ("Bash", "Nowhere", "ToolSearch"):
        note = {
            "role": "system",
            "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}],
        }
        body = {"max_tokens": 99, "messages": [*said, note], "tools": tools}
        answer = (await proxy.http.post("/t/v1/messages", json=body)).json()
        said += [note, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "more"}]
    turns = await proxy.turns("t", at_least=3)
    assert [turn.fork_reason for turn in turns] == [None] * 3
    assert [turn.parent_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    assert [message["role"] for turn in turns for message in turn.messages] == ["user"] * 3

"""Anthropic Messages, which tools a model is offered: those that come and go in the messages, none that only the provider runs.

The shapes are those that Claude Code 2.1.328 sends, and of Anthropic's SDK 2.10.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from steno.contracts.chat import CanonicalRequest
from steno.contracts.errors import BadRequest
from steno_proxy.dialects.anthropic.dialect import MessagesCount, MessagesDialect
from steno_proxy.sessions.messages.normalise import tools_digest

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object"}
SEARCH = {"name": "ToolSearch", "description": "Finds tools.", "input_schema": SCHEMA}
FETCH = {"name": "WebFetch", "description": "Fetches.", "input_schema": SCHEMA, "defer_loading": True}
PLACEHOLDER = {"name": "DeferredToolPlaceholder", "input_schema": SCHEMA, "defer_loading": True}
WRITE = {"name": "Write", "input_schema": SCHEMA}
PROVIDERS = {"type": "web_search_20250305", "name": "web_search"}
CALL = {"role": "assistant", "content": [
    {"type": "tool_use", "id": "toolu_0123456789ab_0", "name": "ToolSearch", "input": {"query": "select:WebFetch"}}
]}  # fmt: skip


def found(*names: str) -> dict[str, Any]:
    content = [{"type": "tool_reference", "tool_name": name} for name in names]
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "toolu_0123456789ab_0", "content": content}],
    }


def change(kind: str, tool: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": tool}]}


def named(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "name": name}


def defined(definition: Any) -> dict[str, Any]:
    return {"type": "tool_definition", "definition": definition}


def parse(*messages: Any, tools: list[Any], **body: Any) -> CanonicalRequest:
    asked = {"model": "m", "max_tokens": 9, "messages": [USER, *messages], "tools": tools, **body}
    return MessagesDialect().parse(json.dumps(asked).encode())


def offered(*messages: Any, tools: list[Any], **body: Any) -> list[str]:
    return [tool["function"]["name"] for tool in parse(*messages, tools=tools, **body).job.tools]


def refused(*messages: Any, tools: list[Any], **body: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(*messages, tools=tools, **body)
    return caught.value


def test_a_deferred_tool_is_offered_once_a_search_has_found_it() -> None:
    tools = [SEARCH, PLACEHOLDER, WRITE]
    assert offered(tools=tools) == ["ToolSearch", "Write"]
    assert offered(CALL, found("WebFetch"), tools=[SEARCH, FETCH, PLACEHOLDER, WRITE]) == [
        "ToolSearch", "WebFetch", "Write",
    ]  # fmt: skip
    assert offered(CALL, found(), tools=[SEARCH, FETCH]) == ["ToolSearch"]


def test_deferred_tools_that_nothing_names_make_no_other_prompt() -> None:
    """So a list that grows is a root only where the model can call more than before."""
    first, second = parse(tools=[SEARCH, WRITE]).job.tools, parse(tools=[SEARCH, FETCH, PLACEHOLDER, WRITE]).job.tools
    assert tools_digest(first) == tools_digest(second)


def test_what_a_search_found_is_told_by_name() -> None:
    messages = parse(CALL, found("WebFetch", "NotebookEdit"), tools=[SEARCH, FETCH]).job.messages
    assert messages[-1] == {
        "role": "tool",
        "tool_call_id": "toolu_0123456789ab_0",
        "content": "Tools that can be called now: WebFetch, NotebookEdit",
    }
    assert parse(CALL, found("WebFetch"), tools=[SEARCH, FETCH]).dropped == []


def test_tools_are_added_and_removed_in_the_middle() -> None:
    tools = [WRITE, FETCH]
    added, removed = change("tool_addition", named("WebFetch")), change("tool_removal", named("WebFetch"))
    assert offered(added, tools=tools) == ["Write", "WebFetch"]
    assert offered(added, removed, tools=tools) == ["Write"]
    assert offered(added, removed, added, tools=tools) == ["Write", "WebFetch"]
    assert offered(change("tool_removal", named("Write")), tools=tools) == []
    assert offered(change("tool_addition", named("Nowhere")), tools=tools) == ["Write"]


def test_tools_that_messages_define_come_after_those_of_the_request() -> None:
    inline = change("tool_addition", defined({"name": "Late", "description": "d", "input_schema": SCHEMA}))
    job = parse(inline, tools=[WRITE]).job
    assert [tool["function"]["name"] for tool in job.tools] == ["Write", "Late"]
    assert job.tools[1]["function"] == {"name": "Late", "description": "d", "parameters": SCHEMA}
    assert offered(inline, change("tool_removal", named("Late")), tools=[WRITE]) == ["Write"]
    again = change("tool_addition", defined({"name": "Late", "description": "another", "input_schema": SCHEMA}))
    assert [tool["function"].get("description") for tool in parse(inline, again, tools=[WRITE]).job.tools] == [
        None, "another",
    ]  # fmt: skip
    assert offered(inline, tools=[]) == ["Late"]


def test_a_system_message_that_only_changes_tools_is_none() -> None:
    added = change("tool_addition", named("WebFetch"))
    assert parse(added, tools=[FETCH]).job.messages == [USER]
    both = {"role": "system", "content": [{"type": "text", "text": "note"}, *added["content"]]}
    assert parse(both, tools=[FETCH]).job.messages == [USER, {"role": "system", "content": "note"}]
    error = refused_of([added])
    assert error.field == "messages"
    assert error.message.endswith("got only system messages without text, must be at least one message with content")


def refused_of(messages: list[Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        MessagesDialect().parse(json.dumps({"max_tokens": 9, "messages": messages}).encode())
    return caught.value


def test_where_the_provider_would_search_all_tools_are_offered() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    request = parse(tools=[search, FETCH, WRITE])
    assert [tool["function"]["name"] for tool in request.job.tools] == ["WebFetch", "Write"]
    assert request.dropped == [search["type"]]


def test_tools_of_mcp_servers_are_left_out_and_named() -> None:
    toolset = {"type": "mcp_toolset_reference", "server_name": "s"}
    request = parse(change("tool_addition", toolset), change("tool_addition", defined(PROVIDERS)), tools=[WRITE])
    assert request.dropped == ["mcp_toolset_reference", "web_search_20250305"]
    assert request.job.messages == [USER]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (change("tool_addition", None), "messages.1.content.0.tool"),
        (change("tool_addition", {"type": "tool_reference"}), "messages.1.content.0.tool.name"),
        (change("tool_removal", {"type": "tool_reference", "name": 3}), "messages.1.content.0.tool.name"),
        (change("tool_addition", defined(None)), "messages.1.content.0.tool.definition"),
        (change("tool_addition", defined({"input_schema": SCHEMA})), "messages.1.content.0.tool.definition.name"),
        (change("tool_addition", defined({"name": "f", "input_schema": 1})),
         "messages.1.content.0.tool.definition.input_schema"),
        ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference"}]}]},
         "messages.1.content.0.content.0.tool_name"),
    ],
)  # fmt: skip
def test_changes_that_cant_be_read_are_refused_by_their_path(message: Any, field: str) -> None:
    assert refused(message, tools=[WRITE]).field == field


# -- tools that only the provider runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice", [None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "web_search"}], ids=str
)
def test_a_request_whose_tools_all_are_the_providers_is_refused(choice: Any) -> None:
    """Claude Code's WebSearch asks in a request of its own: the answer, made up, would be told as what was found."""
    error = refused(tools=[PROVIDERS], tool_choice=choice)
    assert error.field == "tools.0.type"
    assert error.message == (
        "tools.0.type: got 'web_search_20250305': only the provider can run it, and the request has no other tool"
    )


def test_beside_a_tool_of_the_clients_they_are_left_out() -> None:
    assert offered(tools=[PROVIDERS, WRITE]) == ["Write"]
    assert offered(change("tool_addition", defined(WRITE)), tools=[PROVIDERS]) == ["Write"]
    error = refused(tools=[PROVIDERS, WRITE], tool_choice={"type": "tool", "name": "web_search"})
    assert error.message == (
        "tool_choice.name: got 'web_search', must be the name of a tool that is offered and that the client runs"
    )


def test_their_tokens_can_be_counted() -> None:
    body = {"messages": [USER], "tools": [PROVIDERS]}
    assert MessagesCount().parse_count(json.dumps(body).encode()).job.tools == []

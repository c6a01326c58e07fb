"""Agents of each format that ask three times, and the trials that they begin again (`test_forks.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai

from steno.contracts.records import ForkOf, Turn
from steno.contracts.rest import Completion, SessionSpec
from tests.integration.http.conftest import Proxy
from tests.support.workers.parrot import ParrotEngine, Say

Answers = list[Any]
Agent = Callable[[Proxy, str, str], Awaitable[Answers]]
"""An agent of one format: (proxy, trial, date) -> what it was told. Asks three times, and calls a tool if its format has one."""
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "read", "description": "reads", "parameters": PARAMETERS}}


class Voice(ParrotEngine):
    """Says something else each time, so that what is sampled again is another text. taken: how often it was asked."""

    def __init__(self) -> None:
        super().__init__(self.say)
        self.taken = 0

    def say(self, request: Any) -> Say:
        self.taken += 1
        messages = request.job.messages
        last = str(messages[-1]["content"]) if messages else ""
        if "look" in last and request.job.tools:
            paths = "ab" if "both" in last else "a"
            calls = [(f"own{self.taken}{path}", "read", f'{{"path": "{path}"}}') for path in paths]
            return Say(f"I look {self.taken}.", reasoning="hm", calls=calls)
        if "cut" in last:
            return Say("half of it", fail_after=4)
        return Say(f"said {self.taken}")


def sampled(proxy: Proxy) -> int:
    return proxy.engine.taken  # type: ignore[attr-defined, no-any-return]


async def by_chat(proxy: Proxy, trial: str, date: str, *, stream: bool = False) -> Answers:
    client = proxy.openai(trial)
    messages: Answers = [{"role": "system", "content": f"Today is {date}."}, {"role": "user", "content": "look"}]
    told: Answers = []
    for question in ("", "and then", "and last"):
        if question:
            messages.append({"role": "user", "content": question})
        if stream:
            message = await _streamed(client, messages)
        else:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL])
            message = answer.choices[0].message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        told.append(message)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "text"})
    return told


async def _streamed(client: openai.AsyncOpenAI, messages: Answers) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    chunks: Any = await client.chat.completions.create(model="m", messages=messages, tools=[CHAT_TOOL], stream=True)
    async for chunk in chunks:
        delta = chunk.choices[0].delta if chunk.choices else None
        message["content"] += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            calls = message.setdefault("tool_calls", [])
            if call.index == len(calls):
                calls.append({"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}})
            for name in ("name", "arguments"):
                calls[call.index]["function"][name] += getattr(call.function, name) or ""
    return message


async def by_chat_streamed(proxy: Proxy, trial: str, date: str) -> Answers:
    return await by_chat(proxy, trial, date, stream=True)


async def by_messages(proxy: Proxy, trial: str, date: str) -> Answers:
    client = anthropic.AsyncAnthropic(base_url=f"{proxy.url}/{trial}", api_key="none", max_retries=0, timeout=60)
    tools: Any = [{"name": "read", "description": "reads", "input_schema": PARAMETERS}]
    messages: Answers = [{"role": "user", "content": "look"}]
    told: Answers = []
    for question in ("", "and then", "and last"):
        if question:
            messages[-1]["content"] = (
                [*messages[-1]["content"], {"type": "text", "text": question}]
                if (messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], list))
                else messages[-1]["content"]
            )
            if messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": question})
        async with client.messages.stream(
            model="m", max_tokens=100, system=f"Today is {date}.", messages=messages, tools=tools
        ) as stream:
            answer = await stream.get_final_message()
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        told.append([block for block in blocks if block["type"] != "thinking"])
        messages.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "text"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        if results:
            messages.append({"role": "user", "content": results})
    return told


async def by_responses(proxy: Proxy, trial: str, date: str) -> Answers:
    """With `previous_response_id`: what was said before is on record here alone."""
    client = proxy.openai(trial)
    tools: Any = [{"type": "function", "name": "read", "parameters": PARAMETERS, "strict": False}]
    sent: Any = "look"
    told: Answers = []
    before: dict[str, Any] = {}
    for question in ("and then", "and last", ""):
        answer = await client.responses.create(
            model="m", instructions=f"Today is {date}.", input=sent, tools=tools, **before
        )
        items = [item.model_dump() for item in answer.output if item.type != "reasoning"]
        told.append([(item["type"], item.get("call_id"), item.get("content")) for item in items])
        before = {"previous_response_id": answer.id}
        sent = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "text"}
            for item in items
            if item["type"] == "function_call"
        ]
        sent.append({"role": "user", "content": question})
    return told


async def by_gemini(proxy: Proxy, trial: str, date: str) -> Answers:
    contents: Answers = [{"role": "user", "parts": [{"text": "look"}]}]
    told: Answers = []
    declared = [{"functionDeclarations": [{"name": "read", "description": "reads", "parameters": {"type": "OBJECT"}}]}]
    for question in ("and then", "and last", ""):
        body = {
            "systemInstruction": {"parts": [{"text": f"Today is {date}."}]}, "contents": contents, "tools": declared,
        }  # fmt: skip
        answer = await proxy.http.post(f"/{trial}/v1beta/models/m:generateContent", json=body)
        assert answer.status_code == 200, answer.text
        content = answer.json()["candidates"][0]["content"]
        told.append([part for part in content["parts"] if not part.get("thought")])
        contents.append(content)
        results = [
            {"functionResponse": {"name": "read", "response": {"result": "text"}}}
            for part in content["parts"]
            if "functionCall" in part
        ]
        contents.append({"role": "user", "parts": [*results, {"text": question}]})
    return told


async def by_completions(proxy: Proxy, trial: str, date: str) -> Answers:
    """Text prompts that go on from the text so far, which is tokenised whole: nothing may differ."""
    text, told = "Today. ", []
    for question in ("look", " and then", " and last"):
        text += question
        answer = await proxy.openai(trial).completions.create(model="m", prompt=text)
        told.append(answer.choices[0].text)
        text += answer.choices[0].text
    return told


async def by_ids(proxy: Proxy, trial: str, date: str) -> Answers:
    """Prompts of ids, which have no dates; each goes on from the ids so far."""
    ids, told = [5, 6, 7], []
    for number in range(3):
        ids.append(10 + number)
        body = {"prompt": ids, "return_token_ids": True}
        answer = await proxy.http.post(f"/{trial}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["prompt_token_ids"] == ids
        told.append(choice["token_ids"])
        ids = ids + choice["token_ids"]
    return told


AGENTS: list[Agent] = [
    by_chat, by_chat_streamed, by_messages, by_responses, by_gemini, by_completions, by_ids,
]  # fmt: skip


async def record(proxy: Proxy, agent: Agent, trial: str = "origin") -> tuple[Answers, list[Turn]]:
    told = await agent(proxy, trial, "2026-01-02")
    await proxy.steno.complete(trial, Completion(reward=1.0))
    return told, [turn async for turn in proxy.steno.turns(trial)]


async def fork(proxy: Proxy, turn: Turn | str, trial: str = "fork", **fields: Any) -> str:
    turn_id = turn if isinstance(turn, str) else turn.turn_id
    spec = SessionSpec(fork_of=ForkOf(**{"trial_id": "origin", "turn_id": turn_id} | fields))
    await proxy.steno.register(trial, spec)
    return trial


def path(turns: list[Turn], last: Turn) -> bytes:
    """Ids of a conversation up to the end of a turn."""
    by_id, pieces, turn = {turn.turn_id: turn for turn in turns}, list[bytes](), last
    while True:
        pieces += (turn.completion_ids, turn.new_prompt_ids)
        if turn.parent_id is None:
            return b"".join(reversed(pieces))
        turn = by_id[turn.parent_id]

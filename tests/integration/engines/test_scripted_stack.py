"""The scripted engine behind a real worker and proxy: what a script says is what a client gets, and nobody trains on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.stack import Stack, running

SCRIPT = """
def say(request):
    word = request["messages"][-1]["content"]
    if word == "fail":
        return {"error": {"code": "engine_failed", "message": "as asked"}}
    if word == "break":
        return {"content": "one two three four five six", "fail_after_tokens": 3}
    if word == "cut":
        return {"content": "one two three four five six", "length_after_tokens": 3}
    if word == "who":
        return f"{request['trial_id']} {request['turn']}"
    return {"content": "Look.", "reasoning_content": "Hm.", "tool_calls": [
        {"function": {"name": "ls", "arguments": {"path": "/"}}}, {"function": {"name": "pwd", "arguments": {}}}]}
"""
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("ls", "pwd")
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("scripted")
    (folder / "script.py").write_text(SCRIPT)
    with running(folder / "logs", ["--engine", "scripted", "--script", f"{folder}/script.py:say"]) as one:
        yield one


def ask(stack: Stack, trial: str, word: str, **more: Any) -> Any:
    client = openai.OpenAI(base_url=stack.base_url(trial), api_key="none", max_retries=0)
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": word}], **more)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_thoughts_and_words_arrive(stack: Stack, stream: bool) -> None:
    answer = ask(stack, f"calls-{stream}", "go", tools=TOOLS, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "Look."
        names = [piece.function.name for delta in deltas for piece in delta.tool_calls or [] if piece.function.name]
    else:
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content) == ("Look.", "Hm.")
        names = [call.function.name for call in message.tool_calls]
    assert names == ["ls", "pwd"]


def test_a_script_knows_the_trial_and_the_session_is_marked_synthetic(stack: Stack) -> None:
    assert ask(stack, "who-am-i", "who").choices[0].message.content == "who-am-i 0"
    assert "synthetic" in stack.get("/sessions/who-am-i")["marks"]
    assert stack.turns("who-am-i")[0]["sampling_logprobs"] in ([], None)


def test_errors_and_cut_offs_are_the_clients_to_see(stack: Stack) -> None:
    with pytest.raises(openai.InternalServerError, match="as asked"):
        ask(stack, "fails", "fail")
    with pytest.raises(openai.InternalServerError, match="failed after 3 tokens"):
        ask(stack, "breaks", "break")
    assert ask(stack, "cuts", "cut").choices[0].finish_reason == "length"

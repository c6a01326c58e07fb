"""The scripted engine behind a real worker and proxy: what a script says is what a client gets, and nobody trains on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.programs.stack import Stack, running

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


def test_tokens_are_said_by_the_workers_tokenizer_and_are_those_of_the_record(stack: Stack) -> None:
    """As vLLM's clients ask for them: at the root, where `/v1` is left out, and under a trial."""
    ask(stack, "tokens", "go", tools=TOOLS)
    [turn] = stack.turns("tokens")
    for root in ("", "/tokens"):

        def post(path: str, root: str = root, **body: Any) -> Any:
            answer = httpx.post(stack.url + root + path, json=body, timeout=60)
            return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"]["param"])

        chat = {"messages": [{"role": "user", "content": "go"}], "tools": TOOLS}
        whole = post("/tokenize", **chat, return_token_strs=True)
        assert whole["tokens"] == turn["new_prompt_ids"] and whole["count"] == len(whole["tokens"]) == len(
            whole["token_strs"]
        )
        assert whole["max_model_len"] == 131072
        text = post("/detokenize", tokens=whole["tokens"])["prompt"]
        assert "<|im_start|>user\ngo<|im_end|>" in text
        assert post("/tokenize", prompt=text, add_special_tokens=False)["tokens"] == whole["tokens"]
        closed = post("/tokenize", **chat, add_generation_prompt=False)["tokens"]
        assert closed == whole["tokens"][: len(closed)] and len(closed) < whole["count"]
        empty = {"count": 0, "max_model_len": 131072, "tokens": [], "token_strs": None}
        assert (post("/tokenize", prompt="", add_special_tokens=False), post("/detokenize", tokens=[])) == (
            empty,
            {"prompt": ""},
        )
        assert post("/detokenize", tokens=[2**31 - 1]) == (400, "tokens")
        assert post("/detokenize", tokens=[0] * 131073) == (400, "tokens")
        assert post("/tokenize", **chat, chat_template="{{ 1 }}") == (400, "chat_template")
    assert len(stack.turns("tokens")) == 1


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

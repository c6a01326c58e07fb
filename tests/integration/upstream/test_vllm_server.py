"""A real `vllm serve` as upstream, with the shipped checkpoint: token ids in, ids and log-probabilities out (I1, I2)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from steno.models import TINY
from steno_worker.engines.vllm_server.format import ServerFormat
from steno_worker.engines.vllm_server.http import VllmServer
from tests.support.programs.ports import free_port
from tests.support.programs.processes import process, until_it_answers
from tests.support.programs.stack import ROOT, Stack, running

pytestmark = pytest.mark.vllm

KEY = "sk-of-the-vllm-server"
TOOL = {
    "type": "function",
    "function": {"name": "read_note", "parameters": {"type": "object", "properties": {"path": {}}}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its api_base."""
    port, log = free_port(), tmp_path_factory.mktemp("vllm") / "serve.log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TINY), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, "--enforce-eager", "--dtype", "float32",
        "--max-num-seqs", "8", "--max-model-len", "2048", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--reasoning-parser", "qwen3", "--enable-prompt-tokens-details",
    ]  # fmt: skip
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with process(command, log, settings, cwd=log.parent) as child:
        health = f"http://127.0.0.1:{port}/health"
        until_it_answers(child, log, lambda: httpx.get(health, timeout=5).status_code == 200)
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def stack(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    words = ["--upstream", "hosted_vllm/tiny", "--api-base", server, "--api-key", KEY, "--upstream-tokens", "require"]
    with running(tmp_path_factory.mktemp("front"), None, proxy=words) as stack:
        stack.wait_for_model()
        yield stack


def ask(stack: Stack, trial_id: str, path: str = "/chat/completions", **body: Any) -> httpx.Response:
    if path == "/chat/completions":
        body.setdefault("messages", [{"role": "user", "content": "hello"}])
    return httpx.post(stack.base_url(trial_id) + path, json={"model": "any", "max_tokens": 24, **body}, timeout=120)


def recomputed(ids: list[int], positions: list[int]) -> list[float]:
    """Log-probabilities of the tokens at these positions, by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    return [float(logprobs[position - 1, ids[position]]) for position in positions]


def thought(ids: list[int]) -> str:
    """One turn in a hundred has none."""
    from transformers import AutoTokenizer

    before, end, _ = AutoTokenizer.from_pretrained(TINY).decode(ids).partition("</think>")
    return before.removeprefix("<think>").strip() if end else ""


def test_the_demos_agent_finishes_and_its_record_is_exact_and_trainable(stack: Stack) -> None:
    codes = []
    for seed in range(3):  # every token is drawn at temperature 1: now and then one trial misses its code word
        environment = {**os.environ, "OPENAI_BASE_URL": stack.base_url(f"demo-{seed}"), "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "steno_cli.demo.toy_agent", "--seed", str(seed)]
        codes.append(subprocess.run(command, cwd=ROOT, env=environment, timeout=240, check=False).returncode)
    assert 0 in codes and 2 not in codes
    trial_id = f"demo-{codes.index(0)}"
    turns = stack.turns(trial_id)
    assert len(turns) > 3 and [turn["fork_reason"] for turn in turns] == [None] * len(turns)
    assert [turn["parent_id"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]
    thoughts = [thought(turn["completion_ids"]) for turn in turns]
    assert sum(map(bool, thoughts)) > 1, "also with earlier thinking in the prompt"
    assert [(turn["reply"].get("reasoning_content") or "").strip() for turn in turns] == thoughts
    assert all("<think>" not in turn["reply"]["content"] for turn in turns)
    (sample,) = stack.get(f"/sessions/{trial_id}/samples")["items"]
    trained = [position for position, flag in enumerate(sample["loss_mask"]) if flag]
    assert len(trained) == sum(len(turn["completion_ids"]) for turn in turns)
    recorded = [sample["sampling_logprobs"][position] for position in trained]
    assert recorded == pytest.approx(recomputed(sample["token_ids"], trained), abs=1e-3)
    assert stack.get(f"/sessions/{trial_id}")["marks"] == []


def test_tokens_stream_as_they_are_sampled(stack: Stack) -> None:
    client = openai.OpenAI(base_url=stack.base_url("stream"), api_key="none", max_retries=0)
    chunks = list(
        client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=200,
            stream=True,
            logprobs=True,
            top_logprobs=2,
            extra_body={"min_tokens": 200},  # else some replies have two tokens
        )
    )
    assert sum(bool(chunk.choices and chunk.choices[0].logprobs) for chunk in chunks) > 3
    (turn,) = stack.turns("stream")
    shown = [token for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
             for token in chunk.choices[0].logprobs.content or ()]  # fmt: skip
    recorded = turn["sampling_logprobs"]
    assert [token.logprob for token in shown] == pytest.approx(recorded[: len(shown)], abs=1e-6)
    assert all(len(token.top_logprobs) == 2 for token in shown)


def test_plain_prompts_in_text_and_in_token_ids_go_on_by_ids(stack: Stack) -> None:
    first = ask(stack, "prompts", "/completions", prompt="read_note notes", max_tokens=4).json()
    (turn,) = stack.turns("prompts")
    assert len(turn["completion_ids"]) == first["usage"]["completion_tokens"] and turn["new_prompt_ids"]
    ask(stack, "prompts", "/completions", prompt=turn["new_prompt_ids"], max_tokens=4)
    second = stack.turns("prompts")[1]
    ids = turn["new_prompt_ids"] + second["completion_ids"]
    ask(stack, "prompts", "/completions", prompt=[*ids, ids[0]], max_tokens=4)
    third = stack.turns("prompts")[2]
    assert third["parent_id"] == second["turn_id"] and third["new_prompt_ids"] == [ids[0]]
    wrong = ask(stack, "prompts", "/completions", prompt=[10**6], max_tokens=4)
    assert wrong.status_code == 400 and "Traceback" not in wrong.text


def test_tokens_are_said_as_the_server_itself_says_them(stack: Stack, server: str) -> None:
    """`/tokenize` and `/detokenize`, byte for byte in vLLM's own shapes: at its root, at the proxy's, and under a trial."""
    chat = {"messages": [{"role": "user", "content": "héllo <|im_end|>"}], "tools": [TOOL]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": "read_note  nötes"}),
        ("/tokenize", {"prompt": "read_note", "add_special_tokens": False, "return_token_strs": True}),
        ("/tokenize", {"prompt": ""}),
        ("/tokenize", chat),
        ("/tokenize", chat | {"return_token_strs": True, "chat_template_kwargs": {"enable_thinking": False}}),
        ("/detokenize", {"tokens": []}),
    ]
    headers = {"authorization": f"Bearer {KEY}"}
    for path, body in bodies:
        own = httpx.post(server.removesuffix("/v1") + path, json=body, headers=headers, timeout=60).json()
        for root in ("", "/tokens"):
            assert httpx.post(stack.url + root + path, json=body, timeout=60).json() == own, (root, path, body)
        if tokens := own.get("tokens"):
            bodies.append(("/detokenize", {"tokens": tokens}))
    assert len(bodies) > 8


def test_a_length_cut_reply_is_closed_and_gone_on_from(stack: Stack) -> None:
    cut = ask(stack, "cut", max_tokens=3, min_tokens=3).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    messages = [{"role": "user", "content": "hello"}, cut["message"], {"role": "user", "content": "go on"}]
    ask(stack, "cut", messages=messages)
    one, two = stack.turns("cut")
    assert two["parent_id"] == one["turn_id"] and two["fork_reason"] is None
    assert two["prompt_tokens"] == one["prompt_tokens"] + 3 + len(two["new_prompt_ids"])


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({}, False),
        ({"stop": ["e"]}, False),
        ({"top_p": 0.5}, True),
        ({"temperature": 0.5}, True),  # the server gives log-probabilities from before temperature
        ({"response_format": {"type": "json_object"}}, True),
        ({"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}, True),
    ],
)
def test_tokens_that_were_not_drawn_plainly_are_marked(stack: Stack, fields: dict[str, Any], constrained: bool) -> None:
    trial_id = f"law-{'-'.join(fields)}"
    answer = ask(stack, trial_id, **fields)
    assert answer.status_code == 200, answer.text
    (turn,) = stack.turns(trial_id)
    count = len(turn["completion_ids"])
    assert turn["constrained"] == ([[0, count]] if constrained else []) and count


def test_an_overflow_has_both_numbers_and_a_limit_is_clamped_to_the_context(stack: Stack) -> None:
    ask(stack, "clamped", max_tokens=100_000, stop=["e", "a", "o"])
    (turn,) = stack.turns("clamped")
    assert turn["law"]["max_tokens"] == 2048 - turn["prompt_tokens"]
    long = [{"role": "user", "content": "hello " * 3000}]
    answer = ask(stack, "long", messages=long)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_an_agent_that_leaves_frees_the_server(stack: Stack, server: str) -> None:
    body = {"model": "any", "stream": True, "max_tokens": 1900, "messages": [{"role": "user", "content": "hello"}],
            "min_tokens": 1800}  # fmt: skip
    with httpx.stream("POST", stack.base_url("leaves") + "/chat/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 120
    while not (turns := stack.turns("leaves")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert turns[0]["finish_reason"] == "cancelled" and 0 < len(turns[0]["completion_ids"]) < 1800
    while "vllm:num_requests_running" in (lines := httpx.get(server.removesuffix("/v1") + "/metrics", timeout=60).text):
        if any(line.startswith("vllm:num_requests_running{") and line.endswith(" 0.0") for line in lines.splitlines()):
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_same_server_is_text_only_where_that_is_asked_for(server: str, tmp_path: Path) -> None:
    """Through LiteLLM itself."""
    words = ["--upstream", "hosted_vllm/tiny", "--api-base", server, "--api-key", KEY, "--upstream-tokens", "off"]
    with running(tmp_path, None, proxy=words) as stack:
        stack.wait_for_model()
        answer = ask(stack, "text", stream=False)
        assert answer.status_code == 200, answer.text
        assert stack.get("/sessions/text")["marks"] == ["text_only"]
        (turn,) = stack.turns("text")
        assert turn["completion_ids"] == [] and turn["upstream_tokens"] == answer.json()["usage"]["completion_tokens"]


def test_what_a_server_does_by_itself_is_found_out_by_asking(server: str) -> None:
    """Where replies end, and whether tools put a grammar on (here one that is asked for stands for it)."""

    async def find() -> tuple[frozenset[int], bool | None, bool | None]:
        http = VllmServer(server, KEY, 60.0)
        await http.open()
        try:
            format = ServerFormat(http, "tiny", asyncio.get_running_loop())
            await asyncio.to_thread(format.find_stop_ids)
            plain = await asyncio.to_thread(format.find_grammar)
            strict = await asyncio.to_thread(lambda: format.find_grammar(strict=True))
            return format.stop_ids, plain, strict
        finally:
            await http.close()

    end = json.loads((TINY / "generation_config.json").read_text())["eos_token_id"]
    assert asyncio.run(find()) == (frozenset({end}), False, True)


@pytest.mark.parametrize(
    ("model", "key", "said"),
    [("other", KEY, "it serves tiny"), ("tiny", "sk-a-wrong-key", "refuses the worker's API key")],
)
def test_a_wrong_name_or_key_stops_the_proxy_in_one_line(server: str, model: str, key: str, said: str) -> None:
    command = [sys.executable, "-m", "steno", "proxy", "--port", str(free_port()), "--upstream", f"hosted_vllm/{model}"]
    command += ["--api-base", server, "--api-key", key]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and said in done.stderr and key not in done.stderr
    assert "Traceback" not in done.stderr

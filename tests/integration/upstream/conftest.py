"""Steno behind Steno: a proxy whose upstream is another proxy, with the scripted engine. All as processes, on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.programs.stack import Stack, running

KEY = "sk-test-of-the-upstream"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}]


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def sdk(stack: Stack, trial_id: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.base_url(trial_id), api_key="none", max_retries=0, timeout=60)


def ask(stack: Stack, trial_id: str, said: str, **fields: Any) -> httpx.Response:
    """One question in a conversation of its own, not streamed."""
    body = {"model": "any", "messages": [{"role": "user", "content": said}], **fields}
    return httpx.post(stack.base_url(trial_id) + "/chat/completions", json=body, timeout=60)


@pytest.fixture(scope="session")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The upstream: what it says is script.py's affair."""
    script = Path(__file__).with_name("script.py")
    with running(tmp_path_factory.mktemp("behind"), ["--engine", "scripted", "--script", f"{script}:say"]) as stack:
        yield stack


@pytest.fixture(scope="session")
def in_front(behind: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Stack]]:
    """Starts a proxy with this upstream, once for each; `path` is appended to the upstream's URL."""
    stacks: dict[tuple[str, ...], Stack] = {}
    ended: list[Any] = []

    def start(model: str, path: str, *more: str) -> Stack:
        asked = (model, path, *more)
        if asked not in stacks:
            words = ["--upstream", model, "--api-base", behind.url + path, "--api-key", KEY, *more]
            started = running(tmp_path_factory.mktemp("front"), None, proxy=words)
            stacks[asked] = started.__enter__()
            ended.append(started)
            stacks[asked].wait_for_model()
        return stacks[asked]

    yield start
    for started in ended:
        started.__exit__(None, None, None)


@pytest.fixture(scope="session")
def front(in_front: Callable[..., Stack]) -> Stack:
    """The upstream as an OpenAI-compatible one."""
    stack = in_front("openai/up", "/behind/v1")
    ask(stack, "warm", "hello")  # the upstream has the session from now on whose turns tests count
    return stack

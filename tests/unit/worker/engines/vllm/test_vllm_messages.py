"""Recorded calls that vLLM can't read: the agent's next turn is rendered all the same.

vLLM is not installed here: `Renderer` reads arguments as vLLM 0.32 does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.errors import BadRequest
from tests.unit.worker.engines.vllm.no_vllm import without_vllm

DEPTH = 40
"""Of vLLM's own calls, from where it is asked to where it reads arguments."""


class Renderer:
    """`seen`: the arguments of each call, as a template gets them."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.seen: list[Any] = []
        self._fault = fault

    def render_messages(self, messages: list[dict[str, Any]], params: Any, depth: int = DEPTH) -> Any:
        if self._fault is not None:
            raise self._fault
        if depth:
            return self.render_messages(messages, params, depth - 1)
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            try:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            except json.JSONDecodeError:
                call["function"]["arguments"] = {}
            self.seen.append(call["function"]["arguments"])
        return None, {"prompt": None}

    def tokenize_prompts(self, prompts: list[Any], params: Any) -> list[Any]:
        return [{"prompt_token_ids": [1, 2]}]


@pytest.fixture
def module() -> Iterator[Any]:
    with without_vllm("steno_worker.engines.vllm.chat_format") as module:
        yield module


def render(module: Any, monkeypatch: pytest.MonkeyPatch, renderer: Renderer, arguments: str) -> list[int]:
    monkeypatch.setattr(module, "ChatParams", lambda *_: None)
    monkeypatch.setattr(module, "is_mistral_tokenizer", lambda _: False)
    format = object.__new__(module.VllmFormat)
    format._args = SimpleNamespace(
        chat_template=None, chat_template_content_format="auto", default_chat_template_kwargs=None
    )
    format._renderer, format._tokenizer, format._fewest = renderer, None, None
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    ids: list[int] = format.render([{"role": "user", "content": "hi"}, reply], [], {})
    assert call["function"] == {"name": "f", "arguments": arguments}, "the conversation itself is as it was"
    return ids


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"a": ' + "[" * 1200, {}),
        ('{"a": ' + "[" * 940 + "]" * 940 + "}", {}),
        ('{"n": ' + "1" * 5000 + "}", {}),
        ('{"a": [', {}),
        ('{"a": [[1]], "n": ' + "1" * 4000 + "}", {"a": [[1]], "n": int("1" * 4000)}),
    ],
)
def test_a_call_that_vllm_can_t_read_has_no_arguments_as_one_that_is_malformed(
    module: Any, monkeypatch: pytest.MonkeyPatch, arguments: str, seen: Any
) -> None:
    renderer = Renderer()
    assert render(module, monkeypatch, renderer, arguments) == [1, 2]
    assert renderer.seen == [seen]


def test_what_a_template_recurses_in_is_the_requests_fault(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="chat template refuses this conversation") as refused:
        render(module, monkeypatch, Renderer(RecursionError("maximum recursion depth exceeded")), "{}")
    assert refused.value.field == "messages"

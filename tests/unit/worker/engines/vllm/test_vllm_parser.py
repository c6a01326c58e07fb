"""`parallel_tool_calls: false` with vLLM's tool parsers that no grammar stands behind: the answer ends after its first call."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from steno.contracts.chat import Sampling
from steno_worker.chat.interfaces import ParsedText
from steno_worker.chat.reader import ONE_CALL, CompletionReader, StepText
from steno_worker.interfaces import TokenStep
from tests.unit.worker.engines.vllm.no_vllm import without_vllm

SAID = {
    1: {"content": "I look. "},
    2: {"calls": [(0, "look", "")]},
    3: {"calls": [(0, "", '{"city": "Oslo"}')]},
    4: {},
    5: {"calls": [(1, "look", "")]},
    6: {"calls": [(1, "", '{"city": "Rome"}')]},
    7: {"content": "more"},
}
"""What the parser makes of each token: text, a call, and between 4 and 5 what may be the end of that call, and another one."""


class VllmsParser:
    """Says of tokens what `SAID` does, and of the end what it held back."""

    def set_prompt_token_ids(self, ids: list[int]) -> None:
        pass

    def parse_delta(self, text: str, ids: list[int], request: Any, prompt: list[int], *, finished: bool) -> Any:
        said = [SAID[one] for one in ids] or [{"content": "held back"}]
        calls = [
            SimpleNamespace(index=index, id=None, function=SimpleNamespace(name=name, arguments=arguments))
            for one in said
            for index, name, arguments in one.get("calls", [])
        ]
        return SimpleNamespace(
            content="".join(one.get("content", "") for one in said), reasoning=None, tool_calls=calls
        )


@pytest.fixture
def parser_module() -> Iterator[Any]:
    with without_vllm("steno_worker.engines.vllm.chat_parser") as module:
        yield module


def parser(module: Any, parallel: bool) -> Any:
    return module.VllmParser(VllmsParser(), SimpleNamespace(parallel_tool_calls=parallel), [])


def read(module: Any, *steps: tuple[list[int], str | None], parallel: bool = False) -> list[StepText]:
    decoder = SimpleNamespace(feed=lambda ids, *, final=False: "x" * len(ids))
    fmt: Any = SimpleNamespace(decoder=lambda: decoder, stop_ids=frozenset())
    reader = CompletionReader(fmt, parser(module, parallel), Sampling(), one_call=not parallel)
    return [reader.read(TokenStep(ids, [0.0] * len(ids), "v", finish=finish)) for ids, finish in steps]  # type: ignore[arg-type]


def calls(parsed: ParsedText) -> list[tuple[int, str, str]]:
    return [(piece.index, piece.name, piece.arguments) for piece in parsed.tool_calls]


@pytest.mark.parametrize("before", [[], [1, 2, 3, 4]])
def test_the_beginning_of_a_second_call_ends_the_answer_and_is_not_shown(parser_module: Any, before: list[int]) -> None:
    ids = [1, 2, 3, 4, 5, 6, 7]
    steps = [(before, None), (ids[len(before) :], None)]
    *_, last = read(parser_module, *steps)
    assert (last.ids, last.reason, last.stop) == (ids[len(before) : 5], "tool_calls", ONE_CALL)
    shown = read(parser_module, *steps)
    assert [call for step in shown for call in calls(step.parsed)] == [(0, "look", '{"city": "Oslo"}')]
    assert "".join(step.parsed.content for step in shown) == "I look. "


def test_calls_that_a_parser_tells_all_at_once_are_cut_to_the_first(parser_module: Any) -> None:
    parsed = parser(parser_module, False).feed("", [2, 3, 5, 6], final=True)
    assert calls(parsed) == [(0, "look", ""), (0, "", '{"city": "Oslo"}')]


def test_several_calls_are_several_where_nothing_was_said(parser_module: Any) -> None:
    (only,) = read(parser_module, ([1, 2, 3, 4, 5, 6, 7], "stop"), parallel=True)
    assert (only.ids, only.stop) == ([1, 2, 3, 4, 5, 6, 7], "")
    assert {index for index, *_ in calls(only.parsed)} == {0, 1} and only.parsed.content == "I look. more"

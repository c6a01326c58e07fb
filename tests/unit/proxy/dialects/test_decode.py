"""Bodies that are no strict JSON, or not of the very types, and whose meaning is clear: in every dialect they are read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.errors import BadRequest
from steno.contracts.json_limits import whole_text
from steno_proxy.dialects.anthropic.dialect import MessagesDialect
from steno_proxy.dialects.base import MOST_SURROGATES, whole_pairs
from steno_proxy.dialects.gemini.dialect import GeminiDialect
from steno_proxy.dialects.openai.chat import ChatDialect
from steno_proxy.dialects.openai.completions import CompletionsDialect
from steno_proxy.dialects.responses.dialect import ResponsesDialect

MESSAGES: Any = [{"role": "user", "content": "TEXT"}]
CONTENTS: Any = [{"role": "user", "parts": [{"text": "TEXT"}]}]
DIALECTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "chat": (ChatDialect(), {"messages": MESSAGES}, "max_tokens"),
    "completions": (CompletionsDialect(), {"prompt": "TEXT"}, "max_tokens"),
    "messages": (MessagesDialect(), {"messages": MESSAGES}, "max_tokens"),
    "responses": (ResponsesDialect(), {"input": "TEXT"}, "max_output_tokens"),
    "gemini": (GeminiDialect(), {"contents": CONTENTS}, "generationConfig"),
}


def body(name: str, text: str = "hi", limit: str = "") -> bytes:
    """text: as it stands between quotes. limit: of the answer, as JSON."""
    _, fields, field = DIALECTS[name]
    written = json.dumps(fields).replace("TEXT", text)
    if limit:
        limit = f'{{"maxOutputTokens": {limit}}}' if name == "gemini" else limit
        written = f'{{"{field}": {limit}, {written[1:]}'
    return written.encode()


def said(name: str, **how: str) -> str:
    job = DIALECTS[name][0].parse(body(name, **how)).job
    text = job.prompt_text if job.prompt_text is not None else job.messages[0]["content"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"a\ud99c x", "a\ufffd x"),
        (r"\uDE00", "\ufffd"),
        (r"\ud83d", "\ufffd"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\uD83D\uD83D\uDE00\ude00", "\ufffd\U0001f600\ufffd"),
        (r"\\ud83d\ud83d", "\\ud83d\ufffd"),
        (r"\\\ud83d", "\\\ufffd"),
        (r"\\ud83d\ude00", "\\ud83d\ufffd"),
        (r"\ud83d\\ude00", "\ufffd\\ude00"),
        (r"\ud83d\n\ude00\"", '\ufffd\n\ufffd"'),
    ],
)
def test_half_a_surrogate_pair_is_the_replacement_character(name: str, escaped: str, text: str) -> None:
    assert said(name, text=escaped) == text


@pytest.mark.parametrize("name", DIALECTS)
def test_beside_it_all_else_is_read_and_refused_as_ever(name: str) -> None:
    assert DIALECTS[name][0].parse(body(name, r"\ud800", "4096.0")).job.sampling.max_tokens == 4096
    with pytest.raises(BadRequest, match="must be at least 1"):
        DIALECTS[name][0].parse(body(name, r"\ud800", "0"))
    with pytest.raises(BadRequest, match="not valid JSON"):
        DIALECTS[name][0].parse(body(name, r"\ud800")[:-1])
    with pytest.raises(BadRequest, match="not valid JSON"):
        DIALECTS[name][0].parse(body(name, r"\ud800\u12"))


@given(
    st.lists(
        st.sampled_from(["\\", '"', "a", "u", "d83d", "\n", "\ud83d", "\ude00", "\U0001f600", "\ud99c"]), max_size=12
    )
)
def test_every_text_is_read_as_python_reads_it(parts: list[str]) -> None:
    written = json.dumps("".join(parts))
    whole = whole_pairs(written.encode())
    assert msgspec.json.decode(whole) == whole_text(json.loads(written))
    assert len(whole) == len(written)


def test_a_body_of_nothing_but_halves_is_refused() -> None:
    """They cost more than other characters; so many are no agent's text."""
    assert said("chat", text=r"\ud83d" * MOST_SURROGATES) == "\ufffd" * MOST_SURROGATES
    with pytest.raises(BadRequest, match="not valid JSON"):
        said("chat", text=r"\ud83d" * (MOST_SURROGATES + 1))


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("limit", ["4096.0", "4.096e3"])
def test_an_integer_may_be_written_as_a_float(name: str, limit: str) -> None:
    found = DIALECTS[name][0].parse(body(name, limit=limit))
    assert found.job.sampling.max_tokens == 4096
    assert [type(value) for value in found.asked.values()] in ([int], [float])


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("limit", ["4.5", "1e300", "-1.0", "0.0", '"4096.0"'])
def test_what_is_no_integer_or_out_of_bounds_stays_refused(name: str, limit: str) -> None:
    with pytest.raises(BadRequest) as caught:
        DIALECTS[name][0].parse(body(name, limit=limit))
    assert caught.value.field in (DIALECTS[name][2], "generationConfig.maxOutputTokens")


def test_so_may_every_other_one() -> None:
    fields = {"n": 2.0, "seed": 7.0, "top_k": 5.0, "stop_token_ids": [1.0, 2], "top_logprobs": 3.0, "logprobs": True,
              "min_tokens": 1.0, "temperature": 1.0, "logit_bias": {"5": 1.0}}  # fmt: skip
    found = ChatDialect().parse(json.dumps({"messages": MESSAGES, **fields}).encode())
    law = found.job.sampling
    assert (found.n, law.seed, law.top_k, law.stop_token_ids, found.job.top_logprobs) == (2, 7, 5, [1, 2], 3)
    assert (law.min_tokens, law.temperature, law.logit_bias) == (1, 1.0, {5: 1.0})
    screen = {"type": "computer_20250124", "name": "computer", "display_width_px": 1024.0, "display_height_px": 768.0}
    [tool] = MessagesDialect().parse(json.dumps({"messages": MESSAGES, "tools": [screen]}).encode()).job.tools
    assert "1024 x 768" in tool["function"]["description"]

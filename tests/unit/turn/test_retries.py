"""What marks a retry, what makes two requests one, and what is remembered of those that were refused."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.contracts.canonical import CanonicalRequest, Job, ResponseFormat
from proxy.plan import Plan
from proxy.retries import MOST_REFUSALS, WINDOW_S, Refusals, Sought, is_retry


@pytest.mark.parametrize(
    ("headers", "again"),
    [
        ([], False),
        ([(b"x-stainless-retry-count", b"0")], False),
        ([(b"x-stainless-retry-count", b"1")], True),
        ([(b"host", b"x"), (b"x-stainless-retry-count", b"12")], True),
        ([(b"x-stainless-retry-count", b"-1")], False),
        ([(b"x-stainless-retry-count", b"\xb2")], False),
        ([(b"x-stainless-retry-count", b"9" * 5000)], False),
        ([(b"x-envoy-attempt-count", b"1")], False),
        ([(b"x-envoy-attempt-count", b"2")], True),
    ],
)
def test_only_a_mark_makes_a_retry(headers: list[tuple[bytes, bytes]], again: bool) -> None:
    assert is_retry(headers) is again


def sought(
    *, digests: tuple[bytes, ...] = (b"a", b"b"), n: int = 1, asked: Any = None, stream: bool = False, **job: Any
) -> Sought:
    whole = Job(messages=[{"role": "user", "content": "x"}], **job)
    request = CanonicalRequest("chat", "m", whole, asked=asked or {"temperature": 0.5}, n=n, stream=stream)
    return Sought("chat", request, Plan(whole, whole.messages, list(digests), b"t", b"o"))


def test_a_stream_and_an_answer_in_one_piece_can_be_the_same_request() -> None:
    assert sought().same(sought(stream=True))
    assert sought().key("t") == sought(stream=True).key("t")


@pytest.mark.parametrize(
    "other",
    [
        sought(digests=(b"a",)), sought(n=2), sought(asked={"temperature": 0.6}), sought(asked={"max_tokens": 9}),
        sought(tool_choice="required"), sought(parallel_tool_calls=False), sought(top_logprobs=2),
        sought(response_format=ResponseFormat("json_object")), sought(prompt_text="x"), sought(prompt_ids=b"\0\0\0\0"),
    ],
)  # fmt: skip
def test_whatever_changes_what_may_be_sampled_makes_it_another(other: Sought) -> None:
    assert not sought().same(other)
    assert sought().key("t") != other.key("t")


def test_a_refusal_counts_for_one_retry_of_its_trial_and_not_for_ever() -> None:
    refusals = Refusals()
    one = sought()
    refusals.note(one.key("t"), 100.0)
    assert not refusals.take(one.key("other"), 101.0)
    assert refusals.take(one.key("t"), 101.0)
    assert not refusals.take(one.key("t"), 101.0)
    refusals.note(one.key("t"), 100.0)
    assert not refusals.take(one.key("t"), 100.0 + WINDOW_S)


def test_refusals_are_bounded() -> None:
    refusals = Refusals()
    for i in range(MOST_REFUSALS + 1):
        refusals.note(i.to_bytes(16, "little"), 100.0)
    assert not refusals.take((0).to_bytes(16, "little"), 101.0)
    assert refusals.take((1).to_bytes(16, "little"), 101.0)

"""What marks a retry, and what makes two requests one."""

from __future__ import annotations

from typing import Any

import pytest

from steno.contracts.chat import CanonicalRequest, Job, ResponseFormat
from steno_proxy.turns.continuation import Plan
from steno_proxy.turns.retry_matching import RequestIdentity, on_record, retries_so_far
from tests.unit.proxy.trial import HI, Trial


@pytest.mark.parametrize(
    ("headers", "again"),
    [
        ([], 0),
        ([(b"x-stainless-retry-count", b"0")], 0),
        ([(b"x-stainless-retry-count", b"1")], 1),
        ([(b"host", b"x"), (b"x-stainless-retry-count", b"12")], 12),
        ([(b"x-stainless-retry-count", b"-1")], 0),
        ([(b"x-stainless-retry-count", b"\xb2")], 0),
        ([(b"x-stainless-retry-count", b"9" * 5000)], 0),
        ([(b"x-envoy-attempt-count", b"1")], 0),
        ([(b"x-envoy-attempt-count", b"2")], 1),
    ],
)
def test_only_a_mark_makes_a_retry(headers: list[tuple[bytes, bytes]], again: int) -> None:
    assert retries_so_far(headers) == again


def sought(
    *, digests: tuple[bytes, ...] = (b"a", b"b"), n: int = 1, asked: Any = None, stream: bool = False, **job: Any
) -> RequestIdentity:
    whole = Job(messages=[{"role": "user", "content": "x"}], **job)
    request = CanonicalRequest("chat", "m", whole, asked=asked or {"temperature": 0.5}, n=n, stream=stream)
    return RequestIdentity(request, Plan(whole, whole.messages, list(digests), b"t", b"o"))


def test_a_stream_and_an_answer_in_one_piece_can_be_the_same_request() -> None:
    assert sought().key("t") == sought(stream=True).key("t")


@pytest.mark.parametrize(
    "other",
    [
        sought(digests=(b"a",)), sought(n=2), sought(asked={"temperature": 0.6}), sought(asked={"max_tokens": 9}),
        sought(tool_choice="required"), sought(parallel_tool_calls=False), sought(top_logprobs=2),
        sought(response_format=ResponseFormat("json_object")), sought(prompt_text="x"), sought(prompt_ids=b"\0\0\0\0"),
    ],
)  # fmt: skip
def test_whatever_changes_what_may_be_sampled_makes_it_another(other: RequestIdentity) -> None:
    assert sought().key("t") != other.key("t")


@pytest.mark.parametrize(("text", "compacts", "whole"), [
    (" \n", True, False), ("so far", True, True), (" \n", False, True),
])  # fmt: skip
async def test_a_summary_that_says_nothing_is_asked_for_again(text: str, compacts: bool, whole: bool) -> None:
    """Its client was told that it is a failure that may pass."""
    trial = Trial()
    await trial.said(text, reasoning="hm")
    plan = await trial.asked(HI)
    again = RequestIdentity(CanonicalRequest("chat", "", plan.job, compacts=compacts), plan)
    found = await on_record(trial.recorder, await trial.recorder.enter("t"), again, now=2.0)
    assert found is not None and (len(found.turns), found.whole) == (1, whole)

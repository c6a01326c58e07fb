"""Each rule of what a forked trial may ask otherwise: what it takes for equal, and what it does not."""

from __future__ import annotations

import time
from typing import Any

import pytest

from steno.contracts.records import ForkOf, MayDiffer
from steno_proxy.sessions.may_differ import ForkComparison

EQUAL = {
    MayDiffer.DATES: [
        ("Today is 2026-11-23.", "Today is 2031-01-02."),
        ("at 2026-11-23T10:00:00Z", "at 2026-11-24T23:59:59.123+02:00"),
        ("Date: Monday, November 23, 2026", "Date: Tue, Jan 5, 2027"),
        ("Mon Nov 23 10:00:00 UTC 2026", "Tue Jan  5 23:10:01 CET 2027"),
        ("23 November 2026", "1 May 2027"),
        ("it is 10:30", "it is 9:05:01 PM"),
        ("11/23/2026", "1/2/2027"),
    ],
    MayDiffer.TEMPORARY_PATHS: [
        ("cd /tmp/trial-1/work && ls", "cd /tmp/other/deeper && ls"),
        ('{"cwd": "/private/var/folders/ab/cd/T/x"}', '{"cwd": "/tmp/y"}'),
        ("in /var/tmp/a.", "in /dev/shm/b/c."),
    ],
    MayDiffer.IDS: [
        ("id 123e4567-e89b-12d3-a456-426614174000", "id 00000000-e89b-12d3-a456-4266141740ff"),
        ("commit 1a2b3c4", "commit 99f00d1e5"),
        ("call_0123456789ab_0", "call_ffffffffffff_12"),
    ],
    MayDiffer.PATHS: [("see /home/a/run-1/x.py", "see /srv/b"), ("(/data/one)", "(/data/two/three)")],
    MayDiffer.NUMBERS: [("took 12.5 s, 3 files", "took 0.1 s, 44 files")],
}
OTHER = {
    MayDiffer.DATES: [
        ("Today is 2026-11-23.", "Today is fine."),
        ("1.2.3", "1.2.4"),
        ("May I?", "June I?"),
        ("5", "6"),
    ],
    MayDiffer.TEMPORARY_PATHS: [
        ("/home/a", "/home/b"),
        ("tmp/a", "tmp/b"),
        ("/tmpfile", "/tmpother"),
        ("/tmp/a b", "/tmp/a c"),
    ],
    MayDiffer.IDS: [("defaced", "effaced"), ("1234567", "7654321"), ("call me", "call you"), ("abc", "abd")],
    MayDiffer.PATHS: [("a/b", "a/c"), ("see x", "see y")],
    MayDiffer.NUMBERS: [("one", "two"), ("1 a", "1 b")],
}


@pytest.mark.parametrize("rule", list(MayDiffer))
def test_a_rule_lets_differ_what_it_names_and_nothing_else(rule: MayDiffer) -> None:
    alone, none = ForkComparison([rule]), ForkComparison([])
    for one, other in EQUAL[rule]:
        assert alone.text(one) == alone.text(other), (one, other)
        assert none.text(one) != none.text(other)
    for one, other in OTHER[rule]:
        assert alone.text(one) != alone.text(other), (one, other)


def test_all_that_a_message_says_is_compared_so() -> None:
    usual = ForkComparison(ForkOf(trial_id="t", turn_id="u").may_differ)

    def message(where: str, **fields: Any) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"path": "{where}"}}'}}
        return {
            "role": "assistant",
            "content": [{"type": "text", "text": f"in {where}"}],
            "tool_calls": [call],
        } | fields

    assert usual.message(message("/tmp/a")) == usual.message(message("/tmp/b"))
    assert usual.message(message("/tmp/a")) != usual.message(message("/home/b"))
    assert usual.message(message("/tmp/a")) != usual.message(message("/tmp/a", role="user"))
    assert usual.message({"role": "prompt", "content": "/tmp/a"}) != usual.message(
        {"role": "prompt", "content": "/tmp/b"}
    )
    image = {"type": "image_url", "image_url": {"url": "data:a"}}
    assert usual.message(message("x", content=[image])) == usual.message(message("x", content=[image]))


def test_tools_are_compared_but_for_what_a_sampling_policy_takes_out() -> None:
    usual = ForkComparison([MayDiffer.TEMPORARY_PATHS])

    def tool(description: str, **fields: Any) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "description": description} | fields}]

    assert usual.tools(tool("in /tmp/a")) == usual.tools(tool("in /tmp/b", strict=True))
    assert usual.tools(tool("in /tmp/a")) != usual.tools(tool("at /tmp/a")) and usual.tools(None) == usual.tools([])


@pytest.mark.parametrize(
    "piece", ["2026-11-23T10:00:0", "/tmp/", "abcdef0", "call_", "1.", "Mon Nov 2", "aaaaaaaa-", " ", "0"]
)
def test_a_rule_takes_time_in_proportion_to_the_text(piece: str) -> None:
    """What an agent sends is compared; a pattern that goes back over it would hold up everybody."""
    everything = ForkComparison(MayDiffer)

    def spent(length: int) -> float:
        began = time.process_time()
        everything.text(piece * (length // len(piece)))
        return time.process_time() - began

    assert min(spent(400_000) for _ in range(3)) < 30 * min(spent(50_000) for _ in range(3)) + 0.1

"""What a client kept of a turn that was cut off is recognised; what is something else is not."""

from __future__ import annotations

import pytest

from steno_proxy.sessions.messages.cuts import is_beginning
from tests.unit.proxy.sessions.agent import assistant

TEXT = assistant("Let me look at that file.")
CALLS = assistant("Both.", ("call_0123456789ab_0", "ls", '{"a": 1}'), ("call_0123456789ab_1", "cat", '{"b": 2}'))


@pytest.mark.parametrize(
    ("echo", "reply"),
    [
        (assistant("Let me lo"), TEXT),
        (TEXT, TEXT),
        ({"role": "assistant", "content": [{"type": "text", "text": "Let "}, {"type": "text", "text": "me"}]}, TEXT),
        (assistant("Both."), CALLS),
        (assistant("Both.", ("call_0123456789ab_0", "ls", '{"a":1.0}')), CALLS),
        (CALLS, CALLS),
    ],
)
def test_any_beginning_is_an_echo(echo, reply):
    assert is_beginning(echo, reply)


@pytest.mark.parametrize(
    ("echo", "reply"),
    [
        (assistant(""), TEXT),
        (assistant(" \n"), TEXT),
        (assistant("Let us"), TEXT),
        (assistant("Let me look at that file. And"), TEXT),
        (assistant("Bo", ("call_0123456789ab_0", "ls", '{"a": 1}')), CALLS),
        (assistant("Both.", ("call_0123456789ab_1", "cat", '{"b": 2}')), CALLS),
        (assistant("Both.", ("call_0123456789ab_0", "ls", '{"a": 2}')), CALLS),
        (assistant("", ("call_0123456789ab_0", "ls", "{}")), TEXT),
    ],
)
def test_anything_else_is_not(echo, reply):
    assert not is_beginning(echo, reply)

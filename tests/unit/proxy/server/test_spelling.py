"""The path that a client means."""

from __future__ import annotations

import pytest

from steno_proxy.server.path_aliases import meant


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/messages", "/v1/messages"),
        ("/v1/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/responses/resp_0123456789ab", "/v1/responses/resp_0123456789ab"),
        ("/models/", "/v1/models"),
        ("/v1/models/org/name", "/v1/models/org/name"),
        ("/models/policy:generateContent", "/v1/models/policy:generateContent"),
        ("/v1/v1beta/models/policy:generateContent", "/v1beta/models/policy:generateContent"),
        ("//tokenize", "/tokenize"),
        ("/v1/detokenize/", "/detokenize"),
        ("/v1/health", "/health"),
    ],
)
def test_a_base_url_a_level_too_high_or_too_deep_is_understood(path: str, expected: str) -> None:
    assert meant(path) == expected
    assert meant(expected) == expected


@pytest.mark.parametrize(
    "path",
    ["", "/", "/v1", "/v1/v1", "/v1/embeddings", "/sessions", "//sessions", "/v1/../sessions", "/v1/v1/v1/models", "/x/v1/models",
     "/tokenize/x", "/v1/version/tokenize",
     "/openai/deployments/policy/chat/completions"],
)  # fmt: skip
def test_what_can_mean_nothing_stays_as_it_is(path: str) -> None:
    assert meant(path) == path

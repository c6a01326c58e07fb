"""What the OpenAPI document says of images: each format that takes them names its part."""

from __future__ import annotations

import json

import pytest

from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.app import create_app

PATHS = create_app(ProxySettings()).openapi()["paths"]


@pytest.mark.parametrize(
    ("ending", "part"),
    [
        ("/v1/chat/completions", "image_url"), ("/v1/messages", "image"), ("/v1/responses", "input_image"),
        ("}:generateContent", "inlineData"),
    ],
)  # fmt: skip
def test_the_parts_that_requests_may_hold_name_images(ending: str, part: str) -> None:
    [operation] = [found["post"] for path, found in PATHS.items() if path.endswith(ending) and "/v1/v1" not in path]
    assert f'"{part}"' in json.dumps(operation["requestBody"])

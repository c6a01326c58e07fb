"""Schemathesis over the OpenAPI document: whatever fits the document, or nearly fits it, is never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.app import create_app
from tests.support.programs.stack import ROOT, running

schema = schemathesis.openapi.from_dict(create_app(ProxySettings()).openapi())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("schema")
    script = folder / "script.py"
    script.write_text("def say(request):\n    return 'ok'\n")
    model = ["--model", str(ROOT / "steno/models/tiny")]
    with running(folder, ["--engine", "scripted", "--script", f"{script}:say", *model]) as stack:
        yield stack.url
        assert stack.proxy.poll() is None
        assert "unhandled exception" not in (folder / "proxy.log").read_text()


# An event stream ends with its session, and a response that never ends is nothing that a schema can check.
@schema.exclude(path="/sessions/{trial_id}/events").parametrize()
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_no_request_is_a_server_error(case: schemathesis.Case, url: str) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("wait_s"), int | float):
        case.body["wait_s"] = (
            0  # a lease that nobody can grant is waited for, rightly, and for longer than this test waits
        )
    response = case.call(base_url=url, timeout=120)
    case.validate_response(response, checks=[not_a_server_error, content_type_conformance, response_schema_conformance])

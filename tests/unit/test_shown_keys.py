"""A key that is being rotated: programs that show one take the first line of its file, and no message has a key in it."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.client.client import AsyncClient, Client
from steno.client.transport import as_error
from steno.config.settings import Settings, admin_key_here
from steno.contracts.errors import ConfigError
from steno_adapters.verl.settings import VerlSettings
from steno_cli.commands.evaluate import EvaluateSettings
from steno_cli.terminal.connection import ClientSettings
from steno_rollouts.config import RolloutSettings
from steno_trainer.run_config import RunSettings
from steno_worker.config import WorkerSettings

ROTATED = "\n  new-secret  \nold-secret\n"
ROLLOUT = {"tasks": "t", "command": ["agent"]}
PROGRAMS: list[tuple[type[Settings], dict[str, Any], str]] = [
    (ClientSettings, {}, "key"),
    (RolloutSettings, ROLLOUT, "key"),
    (EvaluateSettings, ROLLOUT, "key"),
    (RunSettings, {"model": "m", "checkpoint_dir": "c"}, "key"),
    (WorkerSettings, {"model": "m"}, "key"),
    (VerlSettings, {**ROLLOUT, "proxy": "http://proxy"}, "key"),
    (VerlSettings, {**ROLLOUT, "proxy": "http://proxy"}, "worker_key"),
]
WHICH = [f"{program.__name__}.{name}" for program, _, name in PROGRAMS]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("STENO_"):
            monkeypatch.delenv(name)


def authorization(key: Any) -> str | None:
    """What a client with this key sends."""
    seen: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"items": []})

    with Client("http://proxy", key, transport=httpx.MockTransport(handler)) as client:
        client.models()
    return seen[0]


@pytest.mark.parametrize(("program", "given", "name"), PROGRAMS, ids=WHICH)
def test_of_a_key_file_with_two_lines_each_program_shows_the_first(
    program: type[Settings], given: dict[str, Any], name: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text(ROTATED)
    found = getattr(program.load(given | {f"{name}_file": str(file)}, None), name)
    assert found.get_secret_value() == "new-secret"
    assert authorization(found) == "Bearer new-secret"


@pytest.mark.parametrize(("program", "given", "name"), PROGRAMS, ids=WHICH)
def test_a_key_that_no_header_can_have_is_refused_by_name_and_not_quoted(
    program: type[Settings], given: dict[str, Any], name: str, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text("clé-secret\nold-secret\n")
    with pytest.raises(
        ConfigError, match=rf"{re.escape(program.flag(name))}.file: .* must be printable ASCII"
    ) as caught:
        program.load(given | {f"{name}_file": str(file)}, None)
    assert caught.value.field == name
    assert "secret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_shows_the_first_line_and_refuses_what_is_not_ascii_without_quoting_it(
    kind: Callable[..., Any],
) -> None:
    assert authorization(ROTATED) == "Bearer new-secret"
    assert authorization("") is authorization(" \n") is None
    for key in ("clé-secret", "tab\tsecret", "nul\0secret"):
        with pytest.raises(ConfigError, match=r"^key: .* must be printable ASCII") as caught:
            kind("http://proxy", key)
        assert "secret" not in caught.value.message


def test_the_shells_admin_key_may_have_a_space_in_it_as_the_proxys_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_ADMIN_KEY", "two words\nold")
    found = admin_key_here()
    assert found is not None and found.get_secret_value() == "two words"
    monkeypatch.setenv("STENO_ADMIN_KEY", "clé-secret")
    with pytest.raises(ConfigError, match=r"^STENO_ADMIN_KEY: ") as caught:
        ClientSettings.load({}, None)
    assert "secret" not in caught.value.message


def test_a_request_that_is_no_http_is_never_quoted() -> None:
    """h11 and httpcore quote the header that they refuse."""
    try:
        try:
            raise httpx.LocalProtocolError("Illegal header value b'Bearer new-secret\\nold-secret'")
        except httpx.TransportError as error:
            raise as_error(error, httpx.URL("http://proxy")) from error.__cause__
    except Exception as error:
        assert "http://proxy" in str(error)
        assert "secret" not in "".join(traceback.format_exception(error))

"""`steno ui FILE` and the browser that it opens."""

from __future__ import annotations

import json
import threading
import webbrowser
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from steno_cli.main import app
from steno_cli.recorded import server
from tests.unit.cli.recorded.test_turn_file import ROW


def test_the_page_is_there_for_a_browser_that_ends_before_the_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the terminal (w3m, lynx, what $BROWSER names): `webbrowser.open` returns when they have ended."""
    answers: list[int] = []
    ended = threading.Event()

    def browse(address: str) -> bool:
        try:
            answers.append(httpx.get(address, timeout=60, trust_env=False).status_code)
        finally:
            ended.set()
        return True

    class Interrupted(server.RecordedServer):
        def service_actions(self) -> None:
            if ended.is_set():
                raise KeyboardInterrupt

    monkeypatch.setattr(webbrowser, "open", browse)
    monkeypatch.setattr(server, "RecordedServer", Interrupted)
    (tmp_path / "turns.jsonl").write_text(json.dumps(ROW))
    done = CliRunner().invoke(app, ["ui", str(tmp_path / "turns.jsonl")])
    assert done.exit_code == 0, done.exception
    assert answers == [200]
    assert done.stdout.startswith("http://127.0.0.1:") and "Serving until Ctrl-C." in done.stderr

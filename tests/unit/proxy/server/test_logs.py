"""What the proxy logs stays one line a record, whatever a client puts into its path."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import msgspec
import pytest

from steno_proxy import logs


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:], level = before
    logger.setLevel(level)
    logs.bind("", "")


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_hostile_trial_id_makes_no_second_line(root: logging.Logger, style: str) -> None:
    out = io.StringIO()
    logs.setup("info", style, out)  # type: ignore[arg-type]
    for trial_id in (
        "a\n2026-01-01 INFO steno_proxy.server.app admin key: x",
        "a\r\x00\x1b[2J",
        "\u2028",
        "x" * 60_000,
    ):
        logs.bind(trial_id, "0123")
        logging.getLogger("proxy.test").info("said")
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and all(len(line) < 400 for line in lines)
    if style == "json":
        assert msgspec.json.decode(lines[1])["message"] == "said"


def test_a_trial_id_is_shown_as_it_is(root: logging.Logger) -> None:
    out = io.StringIO()
    logs.setup("info", "text", out)
    logs.bind("my-trial.1", "0123")
    logging.getLogger("proxy.test").info("said")
    assert out.getvalue().endswith("INFO proxy.test [my-trial.1 0123] said\n")


def test_a_message_that_repeats_a_client_stays_one_printable_line(root: logging.Logger) -> None:
    out = io.StringIO()
    logs.setup("info", "text", out)
    logging.getLogger("proxy.test").info("request refused: %s", "resp_\x00\n2026 \x1b[2J\u2028 grüße")
    (line,) = out.getvalue().splitlines()
    assert line.isprintable() and line.endswith(r"request refused: resp_\x00\n2026 \x1b[2J\u2028 grüße")

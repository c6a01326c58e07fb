"""Logging of the proxy: one handler, text or JSON lines, with the request's ids bound once.

`bind(trial_id, request_id)` at the start of a request puts both on every record that is logged under it, in whatever
module. INFO is lifecycle, DEBUG is frames; neither prompt text nor keys are ever logged.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from typing import IO, Literal

import msgspec

_ids: ContextVar[tuple[str, str]] = ContextVar("steno_log_ids", default=("", ""))
MAX_ID = 128
"""Characters of a trial id; longer ones are none."""
_EXPECTED_BREAKS = ("ASGI callable returned without completing response.",)
"""What uvicorn says when a stream is broken on purpose (an error after its first byte). We have logged why by then."""


def bind(trial_id: str, request_id: str) -> None:
    """Put these ids on what this task (and tasks it starts) logs from here on. A trial id may be what a hostile client put into
    its path: whatever it is, a record stays one line."""
    if len(trial_id) > MAX_ID or not trial_id.isprintable():
        trial_id = ascii(trial_id[:MAX_ID])
    _ids.set((trial_id, request_id))


def setup(level: str, style: Literal["text", "json"], stream: IO[str] | None = None) -> None:
    """Configure the root logger; replaces what was configured before. To stderr unless told otherwise."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(_bind_ids)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name != "uvicorn.access"
    uvicorn_log = logging.getLogger("uvicorn.error")
    uvicorn_log.addFilter(_not_expected)
    uvicorn_log.setLevel(max(logging.WARNING, root.level))  # its lifecycle is ours, said once by main
    logging.getLogger("websockets").setLevel(max(logging.INFO, root.level))


def _bind_ids(record: logging.LogRecord) -> bool:
    record.trial_id, record.request_id = _ids.get()
    return True


def _not_expected(record: logging.LogRecord) -> bool:
    return record.msg not in _EXPECTED_BREAKS


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,123 INFO steno_proxy.turns.service [trial request] message`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(ids)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        ids = " ".join(word for word in (record.__dict__.get("trial_id"), record.__dict__.get("request_id")) if word)
        record.__dict__["ids"] = f" [{ids}]" if ids else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """A message may repeat what a client sent: it stays one line, and no control character reaches a terminal."""
        if not record.message.isprintable():
            record.message = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (Unix seconds), `level`, `logger`, `message`, and ids and traceback where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "trial_id": record.__dict__.get("trial_id") or None,
            "request_id": record.__dict__.get("request_id") or None,
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return msgspec.json.encode({key: value for key, value in line.items() if value is not None}).decode()

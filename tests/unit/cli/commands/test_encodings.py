"""What commands print where the locale is not UTF-8."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from steno.contracts.records import Session, Turn
from steno_cli.commands import sessions
from steno_cli.exports import export
from steno_cli.main import main
from tests.support.records import recordings

WORDS = "grüße → 世界"


class Records:
    """A client that gives one session of one turn."""

    def session(self, trial_id: str) -> Session:
        return recordings.session(trial_id)

    def turns(self, trial_id: str) -> Iterator[Turn]:
        yield recordings.turn(0).model_copy(update={"reply": {"role": "assistant", "content": WORDS}})


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def printed(to: io.BytesIO, encoding: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(sessions, "connect", lambda *_, **__: nullcontext(Records()))
    monkeypatch.setattr(export, "_write_texts", lambda *_: None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["steno", *words])
    out = io.TextIOWrapper(to, encoding=encoding)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as ended:
            main()
        out.flush()
    assert not ended.value.code
    return to.getvalue()


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
@pytest.mark.parametrize("words", [["sessions", "export", "t"], ["sessions", "show", "--json", "t"]])
def test_json_lines_are_utf8_in_every_locale(encoding: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    *_, turn = printed(io.BytesIO(), encoding, words, monkeypatch).decode("utf-8").splitlines()
    assert json.loads(turn)["reply"]["content"] == WORDS


@pytest.mark.parametrize(
    ("to", "encoding", "shown"),
    [
        (Terminal, "latin-1", "gr\u00fc\u00dfe ? ??".encode("latin-1")),
        (Terminal, "ascii", b"gr??e ? ??"),
        (Terminal, "utf-8", WORDS.encode()),
        (io.BytesIO, "ascii", WORDS.encode()),
    ],
    ids=["latin-1", "ascii", "utf-8", "pipe"],
)
def test_a_terminal_is_shown_what_it_has_characters_for_and_a_pipe_all(
    to: type[io.BytesIO], encoding: str, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown in printed(to(), encoding, ["sessions", "show", "t"], monkeypatch)

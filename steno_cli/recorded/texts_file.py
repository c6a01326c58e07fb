"""Texts of tokens beside exported turns (`FILE.tokenizers.jsonl`): found by one look through the file, read when asked for."""

from __future__ import annotations

from pathlib import Path

import msgspec

from steno.contracts.errors import ConfigError
from steno.contracts.rest import TEXTS_SUFFIX


class _Line(msgspec.Struct):
    """As `steno.contracts.rest.TokenTexts`."""

    tokenizer: str
    texts: list[str]
    special: list[int]


class TextsFile:
    """Args: turns: the file of turns, or a link to it, beside which it may lie. Without it nothing is known: ids are shown.

    Raises: ConfigError: it is there, and a line of it is something else; names the file and the line.
    """

    def __init__(self, turns: Path) -> None:
        self._places: dict[str, int] = {}
        beside = [path.with_name(path.name + TEXTS_SUFFIX) for path in (turns, turns.resolve())]
        self._path = next((path for path in beside if path.is_file()), beside[0])
        if not self._path.is_file():
            return
        at = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._places[self._key(number, line)] = at
                at += len(line)

    def _key(self, number: int, line: bytes) -> str:
        try:
            return msgspec.json.decode(line, type=_Line).tokenizer
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self._path}, line {number}: no texts of tokens as `steno sessions export` writes them ({error})"
            ) from None

    @property
    def tokenizers(self) -> list[str]:
        """Keys of those that are there, as `GET /workers/tokenizers` gives them."""
        return sorted(self._places)

    def line(self, tokenizer: str) -> bytes | None:
        """JSON, as `GET /workers/tokenizers/{key}` gives it; None: it is not there."""
        place = self._places.get(tokenizer)
        if place is None:
            return None
        with self._path.open("rb") as file:
            file.seek(place)
            return file.readline()

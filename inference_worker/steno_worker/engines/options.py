"""What the engines of this package check before anything is loaded: the model directory and their own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steno.contracts.errors import ConfigError
from steno.models import TINY


def model_directory(model: Any, *, weights: bool) -> Path:
    """The directory of a model in Hugging Face layout; by default the one that ships with the project.

    weights: whether the model itself is needed, and not only its tokenizer and template.
    Raises: ConfigError saying what is missing there.
    """
    directory = Path(str(model)).expanduser() if model else TINY
    if not directory.is_dir():
        raise ConfigError(
            f"model: {directory} is not a directory, and this engine downloads none: give a model's folder (`hf download NAME "
            "--local-dir DIR` makes one), or --engine vllm, which takes names too"
        )
    for name in ("config.json", "tokenizer.json")[0 if weights else 1 :]:
        if not (directory / name).is_file():
            raise ConfigError(f"model: {directory} has no {name}: not a model in Hugging Face layout")
    return directory


def engine_options(given: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments over their defaults, each converted to its default's type.

    given: a mapping, or a list of "name=value" as the command line gives them, or None.
    Raises: ConfigError naming the argument that is unknown or can't be converted.
    """
    options = dict(defaults)
    for name, value in _pairs(given):
        key = name.lstrip("-").replace("-", "_")
        if key not in defaults:
            raise ConfigError(
                f"engine_args: unknown argument {name!r}; this engine knows {', '.join(defaults) or 'none'}"
            )
        try:
            options[key] = type(defaults[key])(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"engine_args: {name}: {error}") from error
    return options


def _pairs(given: Any) -> list[tuple[str, Any]]:
    if not given:
        return []
    if isinstance(given, Mapping):
        return list(given.items())
    pairs: list[tuple[str, Any]] = []
    words = list(given)
    while words:
        word = words.pop(0)
        name, equals, value = str(word).partition("=")
        if not equals:
            if not words:
                raise ConfigError(f"engine_args: {word!r} has no value")
            value = words.pop(0)
        pairs.append((name, value))
    return pairs

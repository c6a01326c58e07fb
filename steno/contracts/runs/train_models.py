"""Which calls are trained, by the model name that the agent asked for: the setting `train_models` of all trainers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import StringConstraints

from steno.contracts.errors import ConfigError
from steno.contracts.records import SampledRange

ModelNames = list[Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]]
"""Patterns with * and ?; none: calls by any name."""


def checked(models: Sequence[str]) -> tuple[str, ...]:
    """Raises: ConfigError: one name in place of a list, which would be taken for the names of its letters."""
    if isinstance(models, str):
        raise ConfigError(f"train_models: got {models!r}, must be a list of names", field="train_models")
    return tuple(models)


def asked_for(part: SampledRange, models: Sequence[str]) -> bool:
    """Whether the call of this completion asked for one of these models.

    Args: models: as in `ModelNames`. Raises: ConfigError: the name that it asked for is not known.
    """
    if not models:
        return True
    if part.model is None:
        raise ConfigError(
            "train_models: these samples do not say which model was asked for: an older proxy or export made them",
            field="train_models",
        )
    return any(fnmatchcase(part.model, pattern.replace("[", "[[]")) for pattern in models)

"""A program's file of settings, YAML or TOML. In YAML words are words, as far as settings go."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from steno.contracts.errors import ConfigError

_BOOL, _TIMESTAMP = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp"


class _Dateless(yaml.SafeLoader):
    """YAML but for dates, which no setting takes: they stay as written."""


class SettingsLoader(_Dateless):
    """YAML where `on`, `off`, `yes` and `no` stay as written, too: `archive: off`. A setting that is a bool takes such words."""


_Dateless.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != _TIMESTAMP]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
SettingsLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != _BOOL or first in "tTfF"]  # `true` and `false`
    for first, found in _Dateless.yaml_implicit_resolvers.items()
}


def read_config_file(path: Path, free: Collection[str]) -> dict[str, Any]:
    """The settings of a file, by name. In the settings that `free` names, which are dictionaries of anything, `on` and the like
    become bools, as usual in YAML: no setting's type says there what is meant. Raises: ConfigError."""
    is_toml = path.suffix == ".toml"
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if is_toml else yaml.load(text, SettingsLoader)
        if isinstance(values, dict) and not is_toml and not values.keys().isdisjoint(free):
            values |= {name: value for name, value in yaml.load(text, _Dateless).items() if name in free}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not valid {'TOML' if is_toml else 'YAML'}: {error}") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path}: got a {type(values).__name__}, must be a mapping of settings by name")
    for key in values or ():
        if not isinstance(key, str):  # YAML's `true`, `1` or `null`
            raise ConfigError(f"{path}: got the key {key!r} ({type(key).__name__}), must be the name of a setting")
    return values or {}

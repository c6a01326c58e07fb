"""How each program gets its settings: command line > environment > file > default, and nothing that it does not know.

A program declares one frozen tree of fields:

    class ProxySettings(Settings):
        model_config = SettingsConfigDict(env_prefix="STENO_")
        port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one")
        admin_key: SecretStr | None = Field(None, description="opens the control plane")

and calls `ProxySettings.load(cli, file)`. Constructing one directly (`ProxySettings(port=1)`, as tests do) reads
neither environment nor files. Every secret `x` may also be given as `x_file`, a path whose stripped content is it; `secret_files`
says which were, for those who read them again.
Lists take JSON or, in the environment, words between commas. A nested field is `STENO_OUTER__INNER` in the environment. A free
dictionary is one value: whoever gives it replaces it, but for `STENO_OUTER__INNER`, which sets one of its keys, by JSON or text.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, PrivateAttr, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from steno.config.config_file import read_config_file
from steno.config.keys import first_key
from steno.config.proxy_url import proxy_url
from steno.contracts.errors import ConfigError

PREFIXES = {
    "STENO_": "steno proxy",
    "STENO_WORKER_": "steno worker",
    "STENO_TRAIN_": "steno train",
    "STENO_CLIENT_": "steno sessions",
    "STENO_ROLLOUT_": "steno rollout",
    "STENO_VERL_": "agent loops in verl",
    "STENO_TASK_": "the commands that steno rollout runs",
    "STENO_TEST_": ".ci/run",
    "STENO_AGENT_": "agents, as steno env points them",
    "STENO_AGENTS_": "the tests with agents",
    "STENO_VLLM_": "the tests on vLLM",
}
"""Who reads which environment variables. A program refuses unknown names under its own prefix only."""

_PASSWORD_OF_QUERY = re.compile(r"([?&]\w*password=)[^&\s]*")
_PASSWORD_OF_USER = re.compile(r"(?<=://)\S*:\S*(?=@)")
"""In a URL, up to the last @: an @, or what should have been escaped, may be in the password."""
_DEFAULT = "default"


PROXY = "STENO_PROXY"
"""Where the proxy is, for every program that speaks to it: what their `proxy` is unless it is given."""
ADMIN_KEY = "STENO_ADMIN_KEY"
PROXY_URL = "http://127.0.0.1:8000"
PROXY_HELP = f"http(s) URL of the proxy, path prefix included; unset: {PROXY}, else {PROXY_URL}"


ProxyUrl = Annotated[str, AfterValidator(proxy_url)]


RENAMED = {"STENO_CLIENT_URL": PROXY}
"""Variables that had other names once."""


def proxy_here() -> str:
    return os.environ.get(PROXY, "").strip() or PROXY_URL


def proxies_here() -> list[str]:
    return [proxy_here()]


def admin_key_here() -> SecretStr | None:
    """On the proxy's own machine the operator's shell has the admin key already: what programs that need one fall back on. Of
    several, one a line while they are rotated, the first. Raises: ConfigError."""
    try:
        key = first_key(os.environ.get(ADMIN_KEY, ""))
    except ValueError as error:
        raise ConfigError(f"{ADMIN_KEY}: {error}", field="key") from None
    return SecretStr(key) if key is not None else None


_DEFAULTS_HERE: dict[Any, str] = {proxy_here: PROXY, proxies_here: PROXY, admin_key_here: ADMIN_KEY}
"""Defaults that are read from the environment, and the variable of each."""


class _Environment(EnvSettingsSource):
    """pydantic's reader of the environment, which also takes `a,b` for a list of strings, and in a free dictionary numbers."""

    _free = False

    def explode_env_vars(self, field_name: str, field: FieldInfo, env_vars: Mapping[str, str | None]) -> dict[str, Any]:
        self._free = _is_free(field)
        found = super().explode_env_vars(field_name, field, env_vars)
        return _json_or_text(found) if self._free else found

    def decode_complex_value(self, field_name: str, field: FieldInfo | None, value: Any) -> Any:
        if field is None:  # deep in a dictionary
            return value if self._free else json.loads(value)
        is_list = any(typing.get_origin(kind) in (list, tuple) for kind in _types(field.annotation))
        if is_list and value.lstrip()[:1] not in ("[", "{"):
            return [word.strip() for word in value.split(",") if word.strip()]
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError as error:
            prefix = str(self.settings_cls.model_config["env_prefix"]).upper()
            raise ConfigError(f"{prefix}{field_name.upper()}: not valid JSON: {error}", field=field_name) from None


def _json_or_text(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _json_or_text(value) for name, value in found.items()}
    if not isinstance(found, str):
        return found
    try:
        value = json.loads(found)
    except ValueError:
        return found
    # `1.10` is a version, and `12e4567` a hash: a number is one that JSON writes in the same way.
    return found if isinstance(value, float) and json.dumps(value) != found else value


class Settings(BaseSettings):
    """Base of every program's settings. Frozen; refuses unknown keys by name."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_nested_delimiter="__", hide_input_in_errors=True)

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _secret_files: dict[str, Path] = PrivateAttr(default_factory=dict)
    _file: Path | None = PrivateAttr(default=None)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the caller passes: `load` composes the sources itself, so as to say where a bad value is from."""
        return (init_settings,)

    @classmethod
    def load(cls, cli: Mapping[str, Any], file: Path | None) -> Self:
        """The resolved settings.

        Args:
            cli: field name -> value given on the command line; None (and an empty list) means not given.
            file: a YAML (`.yaml`, `.yml`) or TOML file with the same field names, or None.
        Raises:
            ConfigError: names the key, its source and what is wrong.
        """
        given = {key: value for key, value in cli.items() if value is not None and value != []}
        layers: list[tuple[dict[str, Any], Callable[[str], str]]] = [
            (read_config_file(file, cls._free()) if file is not None else {}, lambda key: f"{key} in {file}"),
            (cls._read_environment(), cls.variable),
            (given, cls.flag),
        ]
        merged: dict[str, Any] = {}
        origins: dict[str, str] = {}
        files: dict[str, Path] = {}
        for values, name_of in layers:
            cls._refuse_unknown(values, name_of)
            for name in cls._secrets():
                if values.get(f"{name}_file") is not None:
                    files[name] = Path(values[f"{name}_file"])
                elif name in values:
                    files.pop(name, None)
            resolved = _read_secrets(dict(values), cls._secrets(), name_of)
            parts = cls._given_in_parts(resolved) if name_of == cls.variable else set()
            for name, value in resolved.items():
                if name in parts or (name in cls._nested() and isinstance(value, dict)):
                    merged[name] = _merged(merged.get(name), value)
                    paths = [path for path in _paths({name: value}) if path != name or name not in parts]
                else:
                    merged[name], paths = value, [name]
                    origins = {path: place for path, place in origins.items() if not path.startswith(f"{name}.")}
                for path in paths:
                    origins[path] = name_of(f"{path}_file" if f"{path}_file" in values else path)
        origins |= {name: variable for name, variable in cls._defaults_here().items() if name not in merged}
        try:
            settings = cls(**merged)
        except ValidationError as error:
            raise ConfigError(_explain(error, origins), field=_dotted(error.errors()[0]["loc"])) from None
        settings._origins.update(origins)
        settings._secret_files.update(files)
        settings._file = file
        return settings

    @property
    def file(self) -> Path | None:
        """The settings' file, if one was given."""
        return self._file

    @property
    def secret_files(self) -> dict[str, Path]:
        """Name of each secret that was read from a file -> that file."""
        return dict(self._secret_files)

    def with_secrets(self, found: Mapping[str, tuple[str, Path]]) -> Self:
        """The same settings with these secrets, each read from a file."""
        copy = self.model_copy(update={name: SecretStr(value) for name, (value, _) in found.items()})
        copy._secret_files = self._secret_files | {name: path for name, (_, path) in found.items()}
        return copy

    @classmethod
    def flag(cls, key: str) -> str:
        """A (dotted) field name on the command line."""
        return "--" + key.replace("_", "-").replace(".", "-")

    @classmethod
    def variable(cls, key: str) -> str:
        """The environment variable of a (dotted) field name."""
        return (cls.model_config["env_prefix"] + key.replace(".", "__")).upper()

    def resolved(self) -> dict[str, Any]:
        """Every field with its value in effect, as JSON types; secrets, also those inside URLs, are masked."""
        dumped: dict[str, Any] = _mask(self.model_dump(mode="json"))
        return dumped

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.resolved().items()

    def origin(self, key: str) -> str:
        """Where a top-level field's value came from: `--port`, `STENO_PORT`, `port in steno.yaml` or `default`."""
        found = [name for path, name in self._origins.items() if path == key or path.startswith(key + ".")]
        return ", ".join(found) or _DEFAULT

    @classmethod
    def _secrets(cls) -> list[str]:
        return [name for name, field in cls.model_fields.items() if SecretStr in _types(field.annotation)]

    @classmethod
    def _free(cls) -> list[str]:
        return [name for name, field in cls.model_fields.items() if _is_free(field)]

    @classmethod
    def _defaults_here(cls) -> dict[str, str]:
        """Fields whose default is that of a variable which is set."""
        found = {name: _DEFAULTS_HERE.get(field.default_factory) for name, field in cls.model_fields.items()}
        return {name: variable for name, variable in found.items() if variable and os.environ.get(variable, "").strip()}

    @classmethod
    def _nested(cls) -> set[str]:
        """Fields with fields of their own, each of which has a place to come from."""
        return {
            name
            for name, field in cls.model_fields.items()
            if any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in _types(field.annotation))
        }

    @classmethod
    def _given_in_parts(cls, values: Mapping[str, Any]) -> set[str]:
        """Those of the environment's values that were given as `STENO_OUTER__INNER` alone."""
        whole = {name.upper() for name in os.environ}
        return {name for name, value in values.items() if isinstance(value, dict) and cls.variable(name) not in whole}

    @classmethod
    def _read_environment(cls) -> dict[str, Any]:
        prefix = str(cls.model_config["env_prefix"]).upper()
        known = {cls.variable(name): name for name in [*cls.model_fields, *(f"{s}_file" for s in cls._secrets())]}
        values: dict[str, Any] = {}
        for name in os.environ:
            upper = name.upper()
            if not upper.startswith(prefix) or upper in (prefix.rstrip("_"), PROXY):
                continue
            if upper in RENAMED:
                raise ConfigError(f"{name}: this setting was renamed to {RENAMED[upper]}", field=name)
            if upper.split("__")[0] not in known and upper not in known:
                if any(upper.startswith(other) for other in PREFIXES if len(other) > len(prefix)):
                    continue
                raise ConfigError(f"{name}: no such setting{_suggest(upper, known)}", field=name)
            if upper in known and known[upper] not in cls.model_fields:
                values[known[upper]] = os.environ[name]
        return _Environment(cls, case_sensitive=False)() | values

    @classmethod
    def _refuse_unknown(cls, values: Mapping[str, Any], name_of: Callable[[str], str]) -> None:
        known = [*cls.model_fields, *(f"{name}_file" for name in cls._secrets())]
        for key in values:
            if key not in known:
                raise ConfigError(f"{name_of(key)}: no such setting{_suggest(key, known)}", field=key)


def _read_secrets(values: dict[str, Any], secrets: Iterable[str], name_of: Callable[[str], str]) -> dict[str, Any]:
    for name in secrets:
        path = values.pop(f"{name}_file", None)
        if path is None:
            continue
        if name in values:
            raise ConfigError(f"{name_of(name)} and {name_of(name + '_file')} are both given; give one", field=name)
        try:
            values[name] = Path(path).read_text().strip()
        except OSError as error:
            raise ConfigError(f"{name_of(name + '_file')}: {path}: {error.strerror}", field=name) from None
        except UnicodeDecodeError:
            raise ConfigError(f"{name_of(name + '_file')}: {path}: not text", field=name) from None
        if not values[name]:
            raise ConfigError(f"{name_of(name + '_file')}: {path} is empty", field=name)
    return values


def _merged(below: Any, above: Any) -> Any:
    """Of two layers' values of a field. Dictionaries are merged at every level."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


def _paths(values: Mapping[str, Any], outer: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield f"{outer}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{outer}{key}.")


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors():
        words = [str(word) for word in problem["loc"]]
        nearest = next((p for n in range(len(words), 0, -1) if (p := ".".join(words[:n])) in origins), None)
        where = origins[nearest] if nearest else _dotted(problem["loc"]) or "settings"
        inner = "" if nearest is None or nearest == ".".join(words) else f" at {'.'.join(words)}"
        said, value = problem["msg"].removeprefix("Value error, "), problem["input"]
        if problem["type"] in ("string_type", "path_type") and not isinstance(value, str | list | dict | None):
            said = f"got a value of type {type(value).__name__}, must be text: put it in quotes"  # `42`, which may be a secret
        lines.append(f"{where}{inner}: {said}")
    return "; ".join(lines)


def _suggest(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _dotted(location: Iterable[int | str]) -> str:
    return ".".join(str(word) for word in location)


def _is_free(field: FieldInfo) -> bool:
    """Whether it is a dictionary of anything."""
    return any(typing.get_args(kind)[1:] == (Any,) for kind in _types(field.annotation))


def _types(annotation: Any) -> set[Any]:
    return {annotation, *(found for part in typing.get_args(annotation) for found in _types(part))}


def _mask(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mask(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mask(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return _PASSWORD_OF_USER.sub("***", _PASSWORD_OF_QUERY.sub(r"\1***", value))


__all__ = ["PREFIXES", "Settings", "SettingsConfigDict", "proxy_url"]


def is_loopback(host: str) -> bool:
    """Whether a host, as a name or an address, is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

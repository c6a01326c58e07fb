"""Command-line flags made from a program's settings, so that the two can't drift apart.

`settings_command` gives a function with one keyword parameter per field, for typer to read: `redis_url` is `--redis-url`, a list
may be repeated, a tuple is words between commas, a bool is `--x/--no-x`, a secret has `--x-file` beside it. Values stay text: the
settings check them, and name the flag they dislike.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
import yaml
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from rich.markup import escape
from typer.core import TyperCommand, TyperOption

from steno.config.settings import Settings
from steno.contracts.errors import ConfigError

S = TypeVar("S", bound=Settings)

_UNITS = {"_s": "SECONDS", "_bytes": "BYTES", "_tokens": "TOKENS", "_url": "URL", "_steps": "STEPS"}
_TEXT_OR_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9.]+e[-+][0-9]+')
NO_METAVAR = " "
"""Of flags that take no value: typer would print `<bool>`."""
_KINDS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH", SecretStr: "SECRET"}
_TYPER_KINDS = {
    "<bool>": NO_METAVAR, "<int>": "INTEGER", "<int range>": "INTEGER", "<list[int]>": "INTEGER", "<float>": "NUMBER",
    "<str>": "TEXT", "<path>": "PATH",
}  # fmt: skip


def settings_command(
    settings: type[S], run: Callable[[S], None], *, rest: str | None = None, hidden: frozenset[str] = frozenset()
) -> Callable[..., None]:
    """A typer command that loads `settings` and runs `run` with them, or prints them (`--print-config`).

    Args:
        rest: a list field that takes what stands after `--` on the command line.
        hidden: fields without a flag.
    """
    fields = {name: field for name, field in settings.model_fields.items() if name != rest and name not in hidden}

    def command(**given: Any) -> None:
        file, print_config = given.pop("config"), given.pop("print_config")
        for name, field in fields.items():
            if given[name] is not None and _kind(field) in (dict, tuple):
                given[name] = _json(name, given[name]) if _kind(field) is dict else _parts(name, given[name])
        loaded = settings.load(given, file)
        if print_config:
            typer.echo(_listing(loaded), nl=False)
        else:
            run(loaded)

    panels = sections(settings)
    parameters = [parameter for name, field in fields.items() for parameter in _flags(name, field, panels.get(name))]
    parameters.append(
        _parameter(
            "config",
            Path,
            typer.Option(
                help="YAML or TOML file with settings by name.", metavar="PATH", rich_help_panel="Configuration"
            ),
        )
    )
    parameters.append(
        _parameter(
            "print_config",
            bool,
            typer.Option(
                "--print-config",
                help="Print the settings in effect and where each comes from.",
                rich_help_panel="Configuration",
            ),
            default=False,
        )
    )
    if rest is not None:
        words = typer.Argument(metavar="-- ARGS", help=settings.model_fields[rest].description, show_default=False)
        parameters.append(_parameter(rest, list[str], words))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


class PlainCommand(TyperCommand):
    """A command whose help names what a flag takes as those of settings do (TEXT), and not by Python's types (`<str>`)."""

    def get_params(self, ctx: Any) -> list[Any]:
        found = super().get_params(ctx)
        for option in found:
            if isinstance(option, TyperOption) and option.metavar is None:
                option.metavar = _TYPER_KINDS.get(option.display_type(ctx) or "")
        return found


def plain_commands(app: typer.Typer) -> None:
    """Have the help of all commands of an app in these words."""
    for command in app.registered_commands:
        command.cls = PlainCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            plain_commands(group.typer_instance)


def sections(settings: type[Settings]) -> dict[str, str]:
    """Field -> the heading that its part of the settings has: the comment `# -- the optimizer` above it, as written there."""
    found: dict[str, str] = {}
    for part in reversed(settings.__mro__):
        if not issubclass(part, Settings) or part is Settings:
            continue
        heading = None
        for line in inspect.getsource(part).splitlines():
            if stated := re.match(r"    # -- ([^:]+)", line):
                heading = stated[1].strip().capitalize()
            elif (field := re.match(r"    (\w+): ", line)) and heading is not None and field[1] in part.model_fields:
                found[field[1]] = heading
    return found


def prose(doc: str | None) -> str:
    """A docstring as help text: its paragraphs unwrapped, since the terminal wraps them to its own width."""
    paragraphs = inspect.cleandoc(doc or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def unwrap(annotation: Any) -> Any:
    """`X | None` -> X."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return inner[0] if len(inner) == 1 else annotation
    return annotation


def default_text(field: FieldInfo) -> str:
    """A default as documentation shows it; "" for none."""
    is_list = _kind(field) is list  # other factories make something new each time: a name with a random part
    default = field.get_default(call_default_factory=is_list, validated_data={}) if is_list else field.get_default()
    if default is None or default == [] or default == {} or repr(default) == "PydanticUndefined":
        return ""
    if isinstance(default, list | tuple):
        return ", ".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _flags(name: str, field: FieldInfo, panel: str | None) -> Iterator[inspect.Parameter]:
    kind = _kind(field)
    flag = "--" + name.replace("_", "-")
    text = escape(field.description or "")
    if shown := default_text(field):
        text += f" [dim]({shown})[/]"
    if kind is bool:
        both = typer.Option(f"{flag}/--no-{flag[2:]}", help=text, metavar=NO_METAVAR, rich_help_panel=panel)
        yield _parameter(name, bool, both)
    elif kind is list:
        words = typer.Option(flag, help=text, metavar=_metavar(name, field), rich_help_panel=panel)
        yield _parameter(name, list[str], words)
    else:
        annotation = unwrap(field.annotation) if kind is Literal else str
        metavar = None if kind is Literal else _metavar(name, field)
        yield _parameter(name, annotation, typer.Option(flag, help=text, metavar=metavar, rich_help_panel=panel))
    if kind is SecretStr:
        beside = typer.Option(
            f"{flag}-file", help=f"File that holds the {name.replace('_', ' ')}.", metavar="PATH", rich_help_panel=panel
        )
        yield _parameter(f"{name}_file", str, beside)


def _parameter(name: str, annotation: Any, info: Any, default: Any = None) -> inspect.Parameter:
    typed = annotation if default is not None else annotation | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[typed, info], default=default)


def _kind(field: FieldInfo) -> Any:
    kind = unwrap(field.annotation)
    return typing.get_origin(kind) or kind


def _metavar(name: str, field: FieldInfo) -> str:
    unit = next((word for ending, word in _UNITS.items() if name.endswith(ending)), None)
    kind = unwrap(field.annotation)
    if typing.get_origin(kind) is dict:
        return "JSON"
    if typing.get_origin(kind) is tuple:
        return ",".join(_metavar(name, FieldInfo(annotation=part)) for part in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    return unit or _KINDS.get(kind, "TEXT")


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--{name.replace('_', '-')}: not valid JSON: {error}", field=name) from None


def _parts(name: str, text: str) -> Any:
    """Of a tuple, as the environment has it: words between commas, or JSON."""
    return _json(name, text) if text.lstrip().startswith("[") else [word.strip() for word in text.split(",")]


def _listing(settings: Settings) -> str:
    """YAML that `--config` takes again, except for its secrets; each line says where the value comes from."""
    lines = []
    for name, value in settings.resolved().items():
        lines.append(f"{name}: {_yaml(value)}  # {settings.origin(name)}\n")
    return "".join(lines)


def _yaml(value: Any) -> str:
    """JSON, but for the numbers that YAML would read as text: `1e-05` is `1.0e-05`."""

    def read_alike(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith('"') else yaml.safe_dump(float(found[0])).split()[0]

    return _TEXT_OR_NUMBER.sub(read_alike, json.dumps(value, ensure_ascii=False))

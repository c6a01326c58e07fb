"""Commands that are imported when somebody runs them: the list of all commands needs their names and first lines alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand, TyperGroup


class LateCommand(TyperCommand):
    """A line in the list of commands, and how the command itself is made.

    Args: panel: the heading that it is listed under. line: the first paragraph of its help.
    """

    def __init__(self, name: str, panel: str, make: Callable[[], Any], line: str) -> None:
        super().__init__(name, help=line, rich_help_panel=panel)
        self._make = make

    def load(self) -> Any:
        """The command, with its flags and the whole of its help."""
        found = self._make()
        found.name = self.name
        return found

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Where a command line or a completion comes to this command: the command itself goes on."""
        return self.load().make_context(info_name, args, parent, **extra)


def group_of(commands: tuple[LateCommand, ...]) -> type[TyperGroup]:
    """The class of an app with these commands."""

    class Commands(TyperGroup):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.commands = {command.name: command for command in commands if command.name is not None}

    return Commands

"""`steno doctor`: look at a deployment and say what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from steno_cli.commands.sessions import Key, KeyFile, Url
from steno_cli.doctor.findings import Finding, FindingLevel
from steno_cli.terminal.connection import ClientSettings
from steno_cli.terminal.output import EXIT_FAILURE, console

_SIGNS = {
    FindingLevel.OK: "[green]ok[/]",
    FindingLevel.WARNING: "[yellow]warning[/]",
    FindingLevel.BAD: "[bold red]bad[/]",
}


def doctor(
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
    redis_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Redis of the proxy; else STENO_REDIS_URL; else it is not looked at."),
    ] = None,
    folder: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Folder on this machine whose disk is looked at; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: {healthy, findings}.")] = False,
) -> None:
    """Check a deployment: the proxy and its keys, workers, clocks, Redis's settings, disks. Each finding says what to do.

    Exits with 1 if anything is bad; warnings alone are 0. It reads, and changes nothing.
    """
    from steno_cli.doctor.disk_checks import check_folder
    from steno_cli.doctor.proxy_checks import check_proxy, waited_replicas

    settings = ClientSettings.load({"proxy": url, "key": key, "key_file": key_file}, None)
    found = check_proxy(settings.proxy, settings.key.get_secret_value() if settings.key else None)
    redis_url = redis_url or os.environ.get("STENO_REDIS_URL")
    if redis_url:
        from steno_cli.doctor.redis_checks import check_redis

        found += check_redis(redis_url, waited_replicas(settings.proxy))
    for path in folder or []:
        found += check_folder(path)
    healthy = all(finding.level is not FindingLevel.BAD for finding in found)
    if as_json:
        typer.echo(json.dumps({"healthy": healthy, "findings": [finding._asdict() for finding in found]}))
    else:
        _show(found)
    if not healthy:
        raise typer.Exit(EXIT_FAILURE)


def _show(found: list[Finding]) -> None:
    out = console()
    for finding in found:
        out.print(f"{_SIGNS[finding.level]:<8} [bold]{finding.check}[/]  {escape(finding.message)}", soft_wrap=True)
        if finding.advice:
            out.print(f"         [dim]->[/] {escape(finding.advice)}", soft_wrap=True)
    counts = {level: sum(finding.level is level for finding in found) for level in FindingLevel}
    out.print(f"{counts[FindingLevel.OK]} ok, {counts[FindingLevel.WARNING]} warnings, {counts[FindingLevel.BAD]} bad")

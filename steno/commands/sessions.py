"""`steno sessions list|show|export|tail`: read recorded sessions over the REST API."""

from __future__ import annotations

import json
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from proxy.contracts.records import Session, readable
from steno.commands.connection import connect
from steno.commands.export import Format, Records, export_sessions
from steno.commands.output import console
from steno.commands.tree import conversation_tree, headline

app = typer.Typer(no_args_is_help=True, help="Read recorded sessions.", rich_markup_mode="rich")


class Status(StrEnum):
    OPEN = "open"
    COMPLETED = "completed"
    ABORTED = "aborted"


_TAIL_RETRIES = 5
"""Attempts to reconnect without an event, about 15 s in all: a proxy that restarts is back by then."""

_PANEL = "Connection"
Url = Annotated[
    str | None,
    typer.Option(
        help="Base URL of the proxy; else STENO_CLIENT_URL, else http://127.0.0.1:8000.", rich_help_panel=_PANEL
    ),
]
Key = Annotated[
    str | None,
    typer.Option(help="Admin or harness key; else STENO_CLIENT_KEY, else STENO_ADMIN_KEY.", rich_help_panel=_PANEL),
]
KeyFile = Annotated[str | None, typer.Option(help="File that holds the key.", rich_help_panel=_PANEL)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line instead.")]
StatusFilter = Annotated[Status | None, typer.Option(help="Only sessions with this status.")]
GroupFilter = Annotated[str | None, typer.Option("--group", help="Only trials of this group.", metavar="GROUP_ID")]


@app.command("list")
def list_sessions(
    status: StatusFilter = None,
    group: GroupFilter = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, oldest first.")] = 100,
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """List sessions, oldest first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("trial", "status", "group", "turns", "tokens", "reward", "updated", "marks"):
        table.add_column(name, justify="right" if name in ("turns", "tokens", "reward") else "left", overflow="fold")
    shown = 0
    more = False
    with connect(url, key, key_file) as steno:
        for session in steno.sessions(status=status and status.value, group_id=group, limit=min(limit, 100)):
            if shown == limit:
                more = True
                break
            shown += 1
            if as_json:
                typer.echo(json.dumps(readable(session), ensure_ascii=False))
            else:
                table.add_row(*_cells(session, time.time()))
    if as_json:
        return
    if shown:
        console().print(table)
    else:
        console(stderr=True).print("no sessions")
    if more:
        console(stderr=True).print(f"the first {limit} are shown; --limit shows more", style="dim")


@app.command()
def show(
    trial_id: str,
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Draw a session's conversation tree: tokens, how turns ended, where and why it branched."""
    with connect(url, key, key_file) as steno:
        session = steno.session(trial_id)
        turns = list(steno.turns(trial_id))
    if as_json:
        for record in (session, *turns):
            typer.echo(json.dumps(readable(record), ensure_ascii=False))
        return
    console().print(headline(session))
    console().print(conversation_tree(session, turns))


@app.command()
def export(
    trial_ids: Annotated[list[str] | None, typer.Argument(help="Trials; none: all that match the filters.")] = None,
    to: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: standard output.")] = None,
    file_format: Annotated[
        Format | None, typer.Option("--format", help="By default as the file's name ends, else jsonl.")
    ] = None,
    records: Annotated[Records, typer.Option(help="What one row is.")] = Records.TURNS,
    status: StatusFilter = None,
    group: GroupFilter = None,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Write sessions, turns or samples as JSON lines or Parquet (needs the extra `export`)."""
    with connect(url, key, key_file) as steno:
        ids = trial_ids or [s.trial_id for s in steno.sessions(status=status and status.value, group_id=group)]
        rows = export_sessions(steno, ids, records, to, file_format)
    if to is not None:
        console(stderr=True).print(f"{rows} {records.value} of {len(ids)} sessions in {to}")


@app.command()
def tail(
    trial_id: str,
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Follow a session's events as they happen, until it ends."""
    with connect(url, key, key_file, retries=_TAIL_RETRIES) as steno:
        for _, event in steno.events(trial_id):
            if as_json:
                typer.echo(json.dumps(event, ensure_ascii=False))
            else:
                console().print(_event_line(event), soft_wrap=True)
            sys.stdout.flush()


def _event_line(event: dict[str, Any]) -> Text:
    at = event.get("at")
    line = Text(time.strftime("%H:%M:%S ", time.localtime(at)) if isinstance(at, int | float) else "", style="dim")
    line.append(f"{event.get('type', '?'):<10}", style="bold not dim")
    for name, value in event.items():
        if name not in ("at", "type") and value is not None and not isinstance(value, dict | list):
            line.append(f" {name}=").append(str(value), style="not dim")
    return line


def _cells(session: Session, now: float) -> tuple[str | Text, ...]:
    counts = session.counts
    return (
        Text(session.trial_id, style="bold"),
        Text(session.status, style={"open": "green", "aborted": "red"}.get(session.status, "")),
        Text(session.group_id or "-"),
        str(counts.turns),
        str(counts.completion_tokens),
        "-" if session.reward is None else f"{session.reward:g}",
        _ago(now - session.updated_at),
        Text(" ".join(session.marks)),
    )


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"

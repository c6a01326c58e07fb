"""`steno sessions list|show|export|tail`: read recorded sessions over the REST API."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from steno.contracts.errors import ConfigError
from steno.contracts.notes import short
from steno.contracts.records import Session, readable
from steno_cli.exports.export import ExportFormat, export_sessions, needs_token_ids
from steno_cli.exports.rows import Records
from steno_cli.exports.selection import Purpose, Selection, tell_left_out
from steno_cli.terminal.connection import connect
from steno_cli.terminal.output import console
from steno_cli.terminal.tree import conversation_tree, headline

app = typer.Typer(no_args_is_help=True, help="Read recorded sessions.", rich_markup_mode="rich")


class Status(StrEnum):
    OPEN = "open"
    COMPLETED = "completed"
    ABORTED = "aborted"


_RETRIES = 5
"""Retries of a call of a long command (of `tail`: without an event), about 15 s in all: a proxy that restarts is back then."""

_PANEL = "Connection"
Url = Annotated[
    str | None,
    typer.Option(
        "--proxy", help="URL of the proxy; else STENO_PROXY, else http://127.0.0.1:8000.", rich_help_panel=_PANEL
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        help="Admin, run or harness key; else STENO_CLIENT_KEY, else STENO_ADMIN_KEY.", rich_help_panel=_PANEL
    ),
]
KeyFile = Annotated[str | None, typer.Option(help="File that holds the key.", rich_help_panel=_PANEL)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line instead.")]
StatusFilter = Annotated[Status | None, typer.Option(help="Only sessions with this status.")]
GroupFilter = Annotated[str | None, typer.Option("--group", help="Only trials of this group.", metavar="GROUP_ID")]
RunFilter = Annotated[str | None, typer.Option("--run", help="Only trials of this run.", metavar="RUN_ID")]


@app.command("list")
def list_sessions(
    status: StatusFilter = None,
    group: GroupFilter = None,
    run: RunFilter = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Sessions on a page.")] = 100,
    cursor: Annotated[str | None, typer.Option(help="Where to go on, as the last page said.", metavar="CURSOR")] = None,
    oldest_first: Annotated[bool, typer.Option("--oldest-first", help="Oldest sessions first.")] = False,
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """List sessions, newest first, a page at a time: what is printed last says how to see the next one."""
    with connect(url, key, key_file) as steno:
        page = steno.session_page(
            status=status and status.value, group_id=group, run_id=run, newest_first=not oldest_first, cursor=cursor,
            limit=limit,
        )  # fmt: skip
    if as_json:
        for session in page.items:
            typer.echo(json.dumps(readable(session), ensure_ascii=False))
    elif page.items:
        print_table(table_of(page.items, time.time()))
    if not page.items and not page.unreadable:
        console(stderr=True).print("no sessions")
    for trial_id in page.unreadable:
        console(stderr=True).print(
            f"{trial_id}: can't be read in the archive now; `steno sessions show` says why",
            markup=False,
            soft_wrap=True,
        )
    if page.next_cursor is not None:
        console(stderr=True).print(f"there are more: --cursor {page.next_cursor}", style="dim", soft_wrap=True)


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
    trial_ids: Annotated[
        list[str] | None, typer.Argument(help="Trial ids; without any: all sessions that match the filters.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--output", "-o", help="File or folder to write; default: standard output.")
    ] = None,
    file_format: Annotated[
        ExportFormat | None, typer.Option("--format", help="By default as the file's name ends, else jsonl.")
    ] = None,
    records: Annotated[
        Records | None, typer.Option(help="With jsonl and parquet: what one row is. (turns)", show_default=False)
    ] = None,
    whole_prompts: Annotated[
        bool, typer.Option("--whole-prompts", help="With atif: every step has the ids of its whole prompt.")
    ] = False,
    status: StatusFilter = None,
    group: GroupFilter = None,
    run: RunFilter = None,
    end_reason: Annotated[
        str | None, typer.Option(help="Only sessions that ended for this reason.", metavar="REASON")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only sessions with at least this reward.")] = None,
    best_of_group: Annotated[
        bool, typer.Option("--best-of-group", help="Of each group only the session with the highest reward.")
    ] = False,
    purpose: Annotated[
        Purpose | None,
        typer.Option(
            help="Only trials of groups of this purpose; one without a group is train. (train; with --group: all)",
            show_default=False,
        ),
    ] = None,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Write sessions to a file or a folder, as records or in the formats of other tools.

    jsonl, parquet: records. atif: Harbor's trajectories, one per branch. chat: OpenAI's fine-tuning format. sft: Parquet with
    input_ids and labels. datasets: the same as a folder for load_from_disk of Hugging Face's datasets. Parquet and datasets need
    the extra `export`. Nothing is written where a session that matches can't be read.
    """
    chosen = Selection(status and status.value, group, run, end_reason, min_reward, best_of_group, purpose)
    if trial_ids and chosen != Selection():
        raise ConfigError("TRIAL_IDS and filters: got both, give the trials or the filters that select them")
    left_out = None if trial_ids else Counter[str]()
    with connect(url, key, key_file, retries=_RETRIES) as steno:
        ids = trial_ids or chosen.trial_ids(steno, with_token_ids=needs_token_ids(file_format, records))
        rows = export_sessions(steno, ids, to, file_format, records, whole_prompts=whole_prompts, left_out=left_out)
    for what, count in (left_out or {}).items():
        tell_left_out(count, what)
    if to is not None:
        sessions = len(ids) - sum((left_out or {}).values())
        console(stderr=True).print(f"{rows} rows of {sessions} sessions in {to}", markup=False, soft_wrap=True)


@app.command()
def tail(
    trial_id: str,
    as_json: Json = False,
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Follow a session's events as they happen, until it ends."""
    with connect(url, key, key_file, retries=_RETRIES) as steno:
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
            line.append(f" {name}=").append(short(str(value)), style="not dim")
    return line


def table_of(sessions: Sequence[Session], now: float) -> Table:
    """A row each. The group has a column only where trial ids do not begin with it, and marks where there are any."""
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    marked = any(session.marks for session in sessions)
    grouped = not all(session.trial_id.startswith(f"{session.group_id}.") for session in sessions if session.group_id)
    table.add_column("trial")
    table.add_column("status")
    if grouped:
        table.add_column("group")
    for name in ("turns", "tokens", "reward"):
        table.add_column(name, justify="right")
    table.add_column("updated")
    if marked:
        table.add_column("marks")
    for session in sessions:
        counts = session.counts
        table.add_row(
            Text(session.trial_id, style="bold"),
            Text(session.status, style={"open": "green", "aborted": "red"}.get(session.status, "")),
            *([Text(session.group_id or "-")] if grouped else []),
            str(counts.turns),
            str(counts.completion_tokens),
            _reward(session),
            ago(now - session.updated_at),
            *([Text(" ".join(session.marks))] if marked else []),
        )
    return table


def _reward(session: Session) -> str:
    if session.awaits_reward:
        return "awaited"
    return "-" if session.reward is None else f"{session.reward:g}"


_NO_BOUND = 100_000
"""Columns."""


def print_table(table: Table) -> None:
    """Each id and each number whole, to be copied: a row that is wider than the terminal, or than the 80 columns of a pipe, is a
    longer line."""
    to = console()
    whole = Measurement.get(to, to.options.update(max_width=_NO_BOUND), table).maximum
    to.width = max(to.width, whole)
    to.print(table)


def ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"

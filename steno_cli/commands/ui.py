"""`steno ui`: the page that shows what is on record, of a proxy or of a file."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from steno_cli.commands.sessions import Url
from steno_cli.terminal.connection import ClientSettings
from steno_cli.terminal.output import console


def ui(
    file: Annotated[
        Path | None,
        typer.Argument(help="Turns that `steno sessions export` wrote, JSON lines or Parquet: shown without a proxy."),
    ] = None,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = True,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With a file: TCP port on 127.0.0.1; 0: a free one.")] = 0,
    url: Url = None,
) -> None:
    """Open the page that shows sessions: conversations, tokens, times.

    Of a proxy, it is at /ui and asks for the admin key or a viewer key. Of a file, it is served until Ctrl-C, to this machine
    alone.
    """
    if file is None:
        settings = ClientSettings.load({"proxy": url}, None)
        address = f"{settings.proxy.rstrip('/')}/ui/"
        typer.echo(address)
        if browser:
            webbrowser.open(address)
        return
    from steno_cli.recorded.server import RecordedServer
    from steno_cli.recorded.texts_file import TextsFile
    from steno_cli.recorded.turn_file import TurnFile

    server = RecordedServer(TurnFile(file), TextsFile(file), file.name, port)
    typer.echo(server.url)
    console(stderr=True).print("Serving until Ctrl-C.", style="dim")
    if browser:  # one of the terminal's waits for the page, and `open` waits until that browser has ended
        threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()

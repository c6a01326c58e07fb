"""How to install an extra of the distribution here, said as a command for the installation that runs.

The name on the package index belongs to another project, so no hint may say `pip install steno[...]`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "steno"


def how_to_install(extra: str) -> str:
    """A command, e.g. `pip install -e '/src/steno[trainer]'`; a sentence where it is not known what was installed."""
    try:
        said = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        source = json.loads(said) if said else {}
    except (importlib.metadata.PackageNotFoundError, ValueError):
        source = {}
    url = source.get("url", "")
    install = f"{_pip()} install"
    if "dir_info" in source:
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"{install} {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    if url:
        return f"{install} '{DISTRIBUTION}[{extra}] @ {url}'"
    return f"install the same wheel or checkout again with its extra: {install} 'PATH[{extra}]'"


def _pip() -> str:
    """`pip`, where a shell finds that of this environment; else by its path: a virtual environment need not be active."""
    here, found = Path(sys.executable), shutil.which("pip")
    return "pip" if found is not None and Path(found).parent == here.parent else f"{here} -m pip"


def missing(modules: Iterable[str]) -> str | None:
    """The first of these top-level modules that is not installed; None: all are. Imports nothing."""
    return next((name for name in modules if importlib.util.find_spec(name) is None), None)

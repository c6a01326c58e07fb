"""How to install an extra of the distribution here, said as a command for the installation that runs.

The name on the package index belongs to another project, so no hint may say `pip install steno[...]`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable
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
    if "dir_info" in source:
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    if url:
        return f"pip install '{DISTRIBUTION}[{extra}] @ {url}'"
    return f"install the same wheel or checkout again with its extra: pip install 'PATH[{extra}]'"


def missing(modules: Iterable[str]) -> str | None:
    """The first of these top-level modules that is not installed; None: all are. Imports nothing."""
    return next((name for name in modules if importlib.util.find_spec(name) is None), None)

"""Reloads keys from their files while the proxy runs: on SIGHUP at once, otherwise soon after a file has changed.

That is how secrets are rotated where they are mounted (Kubernetes, systemd, Docker): whoever owns the file changes it, and no
process starts again. A change is taken up once two looks in a row have seen it, so that a file in the middle of being written
is nobody's key. What can't be read changes nothing: the keys stay what they were, and the log says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from steno.contracts.errors import ConfigError
from steno_proxy.auth.keys import Keyring, listed
from steno_proxy.config.settings import ProxySettings

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks. A few bytes are read; content, since the time of a mounted secret's link says nothing."""
NAMES = ("admin_key", "worker_key", "trial_secret", "metrics_key", "viewer_key")


class KeyReloader:
    """Args: settings: with the files that its secrets came from. on_change: called after the keyring has changed."""

    def __init__(self, keys: Keyring, settings: ProxySettings, on_change: Callable[[], None]) -> None:
        self._keys = keys
        self._on_change = on_change
        self._files = {name: path for name, path in settings.secret_files.items() if name in NAMES}
        given = {name: getattr(settings, name) for name in NAMES}
        self._now = {name: value.get_secret_value() if value else None for name, value in given.items()}
        self._seen: dict[str, str | None] | None = None
        self._trouble = ""

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._files)

    async def run(self) -> None:
        """Look, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # recorded: keys that are taken out of their files later must not stay good
                log.exception("can't read the keys again, trying again")

    async def look(self, *, at_once: bool = False) -> None:
        """Args: at_once: somebody says that the files are as they should be: one look is enough."""
        try:
            found: dict[str, str | None] = {**self._now, **await asyncio.to_thread(_read, self._files)}
        except ConfigError as error:
            if error.message != self._trouble:
                log.error("can't read the keys again, the old ones stay valid: %s", error.message)
            self._trouble = error.message
            self._seen = None
            return
        self._trouble = ""
        if found == self._now:
            self._seen = None
        elif at_once or found == self._seen:
            self._take(found)
        else:
            self._seen = found

    def _take(self, found: dict[str, str | None]) -> None:
        changed = [name for name in NAMES if found[name] != self._now[name]]
        self._now, self._seen = found, None
        self._keys.replace(*(found[name] for name in NAMES))
        log.info("new keys: %s", ", ".join(f"{name} ({len(listed(found[name]))} good)" for name in changed))
        self._on_change()


def _read(files: Mapping[str, Path]) -> dict[str, str]:
    """Raises: ConfigError: names the setting and the file, never what is in it."""
    found = {}
    for name, path in files.items():
        try:
            found[name] = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not text"
            raise ConfigError(f"{name}: {path}: {why}", field=name) from None
        if not found[name]:
            raise ConfigError(f"{name}: {path} is empty", field=name)
    return found

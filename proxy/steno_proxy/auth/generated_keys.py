"""Generates keys that are not set: at the first start, kept in a folder, shown once.

What makes `docker run steno` work without a word about keys and still refuse strangers (I8). A key that is given (flag,
environment, file) always counts; the folder only fills the gaps. The trial secret kept here outlives the admin key's rotation, so
that the keys of running trials stay good. Owns the folder's files and nothing else; knows no HTTP.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from steno.contracts.errors import ConfigError
from steno_proxy.config.settings import ProxySettings

PREFIXES = {"admin_key": "ak-steno-", "worker_key": "wk-steno-", "trial_secret": ""}
"""The keys kept, each in a file of its own name, and how a new one begins."""


def fill(settings: ProxySettings) -> tuple[ProxySettings, dict[str, str]]:
    """The settings with every key set, and those keys that were made just now.

    Two proxies that start at the same time on one folder end up with the same keys. Without a `keys_dir`, nothing is done.

    Raises: ConfigError: the folder can't be read or written, or holds a file that is empty or not text; names `keys_dir`.
    """
    if settings.keys_dir is None:
        return settings, {}
    filled: dict[str, tuple[str, Path]] = {}
    made: dict[str, str] = {}
    try:
        settings.keys_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, prefix in PREFIXES.items():
            if getattr(settings, name) is None:
                path = settings.keys_dir / name
                value, is_new = _kept(path, prefix)
                filled[name] = (value, path)
                if is_new:
                    made[name] = value
    except OSError as error:
        raise ConfigError(f"keys_dir: {error.strerror}: {error.filename}", field="keys_dir") from error
    return settings.with_secrets(filled), made


def _kept(path: Path, prefix: str) -> tuple[str, bool]:
    """The key in this file, made if there is none; whether it was made by us."""
    if not path.exists():
        value = prefix + secrets.token_urlsafe(24)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(value + "\n")
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(fresh, path)  # unlike a rename, it fails if another proxy's key came first
        except FileExistsError:
            pass
        else:
            return value, True
        finally:
            fresh.unlink()
    try:
        value = path.read_text().strip()
    except UnicodeDecodeError:
        raise ConfigError(f"keys_dir: {path}: not text", field="keys_dir") from None
    if not value:
        raise ConfigError(f"keys_dir: {path} is empty; remove it, and a new key is made", field="keys_dir")
    return value, False


def announcement(made: dict[str, str], keys_dir: Path) -> str:
    """What is printed once, when keys were made: those a person needs. The trial secret is nobody's business."""
    lines = [f"New keys were made, and are kept in {keys_dir}. They are shown this once:"]
    if "admin_key" in made:
        lines.append(f"  admin key   {made['admin_key']}   (control plane: sessions, groups, rewards)")
    if "worker_key" in made:
        lines.append(f"  worker key  {made['worker_key']}   (STENO_WORKER_KEY, or steno worker --key-file)")
    return "\n".join(lines)

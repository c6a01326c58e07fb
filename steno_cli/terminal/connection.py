"""Where commands that ask a proxy (`steno sessions`, `runs`, `env`, `doctor`, …) find it, and with which key."""

from __future__ import annotations

from pydantic import Field

from steno.client.client import Client
from steno.client.transport import LONGEST_S
from steno.config.keys import ShownKey
from steno.config.settings import PROXY_HELP, ProxyUrl, Settings, SettingsConfigDict, admin_key_here, proxy_here


class ClientSettings(Settings):
    """How `steno sessions` and the other commands that ask a proxy reach it."""

    model_config = SettingsConfigDict(env_prefix="STENO_CLIENT_")

    proxy: ProxyUrl = Field(default_factory=proxy_here, description=PROXY_HELP)
    key: ShownKey = Field(
        default_factory=admin_key_here,
        description="admin key, a run's key or a group's harness key; unset: STENO_ADMIN_KEY",
    )
    timeout_s: float = Field(
        30.0, gt=0, lt=LONGEST_S, description="seconds to connect, and to wait for the next bytes of an answer"
    )


def client_settings(proxy: str | None, key: str | None, key_file: str | None) -> ClientSettings:
    """By flags, environment `STENO_CLIENT_*` and defaults. Raises: ConfigError."""
    return ClientSettings.load({"proxy": proxy, "key": key, "key_file": key_file}, None)


def connect(proxy: str | None, key: str | None, key_file: str | None, *, retries: int = 0) -> Client:
    """A client by flags, environment `STENO_CLIENT_*` and defaults. Someone at a terminal is told at once what fails.

    Raises: ConfigError.
    """
    settings = client_settings(proxy, key, key_file)
    return Client(settings.proxy, settings.key, timeout_s=settings.timeout_s, retries=retries)

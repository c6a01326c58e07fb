"""The worker's settings: one frozen tree, checked at load, each field with its unit and the reason for its default.

How the values are found (command line, environment `STENO_WORKER_*`, file) is `steno/config/settings.py`.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator

from steno.config.keys import ShownKey
from steno.config.settings import PROXY_HELP, Settings, SettingsConfigDict, proxies_here, proxy_url
from steno_worker.interfaces import MAX_STREAMS


class WorkerSettings(Settings):
    """What `steno worker` runs with."""

    model_config = SettingsConfigDict(env_prefix="STENO_WORKER_")

    # -- whom it serves
    proxy: list[str] = Field(
        default_factory=proxies_here, min_length=1, max_length=64,
        description=f"proxy to connect to, {PROXY_HELP}; repeat for several proxies, all served alike",
    )  # fmt: skip
    key: ShownKey = Field(None, description="the workers' key of the proxies")
    worker_id: str = Field(
        default_factory=lambda: f"{socket.gethostname()[:100]}-{secrets.token_hex(3)}", pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="unique name of this worker; with a fixed name it gets the same trials after a restart; default: host name "
        "and a random part",
    )  # fmt: skip

    # -- what it runs
    engine: Literal["vllm", "transformers", "scripted", "litellm"] = Field(
        "transformers", description="what samples the tokens"
    )
    model: str | None = Field(None, description="model directory (or a name, where the engine fetches it)")
    api_base: str | None = Field(None, description="URL of the litellm engine's upstream; default: its provider's own")
    api_key: SecretStr | None = Field(
        None, description="key of the litellm engine's upstream; unset: from its provider's environment variable"
    )
    script: str | None = Field(None, description="FILE.py:function that writes the replies of the scripted engine")
    policy: str = Field(
        "default", min_length=1, max_length=128, description="name of the policy whose weights this worker serves"
    )
    context_tokens: int | None = Field(
        None, ge=1, description="most tokens of prompt and completion together; default: the model's own limit"
    )
    max_streams: int | None = Field(
        None,
        ge=1,
        le=65536,
        description=f"most generations at once, more wait at the proxy; default: {MAX_STREAMS}; with vLLM its max_num_seqs",
    )
    engine_args: list[str] = Field(
        default_factory=list, description="arguments of the engine, as words: what follows -- on the command line"
    )

    staging_dir: Path | None = Field(
        None,
        description="folder, of this worker alone, for weights received through the proxy or made of patches (also with "
        "transport filesystem); needs room for two full copies: the one served and the one arriving (with room for one, the "
        "worker can't roll back after a refused update); when it stops, the worker removes the served copy, and keeps an "
        "incomplete one to resume after a restart; default: a temporary folder",
    )

    weights_url: str | None = Field(
        None,
        description="object store that the trainer writes weights to, s3://BUCKET/PREFIX or gs://…: the trainer's weights_url; "
        "only objects below it are read; credentials and endpoint from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL)",
    )

    # -- how it behaves
    grace_s: float | None = Field(
        None,
        gt=0,
        description="seconds that generations go on while the proxy is disconnected; default: the proxy's resume_grace_s",
    )
    drain_s: float = Field(30.0, ge=0, description="seconds after SIGTERM for generations to finish")
    max_backoff_s: float = Field(10.0, gt=0, description="most seconds between two attempts to connect")
    max_packet_bytes: int = Field(64 * 2**20, ge=65536, description="largest packet accepted from a proxy")
    metrics_host: str = Field("127.0.0.1", description="address that serves /metrics")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port for /metrics; 0 takes a free one and logs it; unset: none"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="INFO is lifecycle, DEBUG is frames"
    )

    @field_validator("proxy")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            proxy_url(url, ("http", "https", "ws", "wss"))
        if len({dial_url(url) for url in urls}) < len(urls):
            raise ValueError("the same proxy is given twice")
        return urls

    @field_validator("engine_args", mode="before")
    @classmethod
    def _from_a_mapping(cls, given: Any) -> Any:
        """A file may give {max_num_seqs: 64, enforce_eager: true} instead of words."""
        if not isinstance(given, Mapping):
            return given
        return [word for name, value in given.items() for word in _words(str(name).replace("_", "-"), value)]


def _words(flag: str, value: Any) -> list[str]:
    """One engine argument on a command line, where objects are JSON and a list is one word after the other."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *map(_word, value if isinstance(value, list) else [value])]


def _word(value: Any) -> str:
    is_json = value is None or isinstance(value, bool | list | Mapping)
    return json.dumps(value, default=str) if is_json else str(value)


def dial_url(proxy: str) -> str:
    """http(s)://host:port[/prefix] -> the URL of the proxy's socket for workers, which is ws(s)://. A ws(s):// URL is accepted
    too: workers were given such URLs before all programs took http(s)://."""
    return re.sub("^http", "ws", proxy.rstrip("/")) + "/workers/connect"

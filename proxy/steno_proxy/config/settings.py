"""The proxy's settings: one frozen tree, checked at load, each field with its unit and the reason for its default.

Owns what an operator can choose and which combinations are refused. How the values are found (command line, environment
`STENO_*`, file) is `steno/config/settings.py`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from steno.config.settings import Settings, SettingsConfigDict, is_loopback
from steno.contracts.errors import ConfigError

_HEADER = re.compile(r"[A-Za-z0-9_-]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
MOST_TOMBSTONE_S = 3.2e9
"""A century: Redis takes no time to live that ends much later."""


class ProxySettings(Settings):
    """What `steno proxy` runs with."""

    model_config = SettingsConfigDict(env_prefix="STENO_", allow_inf_nan=False)

    # -- where it listens and what it is called
    host: str = Field("127.0.0.1", description="address to listen on; anything but loopback needs an admin key")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one and logs it")
    control_host: str | None = Field(None, description="address of control_port; unset: the same as host")
    control_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="separate port for the control plane and the workers; then port serves agents only; unset: one port for all",
    )
    public_url: str | None = Field(
        None,
        description="URL of the proxy for agents (scheme, host, optional port and path prefix); default: the host of a request",
    )

    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="host names that a proxy without keys accepts, at any port, beside localhost and the host of public_url",
    )

    # -- who may do what (I8)
    admin_key: SecretStr | None = Field(
        None, description="admin key: opens the control plane; several, one per line; unset: no keys, loopback only"
    )
    worker_key: SecretStr | None = Field(
        None, description="worker key: opens the workers' socket; several, one per line; unset: the admin key opens it"
    )
    metrics_key: SecretStr | None = Field(
        None,
        description="metrics key: opens only GET /metrics, for Prometheus; several, one per line; the admin key opens it too",
    )
    viewer_key: SecretStr | None = Field(
        None,
        description="viewer key: reads what is on record, as the page /ui does, and writes nothing; several, one per line; the "
        "admin key does too",
    )
    trial_secret: SecretStr | None = Field(
        None,
        description="new agents' and harness keys are derived from the first line; keys derived from other lines stay valid; "
        "unset: a secret made of the first admin key, kept in the store",
    )

    keys_dir: Path | None = Field(
        None,
        description="folder for generated keys: an admin key, a worker key and a trial secret that are not set are made at the "
        "first start and kept here; the two keys are shown once",
    )

    # -- where it remembers
    redis_url: str | None = Field(
        None,
        description="redis://, rediss://, redis+cluster://HOST,HOST or redis+sentinel://HOST,HOST/SERVICE; unset: in memory",
    )
    redis_wait_replicas: int = Field(
        0,
        ge=0,
        description="replicas of Redis that must confirm each write before it is answered; 0: a failover may lose writes",
    )
    redis_wait_s: float = Field(1.0, gt=0, le=60, description="seconds that a write waits for these replicas; then 503")
    archive: str | None = Field(
        None,
        description="where ended sessions go from Redis: a folder or a URL that fsspec knows (s3://BUCKET/PATH), one for all "
        "replicas; off: nowhere; unset: a folder for this Redis, in archive/ of keys_dir or else of ~/.local/share/steno",
    )
    retention_s: float | None = Field(
        None,
        gt=0,
        description="seconds that an ended session stays in the store: then it goes to the archive (unset: after a day), or is "
        "deleted where there is none (unset: never)",
    )
    tombstone_s: float = Field(
        604800.0, gt=0, le=MOST_TOMBSTONE_S, description="seconds that a deleted trial id answers 410"
    )
    sweep_s: float = Field(
        60.0, gt=0, description="seconds between two searches for sessions that are past retention_s or their deadline"
    )
    tree_cache_bytes: int = Field(
        256 * 2**20,
        ge=0,
        description="bytes of conversation trees in this process's memory, roughly; the tokens of their newest turns take up to "
        "half as much more (at least 16 MiB); what was dropped is read from the store again",
    )

    # -- generation
    max_body_bytes: int = Field(32 * 2**20, ge=1024, description="largest request body; above it: 413, unread")
    max_request_nodes: int = Field(
        40_000,
        ge=100,
        description="objects and arrays that a request body may hold (messages, parts, calls, tools, parts of schemas); it may "
        "hold ten times as many values in all; more: 413",
    )
    max_inflight_bytes: int = Field(
        512 * 2**20,
        ge=1024,
        description="bytes of all request bodies in flight, from the first byte to the end of the answer; more: 429, and the "
        "body is not kept; bodies up to 256 KiB are not counted",
    )
    trial_inflight_bytes: int = Field(
        128 * 2**20,
        ge=1024,
        description="as max_inflight_bytes, for the bodies of one trial; a single body above either limit: 413",
    )
    body_timeout_s: float = Field(60.0, gt=0, description="seconds a client may take to send its body: then 408")
    keepalive_s: float = Field(10.0, gt=0, description="seconds of silence on a stream before a keepalive comment")
    default_max_tokens: int | None = Field(
        None, ge=1, description="completion tokens of a request that gives no limit; unset: what the context leaves"
    )
    chat_reasoning: Literal["reasoning_content", "reasoning", "both"] = Field(
        "both",
        description="which fields of a reply in chat completions hold its reasoning, streamed and whole; requests may use either",
    )
    trial_requests_per_s: float | None = Field(
        None,
        gt=0,
        description="sustained requests per second of one trial, at each replica; more: 429; unset: no limit",
    )
    trial_burst: int = Field(
        20, ge=1, description="requests of one trial that may exceed trial_requests_per_s in a burst"
    )
    trial_streams: int | None = Field(
        None,
        ge=1,
        description="requests of one trial in flight at once, whatever their n, at each replica; more: 429; unset: no limit",
    )
    shutdown_s: float = Field(30.0, ge=0, description="seconds after SIGTERM for open streams to finish")

    # -- another provider as the only worker, in this process
    upstream: str | None = Field(
        None, description="PROVIDER/MODEL as LiteLLM names it, served by a worker in this process"
    )
    api_base: str | None = Field(None, description="URL of the upstream; default: its provider's own")
    api_key: SecretStr | None = Field(
        None, description="key of the upstream; unset: from its provider's environment variable"
    )
    upstream_images: Literal["auto", "on", "off"] = Field(
        "auto",
        description="send images to an upstream that gives no token ids; auto: if LiteLLM says that its model takes them",
    )
    upstream_tokens: Literal["auto", "require", "off"] = Field(
        "auto",
        description="record token ids from a vLLM server (hosted_vllm/NAME); auto: text only if the server can't give them",
    )

    # -- the relay to the workers
    heartbeat_s: float = Field(5.0, gt=0, description="seconds between heartbeats, both ways")
    silence_s: float = Field(
        20.0,
        gt=0,
        description="seconds without a packet until a worker's socket is closed; unless it is back, the worker is lost "
        "resume_grace_s later",
    )
    resume_grace_s: float = Field(
        30.0, ge=0, description="seconds that a worker may be disconnected before its streams are lost"
    )
    max_packet_bytes: int = Field(64 * 2**20, ge=65536, description="largest packet accepted from a worker")
    window_tokens: int = Field(
        4096, ge=1, description="tokens that a worker may send on a stream before it needs new credit"
    )
    max_waiting: int = Field(
        1024,
        ge=0,
        description="requests that may wait for a worker (the trials take turns); more: 429",
    )
    queue_s: float = Field(
        60.0,
        ge=0,
        description="seconds that a request may wait for a worker; then 429, or 503 if no worker is connected",
    )

    # -- what it says
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    log_format: Literal["text", "json"] = Field("text", description="one line of text, or one JSON object, per record")
    otel_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector (OTLP over HTTP; spans go to its /v1/traces); unset: nothing is traced",
    )
    otel_headers: SecretStr | None = Field(
        None, description="headers for the collector: NAME=VALUE, several separated by commas"
    )
    otel_content: bool = Field(False, description="spans also hold the text of messages and replies")

    @field_validator("public_url")
    @classmethod
    def _public_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be http(s)://host[:port][/prefix]")
        if parts.query or parts.fragment or parts.username:
            raise ValueError("must have no user, query or fragment")
        return value.rstrip("/")

    @field_validator("allowed_hosts")
    @classmethod
    def _allowed_hosts(cls, names: list[str]) -> list[str]:
        for name in names:
            try:
                known = ":" in name and bool(ipaddress.IPv6Address(name.strip("[]")))
            except ValueError:
                known = False
            if not known and not _HOST_NAME.fullmatch(name):
                raise ValueError(
                    f"got {name!r}, must be a host name or address without scheme, port and path, as host.docker.internal"
                )
        return names

    @field_validator("otel_endpoint")
    @classmethod
    def _otel_endpoint(cls, value: str | None) -> str | None:
        parts = urlsplit(value or "http://unset")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"got {value!r}, must be http(s)://host[:port][/path]")
        if parts.username or parts.query:
            raise ValueError("must have no user and no query: put keys into otel_headers")
        return value

    @property
    def trace_headers(self) -> dict[str, str]:
        """Of `otel_headers`. Raises: ConfigError."""
        found: dict[str, str] = {}
        said = self.otel_headers.get_secret_value() if self.otel_headers is not None else ""
        for number, pair in enumerate(part for part in said.split(",") if part.strip()):
            name, separator, value = pair.strip().partition("=")
            if not separator or not _HEADER.fullmatch(name.strip()) or not value.isprintable() or not value.isascii():
                raise ConfigError(
                    f"otel_headers: header {number + 1} must be NAME=VALUE: in NAME letters, digits, - and _, in VALUE ASCII",
                    field="otel_headers",
                )
            found[name.strip()] = value.strip()
        return found

    @field_validator("archive")
    @classmethod
    def _archive(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("must not be empty: a folder, a URL, or off")
        return value

    @field_validator("admin_key", "worker_key", "metrics_key", "viewer_key", "trial_secret", "api_key")
    @classmethod
    def _not_empty(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().strip():
            raise ValueError("must not be empty; leave it out instead")
        return value

    @property
    def archive_url(self) -> str | None:
        """Where ended sessions are archived; None: nowhere. If `archive` is unset, each Redis has its own folder, named after its
        address, so that it finds the folder again after it has lost its data.

        Raises: ConfigError: redis_url can't be read.
        """
        if self.redis_url is None or self.archive == "off":
            return None
        if self.archive is not None:
            return self.archive
        from steno_proxy.config.redis_url import address_of  # imports Redis, which not every proxy has

        address = address_of(self.redis_url)
        name = (
            f"{re.sub(r'[^A-Za-z0-9.]+', '-', address)[:60]}-{hashlib.sha256(address.encode()).hexdigest()[:8]}".strip(
                "-."
            )
        )
        data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "steno"
        return str((self.keys_dir or data) / "archive" / name)

    @property
    def base_path(self) -> str:
        """Path prefix of `public_url`: "" or "/steno". Requests are served with it and without it."""
        return urlsplit(self.public_url).path.rstrip("/") if self.public_url else ""

    def check(self) -> None:
        """Refuse what can't be served safely.

        Raises:
            ConfigError: names the offending key. Without an admin key everything is open to whoever can connect, so
                only loopback addresses are listened on (I8).
        """
        for field in ("host", "control_host"):
            host = getattr(self, field)
            if self.admin_key is None and host is not None and not is_loopback(host):
                raise ConfigError(
                    f"{field} {host!r} is not loopback and there is no admin_key: agents could read and reward each "
                    "other's sessions; set STENO_ADMIN_KEY, or listen on 127.0.0.1",
                    field=field,
                )
        if self.control_host is not None and self.control_port is None:
            raise ConfigError("control_host needs control_port: give --control-port as well", field="control_port")
        if self.control_port is not None and self.control_port == self.port != 0:
            raise ConfigError(
                f"control_port: got {self.control_port}, must differ from port (the port tells agents from the control plane)",
                field="control_port",
            )
        if self.redis_wait_replicas and self.redis_url is None:
            raise ConfigError(
                "redis_wait_replicas needs redis_url: give --redis-url as well", field="redis_wait_replicas"
            )
        if self.archive not in (None, "off") and self.redis_url is None:
            raise ConfigError("archive needs redis_url: give --redis-url as well", field="archive")
        if self.admin_key is None and (self.worker_key or self.trial_secret or self.metrics_key or self.viewer_key):
            raise ConfigError(
                "worker_key, metrics_key, viewer_key and trial_secret need admin_key: set it as well", field="admin_key"
            )
        if self.upstream is None and (self.api_base or self.api_key):
            raise ConfigError("api_base and api_key need upstream: give --upstream as well", field="upstream")
        if self.otel_endpoint is None and (self.otel_headers or self.otel_content):
            raise ConfigError(
                "otel_headers and otel_content need otel_endpoint: give --otel-endpoint as well", field="otel_endpoint"
            )
        _ = self.trace_headers
        if self.silence_s <= self.heartbeat_s:
            raise ConfigError(
                f"silence_s: got {self.silence_s:g}, must be above heartbeat_s ({self.heartbeat_s:g})",
                field="silence_s",
            )

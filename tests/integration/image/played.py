"""The compose file without Docker: each service's own command, environment and mounted files, on loopback ports.

The proxy runs from its image; the worker from the checkout (its image has a test of its own), Redis and Prometheus as the machine
has them. What is changed: `service:port` becomes `127.0.0.1:port`, and paths inside a container become paths here.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.integration.image.test_image import started
from tests.support.machine.redis_server import memory
from tests.support.programs.ports import free_port
from tests.support.programs.processes import process, until
from tests.support.programs.stack import ROOT

FOLDER = ROOT / "deploy/compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SITE_PACKAGES = "/opt/steno/lib/python3.11/site-packages"


@dataclass
class Played:
    """The services that run, and where."""

    folder: Path
    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in COMPOSE["services"]})
    keys: dict[str, str] = field(
        default_factory=lambda: {name: secrets.token_hex(32) for name in ("STENO_ADMIN_KEY", "STENO_WORKER_KEY")}
    )

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self.ports[service]}"

    def here(self, text: str) -> str:
        """With variables filled in as compose does, and addresses and paths as they are on this machine."""
        text = re.sub(r"\$\{(\w+):(?:\?[^}]*|-([^}]*))\}", lambda m: self.keys.get(m[1], m[2]), text)
        for name, port in self.ports.items():
            text = re.sub(rf"\b{name}:\d+", f"127.0.0.1:{port}", text)
        return text.replace(SITE_PACKAGES, str(ROOT)).replace("/run/admin-key", str(self.folder / "admin-key"))

    def environment(self, service: str) -> dict[str, str]:
        return {name: self.here(value) for name, value in COMPOSE["services"][service]["environment"].items()}


@contextlib.contextmanager
def playing(container: str, folder: Path) -> Iterator[Played]:
    """All but Grafana, each begun once what it depends on answers."""
    played = Played(folder)
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(tempfile.TemporaryDirectory(prefix="steno-redis-", dir=memory()))
        redis = [*COMPOSE["services"]["redis"]["command"], "--bind", "127.0.0.1", "--dir", kept]
        stack.enter_context(_service(folder, "redis", [*redis, "--port", str(played.ports["redis"])]))
        ping = ["redis-cli", "-p", str(played.ports["redis"]), "ping"]
        until(lambda: subprocess.run(ping, capture_output=True).returncode == 0, "Redis does not answer")
        environment = played.environment("proxy")
        stack.enter_context(started(container, folder / "proxy.log", played.ports["proxy"], environment))
        worker = {
            **played.environment("worker"),
            "STENO_WORKER_ENGINE": "transformers",  # these three are in its image
            "STENO_WORKER_METRICS_HOST": "127.0.0.1",
            "STENO_WORKER_METRICS_PORT": str(played.ports["worker"]),
        }
        stack.enter_context(_service(folder, "worker", [sys.executable, "-m", "steno", "worker"], worker))
        until(
            lambda: httpx.get(played.url("proxy") + "/readyz", timeout=10).json()["models"],
            "the worker does not answer",
        )
        stack.enter_context(_service(folder, "prometheus", _prometheus(played)))
        until(
            lambda: httpx.get(played.url("prometheus") + "/-/ready", timeout=10).status_code == 200,
            "Prometheus does not answer",
        )
        yield played


def _prometheus(played: Played) -> list[str]:
    (played.folder / "admin-key").write_text(played.keys["STENO_ADMIN_KEY"])
    for mount in COMPOSE["services"]["prometheus"]["volumes"]:
        source, _, target = mount.partition(":")
        if source.startswith("."):
            text = played.here((FOLDER / source).read_text())
            assert not re.search(r"\b(proxy|worker):\d", text)
            copy = played.folder / Path(target.removesuffix(":ro")).name
            copy.write_text(
                text.replace("scrape_interval: 15s", "scrape_interval: 1s")
            )  # nobody waits for minutes here
    return [
        "prometheus", f"--config.file={played.folder}/prometheus.yml", f"--storage.tsdb.path={played.folder}/tsdb",
        f"--web.listen-address=127.0.0.1:{played.ports['prometheus']}",
    ]  # fmt: skip


@contextlib.contextmanager
def _service(
    folder: Path, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    log = folder / f"{name}.log"
    with process(command, log, environment) as child:
        yield
        assert child.poll() is None, f"{name} ended\n{log.read_text()[-4000:]}"


def asked(url: str, path: str, **query: str) -> Any:
    """The `data` of an answer of Prometheus' HTTP API; what it refuses fails with its own words."""
    answer = httpx.get(f"{url}/api/v1/{path}", params=query, timeout=30)
    assert answer.status_code == 200, (query, answer.text)
    return answer.json()["data"]

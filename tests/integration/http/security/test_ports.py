"""The control plane on a port of its own: each port serves its half, and nothing of the other."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import websockets.sync.client
from starlette.routing import BaseRoute, Route, WebSocketRoute
from websockets.exceptions import InvalidStatus

from steno.contracts.errors import ConfigError
from steno.contracts.records import RESERVED_TRIAL_IDS
from steno_proxy.config.settings import ProxySettings
from steno_proxy.server.app import create_app
from steno_proxy.server.front import BOTH
from steno_proxy.server.listeners import listeners
from steno_rollouts.preflight import public_url
from tests.support.programs import forked
from tests.support.programs.ports import free_port
from tests.support.programs.stack import ROOT, Stack, running

KEY = {"authorization": "Bearer admin"}


class Two:
    def __init__(self, stack: Stack, control: int) -> None:
        self.stack, self.control = stack, f"http://127.0.0.1:{control}"

    @property
    def agents(self) -> str:
        return self.stack.url


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("ports")
    script = folder / "script.py"
    script.write_text('def say(request):\n    return {"content": "one two"}\n')
    control = free_port()
    with running(folder / "run", None, proxy=["--control-port", str(control), "--admin-key", "admin"]) as stack:
        worker = ["--engine", "scripted", "--script", f"{script}:say", "--model", str(ROOT / "steno/models/tiny")]
        log = (folder / "worker.log").open("wb")
        child = subprocess.Popen(
            [sys.executable, "-m", "steno", "worker", "--proxy", f"ws://127.0.0.1:{control}", "--key", "admin", *worker],
            stdout=log, stderr=log, cwd=ROOT,
        )  # fmt: skip
        stack.workers.append(child)
        found = Two(stack, control)
        until = time.monotonic() + 120
        while not httpx.get(found.control + "/workers", headers=KEY, timeout=30).json()["items"]:
            assert time.monotonic() < until and child.poll() is None, (folder / "worker.log").read_text()
            time.sleep(0.1)
        yield found
        log.close()


CONTROL = """/ /sessions /sessions/t /groups/g /workers /policy /metrics /openapi.json /leases /runs/r /%73essions /sessions/
    /policy/updates/x /workers/connect /workers/tokenizers /workers/tokenizers/0123456789abcdef
    //sessions /./sessions /SESSIONS""".split()


@pytest.mark.parametrize("path", CONTROL)
def test_the_agents_port_has_nothing_of_the_control_plane(two: Two, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        answer = httpx.request(method, two.agents + path, headers=KEY, timeout=30)
        assert answer.status_code == 404, (method, path)
        assert answer.headers["x-request-id"]


def test_steno_env_finds_the_context_of_what_is_served_behind_the_control_port(two: Two) -> None:
    words = ["env", "opencode", "env", "--json", "--proxy", two.control, "--key", "admin"]
    done = forked.run([sys.executable, "-m", "steno", *words])
    assert (done.returncode, done.stderr) == (0, "")
    provider = json.loads(json.loads(done.stdout)["variables"]["OPENCODE_CONFIG_CONTENT"])["provider"]["steno"]
    assert provider["options"]["baseURL"] == f"{two.agents}/env/v1"
    assert provider["models"]["policy"]["limit"]["context"] > 0


def test_the_workers_socket_is_on_the_control_port_only(two: Two) -> None:
    with pytest.raises(InvalidStatus) as refused:
        websockets.sync.client.connect(
            two.agents.replace("http", "ws") + "/workers/connect", additional_headers=KEY, open_timeout=60
        )
    assert refused.value.response.status_code == 403
    for path in ("/t/v1/chat/completions", "/t/v1/models"):
        with pytest.raises(InvalidStatus):
            websockets.sync.client.connect(
                two.agents.replace("http", "ws") + path, additional_headers=KEY, open_timeout=60
            )
    assert len(httpx.get(two.control + "/workers", headers=KEY, timeout=30).json()["items"]) == 1


def test_a_trial_is_registered_on_one_port_and_runs_on_the_other(two: Two) -> None:
    trial = httpx.post(two.control + "/sessions/t", headers=KEY, timeout=30).json()
    assert trial["urls"]["openai"] == f"{two.agents}/t/v1"
    body = {"messages": [{"role": "user", "content": "go"}]}
    key = {"authorization": f"Bearer {trial['api_key']}"}
    there = httpx.post(trial["urls"]["openai"] + "/chat/completions", json=body, headers=key, timeout=60)
    assert there.json()["choices"][0]["message"]["content"] == "one two"
    for path in ("/t/v1/chat/completions", "/t/v1/messages", "/t/v1/models", "/t/v1beta/models/m:generateContent"):
        assert httpx.post(two.control + path, json=body, headers=key, timeout=30).status_code == 404
    assert httpx.get(two.control + "/sessions/t", headers=KEY, timeout=30).json()["counts"]["turns"] == 1


async def test_the_control_plane_says_where_agents_reach_the_proxy(two: Two) -> None:
    """What rollouts ask for before a trial: its own address is not the control plane's."""
    assert await public_url(two.control) == two.agents


def test_a_host_header_moves_nothing_to_the_other_port(two: Two) -> None:
    host = {"host": two.control.removeprefix("http://"), "x-forwarded-host": "127.0.0.1", "x-forwarded-port": "1"}
    assert httpx.get(two.agents + "/sessions", headers=KEY | host, timeout=30).status_code == 404
    assert httpx.get(two.agents + f"/{two.control}/sessions", headers=KEY, timeout=30).status_code == 404


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/health", "/ping"])
def test_both_ports_say_that_they_are_there(two: Two, path: str) -> None:
    for url in (two.agents, two.control):
        assert httpx.get(url + path, timeout=30).status_code == 200


def test_every_route_is_the_agents_or_begins_with_a_word_that_no_trial_has() -> None:
    """What the ports are told apart by."""
    routes: list[BaseRoute] = list(create_app(ProxySettings()).routes)
    paths = set(json.loads(json.dumps(create_app(ProxySettings()).openapi()))["paths"])
    paths |= {route.path for route in routes if isinstance(route, Route | WebSocketRoute)}
    assert {"/workers/connect", "/metrics", "/sessions"} <= paths
    for path in paths:
        word = path.split("/")[1]
        agents = re.match(r"/\{trial_id\}((/v1)?/v1(beta|alpha)?/|/(health|ping|version|tokenize|detokenize)$)", path)
        alone = path in (
            "/health",
            "/ping",
            "/version",
            "/tokenize",
            "/detokenize",
        )  # whole paths: a trial's has a slash after its name
        assert agents or alone or word in RESERVED_TRIAL_IDS | BOTH, path


def test_the_version_is_on_the_control_port_only(two: Two) -> None:
    assert httpx.get(two.control + "/version", headers=KEY, timeout=30).status_code == 200
    assert httpx.get(two.agents + "/version", headers=KEY, timeout=30).status_code == 404


@pytest.mark.parametrize(
    ("given", "field"),
    [({"control_port": 8000}, "control_port"), ({"control_host": "127.0.0.2"}, "control_port"),
     ({"control_port": 1, "control_host": "0.0.0.0"}, "control_host")],
)  # fmt: skip
def test_ports_that_make_no_sense_are_refused_by_name(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ProxySettings(**given).check()  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize("field", ["port", "control_port"])
def test_a_port_that_is_taken_is_said_in_one_line(two: Two, field: str) -> None:
    host, _, taken = two.control.removeprefix("http://").rpartition(":")
    ended = steno("proxy", "--port", "0", f"--{field.replace('_', '-')}", taken)
    assert ended.returncode == 1, ended.stderr
    said = [line for line in ended.stderr.splitlines() if taken in line]
    assert said == [f"error: {field}: can't listen on {host}:{taken}: the address is in use already"], ended.stderr
    assert "Traceback" not in ended.stderr and "uvicorn" not in ended.stderr


def test_a_worker_finds_its_metrics_port_taken_before_it_loads_a_model(two: Two) -> None:
    taken = two.control.rpartition(":")[2]
    ended = steno("worker", "--proxy", "ws://127.0.0.1:9", "--metrics-port", taken)
    assert ended.returncode == 1 and "Loading" not in ended.stderr, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(f"error: metrics_port: can't listen on 127.0.0.1:{taken}: ")


def steno(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "steno", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_a_name_with_two_addresses_is_listened_on_at_both() -> None:
    addresses = {found[4][:1] for found in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    bound = listeners(ProxySettings(host="localhost", port=0))
    try:
        assert {listener.getsockname()[:1] for listener in bound} == addresses
        assert len({listener.getsockname()[1] for listener in bound}) == 1
    finally:
        for listener in bound:
            listener.close()


def test_logs_say_which_port_is_whose(two: Two) -> None:
    log = (Path(two.stack.folder) / "proxy.log").read_text()
    assert f"{two.agents} (agents)" in log and f"{two.control} (control plane)" in log

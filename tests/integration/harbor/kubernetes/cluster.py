"""A cluster of one node: the part of Kubernetes' API that sandboxes need, played over HTTP and WebSockets; its pods are Podman's
containers. It forgets, breaks off, refuses and evicts as it is told.

No library plays all of this: kmock 0.8 keeps objects, and has neither resource versions nor WebSockets.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import ssl
import threading
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from tests.integration.harbor.kubernetes.answers import Ends, Fault, Manifest, selected, status
from tests.integration.harbor.kubernetes.commands import execute, ran

TOKEN = "token-of-the-launcher"
NAMESPACE = "sandboxes"
REGISTRY = "registry.test"
VERSION = "1.35"
"""Of Kubernetes, by whose schemas all that comes is looked at."""


@dataclass
class Cluster:
    """Args: folder: for files of Secrets, and the file that says where this is. image: that every pod runs, whatever it names;
    pods of `absent` images never start. Attributes: asked: verb and resource of each request. invalid: what was no valid
    manifest. bodies: of all requests but those that make Secrets, and all paths. secrets, made: also of what is gone."""

    folder: Path
    image: str
    faults: list[Fault] = field(default_factory=list)
    asked: set[tuple[str, str]] = field(default_factory=set)
    invalid: list[str] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    secrets: dict[str, Manifest] = field(default_factory=dict)
    made: list[Manifest] = field(default_factory=list)
    pods: dict[str, Manifest] = field(default_factory=dict)
    evicted: set[str] = field(default_factory=set)
    restless: bool = False
    """Whether watches break off at each event, and every other time what was before is forgotten."""
    word_s: float = 0.0
    """After which a node says what became of a pod that it evicted: connections into it have ended by then."""
    breaks: int = 0
    gone: set[str] = field(default_factory=set)
    """How watches were told that what they begin from is forgotten: as the answer's status, as an event."""
    _events: list[tuple[int, str, Manifest]] = field(default_factory=list)
    _version: int = 100
    _oldest: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    leases: dict[str, Manifest] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    """Pods whose node is lost: they stay, also once they are deleted."""
    quota: int | None = None
    """Most pods at a time; None: as many as are asked for."""
    over_quota: int = 0
    """Pods that were refused so."""
    uses: int | None = None
    """Requests that a token is good for, of those that `credentials.sh` gives; None: one token is good for ever."""
    used: Counter[str] = field(default_factory=Counter)
    tls: ssl.SSLContext | None = None
    port: int = 0

    @property
    def config(self) -> Path:
        return self.folder / "kubeconfig.yaml"

    # -- what tests ask

    def named(self, word: str) -> list[Manifest]:
        """Pods that were made of the image with this name."""
        return [pod for pod in self.made if pod["spec"]["containers"][0]["image"] == f"{REGISTRY}/{word}"]

    def by_program(self) -> Path:
        """The kubeconfig's user is a program from here on, as a cloud's are. Where tokens are that it gave: a folder."""
        given = self.folder / "tokens"
        given.mkdir()
        program = Path(__file__).with_name("credentials.sh")
        variables = [{"name": "GIVEN", "value": str(given)}, {"name": "PREFIX", "value": TOKEN}]
        user = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "sh",
            "args": [str(program)],
            "env": variables,
        }
        config = yaml.safe_load(self.config.read_text())
        config["users"][0]["user"] = {"exec": {**user, "interactiveMode": "Never"}}
        self.config.write_text(yaml.safe_dump(config))
        return given

    def plant(self, name: str, labels: dict[str, str]) -> None:
        """A pod that somebody has made, and that runs nothing."""
        metadata = {"name": name, "uid": str(uuid.uuid4()), "namespace": NAMESPACE, "labels": labels}
        self.pods[name] = {"metadata": {**metadata, "annotations": labels}, "spec": {}, "status": {"phase": "Pending"}}

    # -- the server

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        ready, ends = threading.Event(), Ends()
        thread = threading.Thread(target=asyncio.run, args=(self._serve(ready, ends),), daemon=True)
        thread.start()
        assert ready.wait(30)
        server = {"server": f"http://127.0.0.1:{self.port}"}
        self.config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1", "kind": "Config", "current-context": "test",
                    "clusters": [{"name": "test", "cluster": server}],
                    "users": [{"name": "test", "user": {"token": TOKEN}}],
                    "contexts": [
                        {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}
                    ],
                }
            )
        )  # fmt: skip
        try:
            yield self
        finally:
            ends.now()
            thread.join(30)

    async def _serve(self, ready: threading.Event, ends: Ends) -> None:
        app = web.Application(client_max_size=2**24)
        base = "/api/v1/namespaces/{namespace}"
        lease = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        app.router.add_post(f"{base}/pods", self._faulty(self._create_pod))
        app.router.add_post(f"{base}/secrets", self._faulty(self._create_secret))
        app.router.add_get(f"{base}/pods", self._faulty(self._list))
        app.router.add_get(f"{base}/pods/{{name}}", self._faulty(self._get))
        app.router.add_delete(f"{base}/pods/{{name}}", self._faulty(self._delete))
        app.router.add_get(f"{base}/pods/{{name}}/exec", self._faulty(self._exec))
        app.router.add_post(lease, self._faulty(self._create_lease))
        app.router.add_get(lease, self._faulty(self._list_leases))
        app.router.add_put(f"{lease}/{{name}}", self._faulty(self._replace_lease))
        app.router.add_delete(f"{lease}/{{name}}", self._faulty(self._delete_lease))
        # A request ends with its connection: nothing is written to what is closed.
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self.tls).start()
        self.port = runner.addresses[0][1]
        ended = ends.begin()
        ready.set()
        await ended.wait()
        for task in self._tasks:
            task.cancel()
        await runner.cleanup()

    def _faulty(self, handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        async def handled(request: web.Request) -> web.StreamResponse:
            if not self._let_in(request.headers.get("authorization", "").removeprefix("Bearer ")):
                return status(401, "Unauthorized")
            self.bodies.append(request.path_qs)
            if request.match_info["namespace"] != NAMESPACE:
                return status(403, f"no namespace {request.match_info['namespace']}")
            for fault in self.faults:
                if fault.times and fault.method == request.method and re.search(fault.path, request.path_qs):
                    fault.times -= 1
                    await asyncio.sleep(fault.seconds)
                    if fault.how == "refuse":
                        return status(fault.status, fault.words, fault.headers)
                    done = await handle(request)
                    return status(504, "the answer is lost") if fault.how == "lose" else done
            return await handle(request)

        return handled

    def _let_in(self, token: str) -> bool:
        if self.uses is None:
            return token.startswith(TOKEN)
        self.used[token] += 1
        return token.startswith(TOKEN) and self.used[token] <= self.uses

    # -- pods

    async def _create_pod(self, request: web.Request) -> web.Response:
        pod = await self._valid(request, "pods")
        assert request.query["fieldValidation"] == "Strict"
        name = pod["metadata"]["name"]
        if name in self.pods:
            return status(409, f'pods "{name}" already exists', reason="AlreadyExists")
        if self.quota is not None and len(self.pods) >= self.quota:
            self.over_quota += 1
            amounts = f"requested: pods=1, used: pods={len(self.pods)}, limited: pods={self.quota}"
            return status(403, f'pods "{name}" is forbidden: exceeded quota: of-tests, {amounts}')
        pod["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": NAMESPACE}
        pod["status"] = {"phase": "Pending"}
        self.made.append(pod)
        self.pods[name] = pod
        self._event("ADDED", pod)
        self.later(self._start(pod))
        return web.json_response(pod, status=201)

    async def _create_secret(self, request: web.Request) -> web.Response:
        secret = await self._valid(request, "secrets")
        name = secret["metadata"]["name"]
        if name in self.secrets:
            return status(409, f'secrets "{name}" already exists', reason="AlreadyExists")
        (self.folder / name).mkdir()
        for key, value in secret["data"].items():
            (self.folder / name / key).write_bytes(base64.b64decode(value))
        self.secrets[name] = secret
        return web.json_response({"metadata": {"name": name}}, status=201)

    async def _valid(self, request: web.Request, resource: str, verb: str = "create") -> Manifest:
        self.asked.add((verb, resource))
        text = await request.text()
        if resource != "secrets":
            self.bodies.append(text)
        manifest: Manifest = json.loads(text)
        import kubernetes_validate  # here: environments of other trainers read this module, and lack it

        try:
            kubernetes_validate.validate(manifest, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            self.invalid.append(str(error))
        return manifest

    async def _start(self, pod: Manifest) -> None:
        """As a kubelet does: the volumes, the image, the container."""
        spec, name = pod["spec"], pod["metadata"]["name"]
        image = spec["containers"][0]["image"]
        pulled = image.rpartition("/")[2]
        if pulled in ("absent", "flaky"):
            waiting = {"reason": "ErrImagePull", "message": f"manifest for {image} not found"}
            self._status(pod, "Pending", {"waiting": waiting})
            await asyncio.sleep(0.5)
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
            self._status(pod, "Pending", {"waiting": waiting})
            if pulled == "absent":
                return
            await asyncio.sleep(0.5)
        mounts = []
        for volume in spec.get("volumes", []):
            while volume["secret"]["secretName"] not in self.secrets:
                if name not in self.pods:
                    return
                await asyncio.sleep(0.02)
            [place] = [m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
            mounts.append(f"--volume={self.folder / volume['secret']['secretName']}:{place}:ro")
        command = spec["containers"][0]["command"]
        given = ["--network=host", "--detach", f"--name={name}", *mounts, self.image, *command]
        self._status(pod, "Pending", {"waiting": {"reason": "ContainerCreating"}})
        done = await ran("podman", "run", *given)
        assert done == 0, "podman run"
        if name not in self.pods:  # deleted meanwhile
            await ran("podman", "rm", "--force", "--time=0", name)
            return
        self._status(pod, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})

    def _status(self, pod: Manifest, phase: str, state: Manifest, **more: Any) -> None:
        image = pod["spec"]["containers"][0]["image"]
        containers = [{"name": "main", "image": image, "state": state, "ready": phase == "Running"}]
        pod["spec"]["nodeName"] = "node-1"
        pod["status"] = {"phase": phase, "containerStatuses": containers, **more}
        self._event("MODIFIED", pod)

    async def evict(self, pod: Manifest) -> None:
        """By a node that is short of memory. Its pod stays, as what it was."""
        name = pod["metadata"]["name"]
        self.evicted.add(name)
        await ran("podman", "kill", name)
        await asyncio.sleep(self.word_s)
        words = {"reason": "Evicted", "message": "The node was low on resource: memory."}
        self._status(pod, "Failed", {"terminated": {"exitCode": 137, "reason": "Error"}}, **words)
        await ran("podman", "rm", "--force", "--time=0", name)  # its word does not wait for the disk

    async def _get(self, request: web.Request) -> web.Response:
        self.asked.add(("get", "pods"))
        pod = self.pods.get(request.match_info["name"])
        return status(404, "not found") if pod is None else web.json_response(pod)

    async def _delete(self, request: web.Request) -> web.Response:
        self.asked.add(("delete", "pods"))
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return status(404, "not found")
        wanted = (json.loads(await request.text() or "{}").get("preconditions") or {}).get("uid")
        if wanted not in (None, pod["metadata"]["uid"]):
            return status(409, "the UID in the precondition is another")
        if pod["metadata"]["name"] in self.lost:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._event("MODIFIED", pod)
            return web.json_response(pod)
        self.pods.pop(pod["metadata"]["name"])
        await ran("podman", "rm", "--force", "--time=0", pod["metadata"]["name"])
        self._event("DELETED", pod)
        self._collect(pod["metadata"]["uid"])
        return web.json_response(pod)

    def _collect(self, uid: str) -> None:
        """What a pod owned goes with it."""
        for name, secret in self.secrets.items():
            if secret["metadata"]["ownerReferences"][0]["uid"] == uid:
                for file in (self.folder / name).iterdir():
                    file.unlink()

    # -- watches

    def _event(self, kind: str, pod: Manifest) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, json.loads(json.dumps(pod))))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        selector = request.query.get("labelSelector", "")
        if request.query.get("watch", "false").lower() not in ("false", "0"):
            self.asked.add(("watch", "pods"))
            return await self._watch(request, selector)
        self.asked.add(("list", "pods"))
        found = [pod for pod in self.pods.values() if selected(pod, selector)]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": found})

    async def _watch(self, request: web.Request, selector: str) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self._oldest and self.breaks % 4 == 1:
            self.gone.add("status")
            return status(410, f"too old resource version: {since}")
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        if since < self._oldest:
            self.gone.add("event")
            gone = {"kind": "Status", "code": 410, "message": f"too old resource version: {since} ({self._oldest})"}
            await answer.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return answer
        while True:
            for version, kind, pod in [each for each in self._events if each[0] > since]:
                since = version
                if not selected(pod, selector):
                    continue
                line = json.dumps({"type": kind, "object": pod}).encode() + b"\n"
                await answer.write(line[:40])  # in pieces, as it may come
                await answer.write(line[40:])
                if self.restless:
                    self.breaks += 1
                    if self.breaks % 2:
                        self._version += 5
                        self._oldest = self._version
                    assert request.transport is not None
                    request.transport.close()  # in the middle of the stream: this ends by that
            await asyncio.sleep(0.02)

    # -- leases

    async def _create_lease(self, request: web.Request) -> web.Response:
        lease = await self._valid(request, "leases")
        name = lease["metadata"]["name"]
        if name in self.leases:
            return status(409, f'leases "{name}" already exists', reason="AlreadyExists")
        return self._keep(lease, str(uuid.uuid4()))

    async def _replace_lease(self, request: web.Request) -> web.Response:
        lease = await self._valid(request, "leases", "update")
        found = self.leases.get(request.match_info["name"])
        if found is None:
            return status(404, "not found")
        if lease["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return status(409, "the object has been modified")
        return self._keep(lease, found["metadata"]["uid"])

    def _keep(self, lease: Manifest, uid: str) -> web.Response:
        self._version += 1
        lease["metadata"] |= {"uid": uid, "resourceVersion": str(self._version)}
        self.leases[lease["metadata"]["name"]] = lease
        return web.json_response(lease)

    async def _list_leases(self, request: web.Request) -> web.Response:
        self.asked.add(("list", "leases"))
        found = [each for each in self.leases.values() if selected(each, request.query["labelSelector"])]
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": found})

    async def _delete_lease(self, request: web.Request) -> web.Response:
        self.asked.add(("delete", "leases"))
        found = self.leases.get(request.match_info["name"])
        if found is None:
            return status(404, "not found")
        wanted = json.loads(await request.text() or "{}").get("preconditions") or {}
        if any(found["metadata"][key] != value for key, value in wanted.items()):
            return status(409, "the object has been modified")
        return web.json_response(self.leases.pop(request.match_info["name"]))

    # -- exec

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        # A WebSocket begins with GET; newer releases ask for both.
        self.asked |= {("create", "pods/exec"), ("get", "pods/exec")}
        pod = self.pods.get(request.match_info["name"])
        return status(404, "not found") if pod is None else await execute(self, pod, request)

    def later(self, what: Any) -> None:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

"""What is asked of a cluster: few calls of its API, each again where that may help. Over `kubernetes_asyncio`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.stream import WsApiClient

from .errors import ApiRefused, ApiUnavailable, QuotaExceeded
from .manifest import MAIN, Manifest
from .quotas import never_fits, no_room_now

REQUEST_S = 30.0
PATIENCE_S = 120.0
"""For a server that is away, or says that too much is asked of it."""
WATCH_S = 300
"""After which the server ends a watch by itself."""
SILENT_S = 90.0
"""After which a watch is taken for broken: servers send a bookmark about once a minute."""
HEARTBEAT_S = 30.0
PROGRAM_S = 60.0
"""For a program that the kubeconfig names to give credentials."""
_AGAIN = frozenset((408, 429, 500, 502, 503, 504))
_INSIDE = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NONE_BY_USER = "no credentials by what the kubeconfig says of its user"
ROLE = "docs/kubernetes.md says which rights are needed"


class AlreadyThere(ApiRefused):
    """Something of this name."""


class Changed(ApiRefused):
    """Something is no longer as it was when it was read."""


class NotThere(ApiRefused):
    """Nothing of this name."""


class NoCredentials(ApiRefused):
    """A program gave none that the kubeconfig names, or a file is not there."""


class TooOld(ApiRefused):
    """A resource version that the server has no more."""


class Api:
    """Of one namespace. Args: where: `kubeconfig`, `context`, `namespace`, each None where it is not said."""

    def __init__(self, where: Mapping[str, Any]) -> None:
        self._where = where
        self._clients: tuple[Any, Any] | None = None
        self._earlier: list[Any] = []
        self._renewing = asyncio.Lock()
        self._renewals = 0
        self._not_renewed: str | None = None  # why the last time gave nothing
        self.namespace: str = where.get("namespace") or "default"

    @classmethod
    async def connected(cls, where: Mapping[str, Any]) -> Self:
        """Raises: ApiRefused: nothing says where a cluster is; NoCredentials."""
        api = cls(where)
        await api._connect()
        return api

    async def close(self) -> None:
        for each in (*self._earlier, *(self._clients or ())):
            await each.close()
        self._earlier, self._clients = [], None

    async def create_pod(self, manifest: Manifest) -> Manifest:
        """Raises: AlreadyThere; Changed: a quota was counted for somebody else; QuotaExceeded, ApiRefused, ApiUnavailable."""
        made: Manifest = await self._call(
            "create pods",
            lambda core, **how: core.create_namespaced_pod(self.namespace, manifest, field_validation="Strict", **how),
        )
        return made

    async def create_secret(self, manifest: Manifest) -> None:
        """Raises: AlreadyThere, QuotaExceeded, ApiRefused, ApiUnavailable."""
        await self._call(
            "create secrets", lambda core, **how: core.create_namespaced_secret(self.namespace, manifest, **how)
        )

    async def pod(self, name: str) -> Manifest:
        """Raises: NotThere, ApiRefused, ApiUnavailable."""
        read: Manifest = await self._call(
            "get pods", lambda core, **how: core.read_namespaced_pod(name, self.namespace, **how)
        )
        return read

    async def delete_pod(self, name: str, uid: str | None = None) -> None:
        """Delete a pod; with `uid`, only the pod of that uid. No error if it is gone. Raises: ApiRefused, ApiUnavailable."""
        body: Manifest = {"preconditions": {"uid": uid}} if uid else {}
        with contextlib.suppress(NotThere, Changed):  # it is another pod by now
            await self._call(
                "delete pods",
                lambda core, **how: core.delete_namespaced_pod(name, self.namespace, body=body or None, **how),
            )

    async def pods(self, selector: str) -> tuple[list[Manifest], str]:
        """With these labels, and the version of that answer. Raises: ApiRefused, ApiUnavailable."""
        found = await self._call(
            "list pods", lambda core, **how: core.list_namespaced_pod(self.namespace, label_selector=selector, **how)
        )
        return found.get("items") or [], found["metadata"]["resourceVersion"]

    async def create_lease(self, manifest: Manifest) -> Manifest:
        """Raises: AlreadyThere, ApiRefused, ApiUnavailable."""
        made: Manifest = await self._call(
            "create leases", lambda core, **how: _leases(core).create_namespaced_lease(self.namespace, manifest, **how)
        )
        return made

    async def replace_lease(self, manifest: Manifest) -> Manifest:
        """Of the version that it names. Raises: NotThere, Changed, ApiRefused, ApiUnavailable."""
        name = manifest["metadata"]["name"]
        made: Manifest = await self._call(
            "update leases",
            lambda core, **how: _leases(core).replace_namespaced_lease(name, self.namespace, manifest, **how),
        )
        return made

    async def leases(self, selector: str) -> list[Manifest]:
        """With these labels. Raises: ApiRefused, ApiUnavailable."""
        found = await self._call(
            "list leases",
            lambda core, **how: _leases(core).list_namespaced_lease(self.namespace, label_selector=selector, **how),
        )
        return found.get("items") or []

    async def delete_lease(self, name: str, seen: Manifest | None = None) -> None:
        """Delete a lease. seen: its `metadata`; only if it has not changed since. No error if it is gone.

        Raises: Changed, ApiRefused, ApiUnavailable."""
        body = {"preconditions": {key: seen[key] for key in ("uid", "resourceVersion")}} if seen else None
        with contextlib.suppress(NotThere):
            await self._call(
                "delete leases",
                lambda core, **how: _leases(core).delete_namespaced_lease(name, self.namespace, body=body, **how),
            )

    async def watch(self, selector: str, version: str) -> AsyncIterator[Manifest]:
        """Events after `version`, until the server ends the watch. Raises: TooOld, ApiRefused; ApiUnavailable: it broke."""
        used = self._clients
        limits = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_S, sock_read=SILENT_S)
        try:
            answer = await self._core().list_namespaced_pod(
                self.namespace, label_selector=selector, resource_version=version, watch=True, allow_watch_bookmarks=True,
                timeout_seconds=WATCH_S, _preload_content=False, _request_timeout=limits,
            )  # fmt: skip
            async with answer:
                await _good(answer)
                rest = b""
                async for piece in answer.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in filter(None, lines):
                        yield _event(json.loads(line))
        except ApiException as error:
            if error.status == 401:
                await self._renewed(used)
                raise ApiUnavailable("a watch of pods broke: its credentials had run out") from None
            raise _told("watch pods", error) from None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ApiUnavailable(f"a watch of pods broke: {_words(error)}") from None

    async def exec(self, pod: str, command: list[str]) -> Any:
        """A WebSocket of `v4.channel.k8s.io` to a command in the pod's main container; nothing runs in it where this raises.

        Raises: NotThere, ApiRefused, ApiUnavailable.
        """

        async def opened(_: Any, **how: Any) -> Any:
            assert self._clients is not None
            core = client.CoreV1Api(self._clients[1])
            opening = await core.connect_get_namespaced_pod_exec(
                pod, self.namespace, container=MAIN, command=command, stdin=True, stdout=True, stderr=True, tty=False,
                _preload_content=False,
            )  # fmt: skip
            return await opening

        return await self._call("exec into pods", opened, parse=False)

    async def _call(self, what: str, call: Callable[..., Awaitable[Any]], *, parse: bool = True) -> Any:
        until, pause, fresh = time.monotonic() + PATIENCE_S, 0.5, False
        while True:
            after, used = 0.0, self._clients
            try:
                async with asyncio.timeout(REQUEST_S):
                    answer = await call(self._core(), _preload_content=False)
                    if not parse:
                        return answer
                    await _good(answer)
                    return await answer.json()
            except (ApiException, aiohttp.WSServerHandshakeError) as error:
                if error.status == 401 and not fresh:  # a token that has run out
                    try:
                        await self._renewed(used)
                    except NoCredentials as failed:  # what gives them may be away as well
                        said = str(failed)
                    else:
                        fresh = True
                        continue
                elif error.status not in _AGAIN:
                    raise _told(what, error) from None
                else:
                    said, after = _words(error), _retry_after(error.headers)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                said = _words(error)
            if time.monotonic() + max(pause, after) > until:
                raise ApiUnavailable(f"the cluster can't be asked to {what}, for {PATIENCE_S:.0f} s: {said}")
            await asyncio.sleep(max(pause, after))
            pause = min(2 * pause, 10.0)

    def _core(self) -> Any:
        assert self._clients is not None
        return client.CoreV1Api(self._clients[0])

    async def _renewed(self, used: tuple[Any, Any] | None) -> None:
        """Other credentials than those of `used`, asked for once by all calls that these were refused to. Raises: ApiRefused,
        NoCredentials."""
        seen = self._renewals
        async with self._renewing:
            if self._clients is not used:
                return
            if self._renewals > seen and self._not_renewed is not None:  # while this one waited
                raise NoCredentials(self._not_renewed)
            self._renewals, self._not_renewed = self._renewals + 1, None
            try:
                await self._connect()
            except NoCredentials as failed:
                self._not_renewed = str(failed)
                raise

    async def _connect(self) -> None:
        found = client.Configuration()
        file, context = self._where.get("kubeconfig"), self._where.get("context")
        named: str | None = None
        inside = not file and not context and "KUBERNETES_SERVICE_HOST" in os.environ and _INSIDE.exists()  # noqa: ASYNC240  # asks no disk
        try:
            if inside:
                config.load_incluster_config(client_configuration=found)
                named = (_INSIDE / "namespace").read_text().strip()
            else:
                async with asyncio.timeout(PROGRAM_S):
                    loader = await config.load_kube_config(
                        config_file=file, context=context, client_configuration=found, persist_config=False
                    )
                named = (loader.current_context.get("context") or {}).get("namespace")
        except TimeoutError:
            raise NoCredentials(f"{NONE_BY_USER}: its program came to no end in {PROGRAM_S:.0f} s") from None
        except Exception as error:  # whatever the client makes of what a program or a file says
            # The client's errors about the program begin with `exec:`. An OSError comes from that program, or from a token file.
            # If the configuration could be read before, any error now comes from one of these two.
            if self._clients is not None or isinstance(error, OSError) or str(error).startswith("exec: "):
                raise NoCredentials(f"{NONE_BY_USER}: {_words(error)}") from None
            raise ApiRefused(f"no cluster is known here: {_words(error)}") from None
        self.namespace = self._where.get("namespace") or named or "default"
        self._earlier += self._clients or ()  # a command may run over these yet
        self._clients = (client.ApiClient(found), WsApiClient(found, heartbeat=HEARTBEAT_S))


async def _good(answer: Any) -> None:
    """Raises: ApiException. (The client itself looks at the status of parsed answers only.)"""
    if not 200 <= answer.status <= 299:
        error = ApiException(status=answer.status, reason=answer.reason)
        error.body, error.headers = await answer.text(), answer.headers
        raise error


def _leases(core: Any) -> Any:
    return client.CoordinationV1Api(core.api_client)


def _event(found: Manifest) -> Manifest:
    if found["type"] != "ERROR":
        return found
    status = found["object"]
    if status.get("code") == 410:
        raise TooOld(status.get("message", ""))
    raise ApiUnavailable(f"a watch of pods ended: {status.get('message') or status}")


def _told(what: str, error: Any) -> ApiRefused | ApiUnavailable:
    words = _words(error)
    if error.status == 403 and no_room_now(words):
        quota = never_fits(words)
        more = "" if quota is None else f": that is more than quota {quota} has in all"
        return QuotaExceeded(f"the cluster refuses to {what}: {words}{more}", never=quota is not None)
    conflict = AlreadyThere if _said(error).get("reason") == "AlreadyExists" else Changed
    kind = {404: NotThere, 409: conflict, 410: TooOld}.get(error.status, ApiRefused)
    unasked = error.status == 403 and " cannot " in words  # else a quota or a policy says no
    hint = f" ({ROLE})" if unasked else ""
    if error.status in _AGAIN:
        return ApiUnavailable(f"the cluster can't be asked to {what}: {words}")
    return kind(f"the cluster refuses to {what}: {words}{hint}")


def _retry_after(headers: Any) -> float:
    try:
        return min(float((headers or {}).get("Retry-After", 0)), REQUEST_S)
    except ValueError:
        return 0.0


def _said(error: BaseException) -> Mapping[str, Any]:
    """The API's own account of a refusal; nothing where it gave none."""
    try:
        found = json.loads(getattr(error, "body", None) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _words(error: BaseException) -> str:
    """The API's own, where it gave some."""
    body = getattr(error, "body", None)
    if body:
        said = _said(error).get("message") or " ".join(str(body).split())[:200]
        return f"{said} ({error.status})"  # type: ignore[attr-defined]
    return str(error) or f"{type(error).__name__} after {REQUEST_S:.0f} s"

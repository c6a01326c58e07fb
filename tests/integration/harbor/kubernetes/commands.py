"""Commands in a pod, as a kubelet runs them: their streams in messages of one WebSocket, whose first byte names the stream. The
pod is a container of Podman's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from typing import Any, Protocol

from aiohttp import WSMsgType, web

PROTOCOL = "v4.channel.k8s.io"


class Node(Protocol):
    made: list[dict[str, Any]]
    pods: dict[str, dict[str, Any]]
    evicted: set[str]

    async def evict(self, pod: dict[str, Any]) -> None: ...

    def later(self, what: Any) -> None: ...


async def execute(node: Node, pod: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """What runs in a pod runs on when its connection breaks."""
    assert request.query["container"] == "main"
    socket = web.WebSocketResponse(protocols=[PROTOCOL])
    await socket.prepare(request)
    assert socket.ws_protocol == PROTOCOL
    name = pod["metadata"]["name"]
    process = await asyncio.create_subprocess_exec(
        "podman", "exec", "--interactive", name, *request.query.getall("command"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    feeding = asyncio.ensure_future(feed(socket, process))
    passing = [
        asyncio.ensure_future(pass_on(node, pod, socket, stream, pipe))
        for stream, pipe in ((1, process.stdout), (2, process.stderr))
    ]
    try:
        await asyncio.gather(*passing)
        code = await process.wait()
        if name not in node.evicted and name in node.pods:
            ended: dict[str, Any] = {"metadata": {}, "status": "Success"}
            if code:
                causes = [{"reason": "ExitCode", "message": str(code)}]
                ended = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
            await socket.send_bytes(b"\x03" + json.dumps(ended).encode())
        await socket.close()
    except ConnectionError:
        pass  # who asked is gone
    finally:
        for task in (feeding, *passing):
            task.cancel()
        await asyncio.gather(feeding, *passing, return_exceptions=True)
        if process.returncode is None:
            process.kill()  # Podman's own, of this side
            await process.wait()
    return socket


async def feed(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[0] == 0:
                process.stdin.write(message.data[1:])
                await process.stdin.drain()
        process.stdin.close()


async def pass_on(
    node: Node, pod: dict[str, Any], socket: web.WebSocketResponse, stream: int, pipe: asyncio.StreamReader
) -> None:
    """A command that says EVICT ME has its pod evicted, if that is the first of its task."""
    while piece := await pipe.read(64 * 1024):
        await socket.send_bytes(bytes([stream]) + piece)
        if b"EVICT ME" not in piece:
            continue
        image = pod["spec"]["containers"][0]["image"]
        others = [each for each in node.made if each["spec"]["containers"][0]["image"] == image]
        if node.evicted & {each["metadata"]["name"] for each in others}:
            await ran("podman", "exec", pod["metadata"]["name"], "touch", "/stays")
        else:
            node.later(node.evict(pod))


async def ran(*command: str) -> int:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return await process.wait()

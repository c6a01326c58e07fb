"""The least that a proxy in Python can be: aiohttp in front, aiohttp behind, bytes passed on as they come. Records nothing.

python -m benchmarks.passthrough --port 8081 --upstream http://127.0.0.1:9000
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

UPSTREAM: web.AppKey[str] = web.AppKey("upstream", str)
SESSION: web.AppKey[ClientSession] = web.AppKey("session", ClientSession)
_KEPT = ("content-type", "authorization")


async def pass_on(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    headers = {name: value for name in _KEPT if (value := request.headers.get(name))}
    url = request.app[UPSTREAM] + request.path_qs
    async with request.app[SESSION].request(request.method, url, data=body, headers=headers) as answer:
        content_type = answer.headers.get("content-type", "")
        if "event-stream" not in content_type:
            return web.Response(status=answer.status, body=await answer.read(), headers={"content-type": content_type})
        response = web.StreamResponse(status=answer.status, headers={"content-type": content_type})
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


async def _session(app: web.Application) -> AsyncIterator[None]:
    async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None)) as session:
        app[SESSION] = session
        yield


async def serve(port: int, upstream: str) -> None:
    app = web.Application(client_max_size=64 * 2**20)
    app[UPSTREAM] = upstream
    app.cleanup_ctx.append(_session)
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True)
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.upstream))

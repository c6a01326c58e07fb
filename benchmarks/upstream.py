"""The engine that the peers are measured over: an OpenAI-compatible server that costs next to nothing.

Answers `chat/completions` with ` tok` tokens at a fixed pace, with vLLM's extras (`prompt_token_ids`, `token_ids`,
log-probabilities) when a request asks for them by `return_token_ids` or `logprobs`, as rllm-model-gateway does. One shared ticker
paces all streams. A last message of "wait silently" is never answered.

    python -m benchmarks.upstream --port 9000 --pace-s 0.02
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Ticker:
    """Calls every live stream once per tick: one timer for all of them."""

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s
        self.streams: set[Server] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self.pace_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            for stream in list(self.streams):
                stream.tick()


class Server(asyncio.Protocol):
    def __init__(self, ticker: Ticker) -> None:
        self.ticker = ticker
        self.transport: asyncio.Transport | None = None
        self.buffer = b""
        self.left = 0
        self.piece = b""
        self.last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.ticker.streams.discard(self)
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if b"transfer-encoding: chunked" in head:
                stop = self.buffer.find(b"0\r\n\r\n", end)
                if stop < 0:
                    return
                body, rest = b"", self.buffer[end + 4 : stop]
                while rest:
                    size, _, rest = rest.partition(b"\r\n")
                    body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
                self.buffer = self.buffer[stop + 5 :]
            else:
                if len(self.buffer) < end + 4 + length:
                    return
                body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            self.last = b"\r\nconnection: close" in head
            self.answer(head.split(b"\r\n", 1)[0], body)

    def json(self, value: Any) -> None:
        raw = json.dumps(value).encode()
        assert self.transport is not None
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)
        )
        self.end()

    def end(self) -> None:
        """Of an answer: a client that asked for `connection: close` may read until the connection ends."""
        if self.last and self.transport is not None:
            self.transport.close()

    def answer(self, line: bytes, body: bytes) -> None:
        if line.startswith(b"get"):
            self.json(
                {
                    "object": "list",
                    "status": "ok",
                    "model_path": "bench",
                    "tokenizer_path": "",
                    "is_generation": True,
                    "data": [{"id": "bench", "object": "model", "created": 0, "owned_by": "bench"}],
                }
            )
            return
        request = json.loads(body)
        if str(request["messages"][-1]["content"]).startswith("wait silently"):
            assert self.transport is not None
            self.transport.write(_HEAD)
            return
        count = request.get("max_tokens") or 8
        prompt_tokens = len(body) // 4
        ids = bool(request.get("return_token_ids"))
        logprobs = bool(request.get("logprobs"))
        if not request.get("stream"):
            choice: dict[str, Any] = {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": " tok" * count},
            }
            if logprobs:
                choice["logprobs"] = {
                    "content": [{"token": " tok", "logprob": -0.5, "bytes": [], "top_logprobs": []}] * count
                }
            answer: dict[str, Any] = {
                "id": "c1",
                "object": "chat.completion",
                "created": 0,
                "model": "bench",
                "choices": [choice],
                "usage": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": count,
                    "total_tokens": prompt_tokens + count,
                },
            }
            if ids:
                choice["token_ids"] = list(range(count))
                answer["prompt_token_ids"] = list(range(prompt_tokens))
            self.json(answer)
            return
        delta: dict[str, Any] = {"index": 0, "delta": {"content": " tok"}, "finish_reason": None}
        if logprobs:
            delta["logprobs"] = {"content": [{"token": " tok", "logprob": -0.5, "bytes": [], "top_logprobs": []}]}
        if ids:
            delta["token_ids"] = [17]
        event = {"id": "c1", "object": "chat.completion.chunk", "created": 0, "model": "bench", "choices": [delta]}
        self.piece = _chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.left = count
        assert self.transport is not None
        self.transport.write(_HEAD)
        self.ticker.streams.add(self)

    def tick(self) -> None:
        if self.transport is None:
            return
        self.left -= 1
        if self.left > 0:
            self.transport.write(self.piece)
            return
        self.ticker.streams.discard(self)
        last = {
            "id": "c1",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "bench",
            "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        }
        end = _chunk(b"data: " + json.dumps(last).encode() + b"\n\n") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self.transport.write(self.piece + end)
        self.end()


async def serve(host: str, port: int, pace_s: float) -> None:
    ticker = Ticker(pace_s)
    server = await asyncio.get_running_loop().create_server(lambda: Server(ticker), host, port, backlog=4096)
    async with server:
        await ticker.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pace-s", type=float, default=0.02)
    args = parser.parse_args()
    uvloop.run(serve(args.host, args.port, args.pace_s))

"""What the scripted engine costs by itself, and with rendering, decoding and parsing around it: to tell what the relay adds.

Runs `--streams` generations at a time in this process, without any socket, at the pace of the worker that it is compared to.
Prints one JSON object: CPU of this process in microseconds per token.

    python -m benchmarks.bare --what engine --streams 64 --tokens 128 --seconds 6
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from steno.contracts.chat import Job, Sampling
from steno.contracts.wire.frames import Delta, Generate
from steno_worker.chat.hf import HfChatFormat
from steno_worker.engines.scripted.engine import ScriptedEngine, ScriptedTokens
from steno_worker.engines.scripted.script import ScriptFunction

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "steno/models/tiny"
SCRIPT = f"{ROOT / 'benchmarks/script.py'}:say"


async def run(what: str, streams: int, tokens: int, pace_s: float, seconds: float) -> dict[str, float]:
    chat = HfChatFormat.load(MODEL)
    engine = ScriptedTokens(ScriptFunction(SCRIPT), chat, pace_s=pace_s)
    whole = ScriptedEngine(engine, chat)
    await whole.start()
    law = Sampling(max_tokens=tokens)
    job = Job(messages=[{"role": "user", "content": "go"}], sampling=law)
    prompt = chat.render(job.messages, [], {})
    sampled = 0

    async def bare(number: str) -> None:
        nonlocal sampled
        async for step in engine.sample(number, prompt, law, job):
            sampled += len(step.ids)

    async def turn(number: str) -> None:
        nonlocal sampled
        async for event in whole.generate(Generate(1, number, 0, "bench", job)):
            if type(event) is Delta:
                sampled += len(event.ids) >> 2

    one: Callable[[str], Awaitable[None]] = bare if what == "engine" else turn

    async def stream(number: int, until: float) -> None:
        await asyncio.sleep(number * 0.002)
        count = 0
        while time.perf_counter() < until or count == 0:
            await one(f"{number}-{count}")
            count += 1

    await one("warm")
    sampled = 0
    before = time.process_time()
    until = time.perf_counter() + seconds
    await asyncio.gather(*(stream(number, until) for number in range(streams)))
    spent = time.process_time() - before
    await whole.stop()
    return {"tokens": sampled, "cpu_us_per_token": 1e6 * spent / sampled}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["engine", "turn"], default="engine")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pace-s", type=float, default=0.02)
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()
    print(json.dumps(uvloop.run(run(args.what, args.streams, args.tokens, args.pace_s, args.seconds))))

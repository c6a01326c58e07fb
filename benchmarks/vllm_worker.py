"""What a worker costs per token beside vLLM: CPU time of the process that vLLM's front-end and ours share.

    <python of the vLLM environment> -m benchmarks.vllm_worker --model DIR [--streams 16] [--tokens 256]

Three ways over the same requests: vLLM's own iterator; the token engine (log-probabilities, versions, checks); whole turns
(rendering, decoding, parsing, frames). The engine's own process is not counted. JSON on the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm.inputs import tokens_input

from steno.contracts.chat import Job, Sampling
from steno.contracts.wire.frames import Generate
from steno_worker.chat.chat_engine import ChatEngine
from steno_worker.engines.vllm.args import from_fields
from steno_worker.engines.vllm.engine import VllmTokens
from steno_worker.engines.vllm.params import sampling_params

MESSAGES = [{"role": "user", "content": "What is the weather in Paris today? Call the tool if you need it."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": PARAMETERS}}]


Way = Callable[[str], Awaitable[None]]


async def measure(ways: dict[str, Way], streams: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """All ways in turn, round after round, so that whatever else the machine does meets all alike. The first is not counted."""
    cpu, wall = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for turn in range(rounds + 1):
        for name, way in ways.items():
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            await asyncio.gather(*(way(f"{name}-{turn}-{n}") for n in range(streams)))
            if turn:
                cpu[name] += time.process_time() - cpu_before
                wall[name] += time.perf_counter() - wall_before
    total = streams * tokens * rounds
    return {
        name: {"cpu_us_per_token": round(1e6 * cpu[name] / total, 1), "tokens_per_s": round(total / wall[name])}
        for name in ways
    }


async def run(model: str, streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    fields = {"model": model, "dtype": "float32", "enforce_eager": True, "max_num_seqs": streams, "max_model_len": 2048}
    engine = VllmTokens(from_fields({**fields, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}))
    chat = ChatEngine(engine, engine.format)
    await chat.start()
    law = Sampling(max_tokens=tokens, ignore_eos=True)
    job = Job(messages=MESSAGES, tools=TOOLS, sampling=law, template_kwargs={"enable_thinking": False})
    prompt = engine.format.render(MESSAGES, TOOLS, job.template_kwargs)

    async def bare(request_id: str) -> None:
        params = sampling_params(law, job, None, engine.format.stop_ids)
        async for _ in engine.llm.generate(tokens_input(prompt), params, request_id):
            pass

    async def sampled(request_id: str) -> None:
        async for _ in engine.sample(request_id, prompt, law, job):
            pass

    async def turned(request_id: str) -> None:
        async for _ in chat.generate(Generate(1, request_id, 0, "t", job)):
            pass

    try:
        ways: dict[str, Way] = {"vllm": bare, "token_engine": sampled, "turns": turned}
        results = await measure(ways, streams, tokens, rounds)
    finally:
        await chat.stop()
    beside = results["turns"]["cpu_us_per_token"] - results["vllm"]["cpu_us_per_token"]
    return {**results, "beside_engine_us_per_token": round(beside, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    results = asyncio.run(run(args.model, args.streams, args.tokens, args.rounds))
    setup = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), **vars(args)}
    print(json.dumps({"setup": setup, **results}))


if __name__ == "__main__":
    main()

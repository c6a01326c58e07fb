"""An engine samples: ids with the log-probabilities that it drew them at, as the worker gets them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.calls import answer, job_of_this_process
from steno.contracts.chat import Job, Sampling

QUESTION = "What is the weather in city {}? Answer in one sentence, then say what you would pack."


def embedded(job: dict[str, Any]) -> tuple[Any, Any]:
    """(engine, format)"""
    from steno_worker.chat.hf import HfChatFormat
    from steno_worker.engines.transformers.engine import TransformersEngine

    form = HfChatFormat.load(job["model"])
    return TransformersEngine(
        Path(job["model"]), stop_ids=form.stop_ids, device=job["device"], max_streams=job["streams"]
    ), form


def vllm(job: dict[str, Any]) -> tuple[Any, Any]:
    from steno_worker.engines.vllm.args import from_fields
    from steno_worker.engines.vllm.engine import VllmTokens

    longest = 512 + job["tokens"]
    engine = VllmTokens(
        from_fields(
            {"model": job["model"], "max_model_len": longest, "max_num_seqs": job["streams"], **job["arguments"]}
        )
    )
    return engine, engine.format


async def sample(job: dict[str, Any]) -> dict[str, Any]:
    engine, form = {"transformers": embedded, "vllm": vllm}[job["engine"]](job)
    started = time.monotonic()
    await engine.start()
    up = time.monotonic()

    async def one(number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": QUESTION.format(number)}]
        law = Sampling(max_tokens=job["tokens"], ignore_eos=True, seed=number)
        asked = Job(messages=messages, tools=[], sampling=law, template_kwargs={})
        prompt = form.render(messages, [], {})
        steps = [step async for step in engine.sample(f"check-{number}", prompt, law, asked)]
        ids, logprobs = ([x for step in steps for x in (getattr(step, name) or [])] for name in ("ids", "logprobs"))
        return {"prompt": list(prompt), "ids": ids, "logprobs": logprobs}

    try:
        records = await asyncio.gather(*(one(number) for number in range(job["streams"])))
        sampled = time.monotonic()
    finally:
        await engine.stop()
    tokens = sum(len(record["ids"]) for record in records)
    return {"records": records, "tokens": tokens, "up_s": up - started, "tokens_per_s": tokens / (sampled - up)}


def main() -> None:
    job = job_of_this_process()
    answer(job, asyncio.run(sample(job)))


if __name__ == "__main__":  # vLLM starts processes that import this module
    main()

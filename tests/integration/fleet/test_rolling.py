"""Three replicas and two workers are restarted one after the other under load: no agent's request fails.

Agents are the official SDK as it comes (two retries), behind what balances their connections; half of their answers are streamed.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import openai
import pytest

from steno.client.client import AsyncClient
from tests.chaos.invariants import check_turns
from tests.chaos.predict import BASE_VERSION
from tests.chaos.system.balancer import Balancer
from tests.chaos.system.deployment import Deployment

AGENTS = 8
TURNS = 4


async def test_a_rolling_restart_fails_no_agents_request(tmp_path: Path) -> None:
    async with Deployment(tmp_path, patience_s=90) as deployment, Balancer(deployment.ports) as balancer:
        stop = asyncio.Event()
        agents = [asyncio.create_task(agent(balancer.port, number, stop)) for number in range(AGENTS)]
        try:
            await asyncio.sleep(0.5)
            for program in [*deployment.replicas, *deployment.workers[:2]]:
                program.signal(signal.SIGTERM)
                assert await program.ended(120), f"{program.name} does not end"
                assert program.child is not None and program.child.returncode == 0, program.log.read_text()[-3000:]
                await deployment.heal()
        finally:
            stop.set()
            results = await asyncio.gather(*agents, return_exceptions=True)
        logs = "\n".join(program.log.read_text()[-1500:] for program in deployment.programs)
        assert [one for one in results if isinstance(one, BaseException)] == [], logs
        trials = [trial for one in results if not isinstance(one, BaseException) for trial in one]
        assert len(trials) >= 2 * AGENTS
        async with AsyncClient(deployment.direct(0)) as steno:
            for trial, seen in trials:
                turns = [turn async for turn in steno.turns(trial)]
                assert check_turns(turns, [BASE_VERSION]) == []
                whole = [turn.turn_id for turn in turns if not turn.partial and turn.superseded_by is None]
                assert whole == seen, trial


async def agent(port: int, number: int, stop: asyncio.Event) -> list[tuple[str, list[str]]]:
    """One conversation after the other. Returns: (trial, turn ids of its answers)."""
    trials: list[tuple[str, list[str]]] = []
    while not stop.is_set():
        trial, seen = f"rolling-{number}-{len(trials)}", list[str]()
        trials.append((trial, seen))
        async with openai.AsyncOpenAI(
            api_key="none", base_url=f"http://127.0.0.1:{port}/{trial}/v1", timeout=300
        ) as client:
            messages: list[dict[str, str]] = []
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"step {turn}"})
                content, answer_id = await ask(client, messages, stream=(number + turn) % 2 == 0)
                messages.append({"role": "assistant", "content": content})
                seen.append(answer_id.removeprefix("chatcmpl-"))
    return trials


async def ask(client: openai.AsyncOpenAI, messages: list[dict[str, str]], *, stream: bool) -> tuple[str, str]:
    said = list(messages)
    if not stream:
        answer = await client.chat.completions.create(model="any", messages=said)  # type: ignore[arg-type]
        return answer.choices[0].message.content or "", answer.id
    content, answer_id, finish = "", "", None
    chunks = await client.chat.completions.create(model="any", messages=said, stream=True)  # type: ignore[arg-type]
    async for chunk in chunks:
        answer_id = chunk.id
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
    if finish is None:
        pytest.fail("a stream ended without a finish reason")
    return content, answer_id

"""One request with many completions of a large prompt: each is sent by itself, so together they are bounded."""

from __future__ import annotations

import asyncio

from steno.contracts.wire.frames import Generate
from tests.integration.http.conftest import running
from tests.support.waiting import until
from tests.support.workers.parrot import ParrotEngine, Say


async def test_many_completions_of_a_large_prompt_are_refused_and_nobody_elses_stream_breaks() -> None:
    """64 of 5 MB were 146 MB that waited to be acknowledged: the worker's channel ended, and with it every stream on it."""
    gate = asyncio.Event()

    def say(request: Generate) -> Say:
        return Say("whole", gates={3: gate} if request.trial_id == "other" else {})

    engine = ParrotEngine(say, context_tokens=10**7)
    async with running(engine) as proxy:
        hub = proxy.app.state.hub
        others = [asyncio.create_task(proxy.chat("other", "hello", stream=bool(n % 2))) for n in range(20)]
        await until(lambda: len(engine.requests) == 20)
        answer = await proxy.chat("greedy", "x" * 5_000_000, n=64)
        assert answer.status_code == 413, answer.text
        assert answer.json()["error"]["message"].startswith("n: 64 completions send the request 64 times, 3")
        assert len(engine.requests) == 20, "none of it was sent"
        assert (await proxy.chat("greedy", "x" * 500_000, n=8)).status_code == 200
        gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*others)} == {200}
        assert not any(turn.partial for turn in await proxy.turns("other", at_least=20))
        assert hub.counts.channels["lost"] == 0

"""The scripted engine: what it says in the model's template, at which pace, and how it is cut off."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import EngineFailed
from steno.models import TINY
from steno_worker.chat.hf import HfChatFormat
from steno_worker.engines.scripted.engine import ReplyRenderer, ScriptedTokens, Ticker
from steno_worker.engines.scripted.script import ScriptFunction
from steno_worker.interfaces import TokenStep

ASK = Job(messages=[{"role": "user", "content": "hello"}])
LONG = Sampling(max_tokens=1000)


@pytest.fixture(scope="module")
def chat() -> HfChatFormat:
    return HfChatFormat.load(TINY)


def message(content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def text_of(chat: HfChatFormat, ids: list[int]) -> str:
    return chat.decoder().feed(ids, final=True)


def test_a_reply_is_what_the_template_writes_after_the_generation_prompt(chat: HfChatFormat) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
    said = message("Look.", reasoning_content="Hm.", tool_calls=[call])
    ids = ReplyRenderer(chat).render(said, ASK)
    assert ids[-1] in chat.stop_ids
    assert text_of(chat, ids) == (
        '<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n{"name": "ls", "arguments": {"a": 1}}\n</tool_call>'
    )
    prompt = chat.render(ASK.messages, [], {})
    assert chat.render([*ASK.messages, said], [], {})[: len(prompt) + len(ids)] == prompt + ids


def test_thinking_that_the_prompt_has_closed_is_not_said_again(chat: HfChatFormat) -> None:
    job = Job(messages=ASK.messages, template_kwargs={"enable_thinking": False})
    assert text_of(chat, ReplyRenderer(chat).render(message("Hi."), job)) == "Hi."
    assert text_of(chat, ReplyRenderer(chat).render(message("Hi.", reasoning_content="Hm."), job)) == "Hi."


class _OpenThink:
    """A template whose prompt opens the thinking, and whose replies end where the next role begins (as GLM's)."""

    name, stop_ids = "open", frozenset({9})

    def render(self, messages: Any, tools: Any, options: Any) -> list[int]:
        ids: list[int] = []
        for one in messages:
            ids += [9, *map(ord, one["content"])] if one["role"] == "user" else [8, *map(ord, one["content"])]
        return [*ids, 8, 7]

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decoder(self) -> Any:
        class Decoder:
            def feed(self, ids: list[int], *, final: bool = False) -> str:
                return "".join({7: "<think>", 8: "", 9: ""}.get(token, chr(token)) for token in ids)

        return Decoder()


def test_an_open_thought_is_closed_and_a_missing_stop_id_added() -> None:
    said = ReplyRenderer(_OpenThink()).render(message("ok"), ASK)  # type: ignore[arg-type]
    assert said == [*map(ord, "\n</think>\n\nok"), 9]


async def say(chat: HfChatFormat, tmp_path: Path, returned: str, law: Sampling = LONG) -> list[TokenStep]:
    file = tmp_path / "s.py"
    file.write_text(f"def say(request): return {returned}")
    tokens = ScriptedTokens(ScriptFunction(f"{file}:say"), chat)
    return [step async for step in tokens.sample("r", [1], law, ASK)]


def ids_of(steps: list[TokenStep]) -> list[int]:
    return [token for step in steps for token in step.ids]


async def test_no_logprobs_and_a_stop_at_the_end(chat: HfChatFormat, tmp_path: Path) -> None:
    steps = await say(chat, tmp_path, "'x ' * 100")
    assert all(step.logprobs is None and step.version == "base/0" for step in steps)
    assert [step.finish for step in steps] == [None] * (len(steps) - 1) + ["stop"]
    assert len(steps) > 1
    assert text_of(chat, ids_of(steps)) == "x " * 100


async def test_raw_ids_are_said_as_they_are(chat: HfChatFormat, tmp_path: Path) -> None:
    odd = [5, 5, 77, 300]
    assert ids_of(await say(chat, tmp_path, f"{{'token_ids': {odd}}}")) == [*odd, min(chat.stop_ids)]


@pytest.mark.parametrize(
    ("returned", "limit"),
    [("'a b c d e f g h'", 3), ("{'content': 'a b c d e f g h', 'length_after_tokens': 3}", 1000)],
)
async def test_an_answer_may_be_cut_off_by_length(
    chat: HfChatFormat, tmp_path: Path, returned: str, limit: int
) -> None:
    steps = await say(chat, tmp_path, returned, Sampling(max_tokens=limit))
    assert len(ids_of(steps)) == 3
    assert steps[-1].finish == "length"


async def test_an_engine_may_fail_in_the_middle(chat: HfChatFormat, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("def say(request): return {'content': 'a b c d e f g h', 'fail_after_tokens': 2}")
    tokens = ScriptedTokens(ScriptFunction(f"{tmp_path}/s.py:say"), chat)
    seen: list[int] = []
    with pytest.raises(EngineFailed, match="failed after 2 tokens"):
        async for step in tokens.sample("r", [1], LONG, ASK):
            seen += step.ids
    assert len(seen) == 2
    assert tokens.load() == (0, 0, 0.0)


async def due_at(ticker: Ticker, count: int, start: float, pace_s: float) -> AsyncIterator[tuple[float, int]]:
    loop = asyncio.get_running_loop()
    async for due in ticker.paced(count, start, pace_s):
        yield loop.time(), due


def test_tokens_come_at_their_pace_and_late_consumers_get_several() -> None:
    """On a loop whose clock is ours: no time passes but by timers."""
    loop = _jumping_loop()

    async def scenario() -> None:
        ticker = Ticker(0.005)
        start = loop.time() + 0.1
        times = [(when - start, due) async for when, due in due_at(ticker, 5, start, 0.02)]
        assert [due for _, due in times] == [1, 2, 3, 4, 5]
        for index, (when, _) in enumerate(times):
            assert 0.02 * index - 1e-6 <= when <= 0.02 * index + 0.0051
        late = loop.time() - 0.05
        assert [due async for due in ticker.paced(4, late, 0.02)] == [3, 4]

    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def test_streams_of_one_tick_share_a_timer() -> None:
    loop = _jumping_loop()

    async def scenario() -> None:
        ticker = Ticker(0.005)
        start = loop.time()

        async def one() -> list[int]:
            return [due async for due in ticker.paced(3, start, 0.02)]

        tasks = [asyncio.create_task(one()) for _ in range(50)]
        await asyncio.sleep(0)
        assert len(ticker._timers) == 1
        assert await asyncio.gather(*tasks) == [[1, 2, 3]] * 50

    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def _jumping_loop() -> asyncio.AbstractEventLoop:
    """A loop on which waiting takes no time: when nothing is ready, its clock jumps to the next timer."""
    loop: Any = asyncio.SelectorEventLoop()
    now = [1000.0]
    select = loop._selector.select

    def jump(timeout: float | None = None) -> Any:
        now[0] += timeout or 0.0
        return select(0)

    loop.time = lambda: now[0]
    loop._selector.select = jump
    return loop  # type: ignore[no-any-return]

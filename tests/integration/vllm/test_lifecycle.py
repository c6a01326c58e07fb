"""Starting, cancelling, refusing and dying."""

from __future__ import annotations

import asyncio
import contextlib

import psutil
import pytest

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest, ConfigError, ContextOverflow, EngineFailed
from steno_worker.engines.vllm.args import from_fields, parse_args
from steno_worker.engines.vllm.engine import VllmTokens
from tests.integration.vllm.drawing import TOOLS, ask, draw
from tests.integration.vllm.model import CONTEXT_TOKENS
from tests.support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

LONG = Sampling(max_tokens=1900, ignore_eos=True)
"""About as long as the context has room: the engine is not to be ready before the test has looked."""


async def test_the_card_says_what_is_served(tokens):
    card = tokens.card()
    assert (card.context_tokens, card.policy_version) == (CONTEXT_TOKENS, "base/0")
    assert {"tools", "reasoning", "logprobs", "grammar", "cancel"} <= set(card.capabilities)
    assert not card.synthetic and not card.text_only


async def test_streaming_is_real(tokens):
    """What is there is given while the engine goes on; a test that comes late to its turn is given several tokens at once."""
    await draw(tokens, ask(tokens, "nice"), Sampling(max_tokens=4))  # the first request is one that compiles
    steps = tokens.sample("stream", ask(tokens, "nice"), LONG, Job())
    given = [len((await anext(steps)).ids) for _ in range(3)]
    assert tokens.load()[0] == 1 and 0 < min(given) < 375
    await steps.aclose()


async def test_closing_the_iterator_frees_the_request(tokens):
    steps = tokens.sample("closed", ask(tokens, "nice"), LONG, Job())
    await anext(steps)
    assert tokens.load()[0] == 1
    await steps.aclose()
    assert tokens.load()[:2] == (0, 0)
    # The engine has forgotten it too: a later step shows a cache with nothing of it in use.
    await draw(tokens, ask(tokens, "today"), Sampling(max_tokens=4))
    await until(lambda: tokens.load() == (0, 0, 0.0))


async def test_cancelling_the_task_frees_the_request(tokens):
    task = asyncio.create_task(draw(tokens, ask(tokens, "nice"), LONG))
    await until(lambda: tokens.load()[0] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tokens.load()[:2] == (0, 0)


async def test_load_counts_what_waits(tokens):
    tasks = [asyncio.create_task(draw(tokens, ask(tokens, "nice"), LONG)) for _ in range(20)]
    await until(lambda: tokens.load()[:2] == (16, 4))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers(tokens):
    with pytest.raises(ContextOverflow) as caught:
        await draw(tokens, [5] * CONTEXT_TOKENS, Sampling(max_tokens=1))
    assert (caught.value.prompt_tokens, caught.value.context_tokens) == (CONTEXT_TOKENS, CONTEXT_TOKENS)
    assert (await draw(tokens, [5] * (CONTEXT_TOKENS - 1), Sampling(max_tokens=1))).steps[-1].finish is not None


async def test_ids_out_of_the_vocabulary_are_refused(tokens):
    with pytest.raises(BadRequest):
        await draw(tokens, [5, 10**6], Sampling(max_tokens=1))


async def test_a_prefix_is_cached_and_reported(tokens):
    prompt = ask(tokens, "a prefix that nobody else has " * 8)
    first = await draw(tokens, prompt, Sampling(max_tokens=4))
    again = await draw(tokens, prompt + first.ids, Sampling(max_tokens=4))
    assert again.steps[0].cached_tokens > first.steps[0].cached_tokens


@pytest.mark.parametrize("argument", ["tool_call_parser", "reasoning_parser"])
async def test_a_wrong_parser_name_lists_the_right_ones(model_dir, argument):
    with pytest.raises(ConfigError, match=r"no parser named 'qwem'.*qwen3") as caught:
        VllmTokens(from_fields({"model": str(model_dir), argument: "qwem"}))
    assert caught.value.field == argument


async def test_wrong_arguments_are_named(model_dir):
    with pytest.raises(ConfigError, match=r"max_num_seq: .*did you mean max_num_seqs"):
        from_fields({"max_num_seq": 4})
    with pytest.raises(ConfigError, match="processed_logprobs"):
        VllmTokens(from_fields({"model": str(model_dir), "logprobs_mode": "raw_logits"}))
    with pytest.raises(ConfigError, match="no/such/model"):
        VllmTokens(from_fields({"model": "/no/such/model"}))
    with pytest.raises(SystemExit):
        parse_args(["--no-such-argument"])


async def test_the_command_line_is_vllms_own(model_dir):
    words = "--tensor-parallel-size 8 --gpu-memory-utilization=0.9 --max-num-seqs 256 --enable-prefix-caching"
    words += " --tool-call-parser hermes --reasoning-parser qwen3 --enable-auto-tool-choice"
    args = parse_args(words.split(), str(model_dir))
    assert args.engine.model == str(model_dir)
    assert (args.engine.tensor_parallel_size, args.engine.max_num_seqs) == (8, 256)
    assert args.engine.gpu_memory_utilization == 0.9 and args.engine.enable_prefix_caching
    assert (args.tool_call_parser, args.engine.reasoning_parser) == ("hermes", "qwen3")


async def test_tools_without_a_parser_can_be_shown_but_not_forced(model_dir):
    tokens = VllmTokens(from_fields({"model": str(model_dir), "dtype": "float32", "max_model_len": 256}))
    assert "tools" not in tokens.card().capabilities
    with pytest.raises(BadRequest, match="--tool-call-parser"):
        tokens.constrains(Job(tools=TOOLS, tool_choice="required"))


async def test_an_engine_that_dies_fails_its_requests_and_says_so(engine_args):
    tokens = VllmTokens(engine_args)
    reasons: list[str] = []
    tokens.on_death = reasons.append
    before = set(psutil.Process().children(recursive=True))
    await tokens.start()
    try:
        mine = [process for process in psutil.Process().children(recursive=True) if process not in before]
        running = [asyncio.create_task(draw(tokens, ask(tokens, "nice"), LONG)) for _ in range(3)]
        await until(lambda: tokens.load()[0] == 3)
        assert tokens.healthy and not reasons
        for process in mine:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 120)
        assert [type(outcome) for outcome in outcomes] == [EngineFailed] * 3
        await until(lambda: bool(reasons))
        assert len(reasons) == 1 and not tokens.healthy
        with pytest.raises(EngineFailed):
            await draw(tokens, ask(tokens, "nice"), LONG)
    finally:
        await tokens.stop()
    assert len(reasons) == 1

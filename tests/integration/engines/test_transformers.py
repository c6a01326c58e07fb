"""The embedded engine as a worker runs it: its thread, its errors, and I1 through the whole of `ChatEngine`."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from steno.contracts.chat import Job, ResponseFormat, Sampling
from steno.contracts.errors import BadRequest, ConfigError, ContextOverflow, EngineFailed
from steno.contracts.records import bytes_to_floats, bytes_to_ids
from steno.contracts.wire.frames import Delta, Finish, Generate, Started
from steno.models import TINY
from steno_cli.demo.task import SYSTEM, TOOL, make_world
from steno_worker.engines.transformers.engine import TransformersEngine, build

TOKENIZER = AutoTokenizer.from_pretrained(TINY)
END = TOKENIZER.eos_token_id


def settings(**changes: Any) -> Any:
    fields = {"model": str(TINY), "policy": "default", "max_streams": 8, "context_tokens": None, "engine_args": []}
    return SimpleNamespace(**fields | changes)


@pytest.fixture
async def engine() -> AsyncIterator[TransformersEngine]:
    one = TransformersEngine(TINY, stop_ids=frozenset({END}), max_streams=4, prefill_tokens=64)
    await one.start()
    yield one
    await one.stop()


def prompt(seed: int) -> list[int]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": make_world(seed).question()}]
    return TOKENIZER.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, return_dict=False)


async def collect(engine: TransformersEngine, seed: int, job: Job | None = None, **law: Any) -> dict[str, Any]:
    got: dict[str, Any] = {"ids": [], "logprobs": [], "versions": [], "constrained": []}
    steps = engine.sample(f"r{seed}", prompt(seed), Sampling(**{"max_tokens": 60, "seed": seed} | law), job or Job())
    async for step in steps:
        got["ids"] += step.ids
        got["logprobs"] += step.logprobs or []
        got["versions"].append(step.version)
        got["constrained"].append(step.constrained)
        got["finish"] = step.finish
    return got


@functools.cache
def plain_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def recomputed(prompt_ids: list[int], ids: list[int], temperature: float = 1.0) -> list[float]:
    with torch.inference_mode():
        logits = plain_model()(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


async def test_concurrent_requests_are_recorded_as_sampled(engine: TransformersEngine) -> None:
    runs = await asyncio.gather(*(collect(engine, seed, temperature=1.0 + seed % 3) for seed in range(10)))
    for seed, run in enumerate(runs):
        assert run["finish"] in ("stop", "length")
        assert run["logprobs"] == pytest.approx(recomputed(prompt(seed), run["ids"], 1.0 + seed % 3), abs=1e-3)
    assert engine.load()[:2] == (0, 0)


async def test_a_cancelled_request_leaves_the_batch_and_the_others_finish(engine: TransformersEngine) -> None:
    other = asyncio.create_task(collect(engine, 2))
    async with aclosing(engine.sample("r", prompt(1), Sampling(max_tokens=5000, ignore_eos=True), Job())) as steps:  # type: ignore[type-var]
        async for _ in steps:
            break
    run = await other
    assert run["finish"] == "stop"
    again = await collect(engine, 3)
    assert again["finish"] == "stop"
    assert engine.healthy


async def test_new_weights_label_every_token_with_what_sampled_it(engine: TransformersEngine) -> None:
    tensors = {name: tensor.clone() for name, tensor in AutoModelForCausalLM.from_pretrained(TINY).state_dict().items()}
    versions: list[str] = []
    law = Sampling(max_tokens=400, ignore_eos=True, seed=1)
    async with aclosing(engine.sample("r", prompt(1), law, Job())) as steps:  # type: ignore[type-var]
        async for step in steps:
            if not versions:
                await engine.load_state_dict("run/1", tensors)
            versions.append(step.version)
    assert versions[0] == "base/0"
    assert versions == sorted(versions)
    assert versions[-1] == "run/1"
    assert engine.card().policy_version == "run/1"
    with pytest.raises(ValueError, match="nope"):
        await engine.load_state_dict("run/2", {"nope": torch.zeros(1)})
    assert engine.card().policy_version == "run/1"


async def test_a_failure_in_the_model_fails_every_request_and_the_health(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("steno_worker.engines.transformers.batch.RunningBatch.step", broken)
    results = await asyncio.gather(collect(engine, 1), collect(engine, 2), return_exceptions=True)
    assert [type(result) for result in results] == [EngineFailed, EngineFailed]
    assert not engine.healthy
    with pytest.raises(EngineFailed, match="out of luck"):
        engine.load()
    with pytest.raises(EngineFailed, match="out of luck"):
        await collect(engine, 3)


async def test_stopping_fails_what_still_runs(engine: TransformersEngine) -> None:
    running = asyncio.create_task(collect(engine, 1, max_tokens=5000, ignore_eos=True))
    await collect(engine, 2)
    await engine.stop()
    with pytest.raises(EngineFailed, match="was stopped"):
        await running
    with pytest.raises(EngineFailed, match="not running"):
        await collect(engine, 3)


@pytest.mark.parametrize(
    ("ids", "law", "error"),
    [
        ([], {}, "empty"),
        ([5, 100000], {}, "outside"),
        ([-1], {}, "outside"),
        ([5], {"logit_bias": {100000: 1.0}}, "logit_bias"),
        ([5], {"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
async def test_requests_that_would_break_the_thread_are_refused(
    engine: TransformersEngine, ids: list[int], law: dict[str, Any], error: str
) -> None:
    with pytest.raises(BadRequest, match=error):
        async for _ in engine.sample("r", ids, Sampling(max_tokens=1, **law), Job()):
            pass
    assert (await collect(engine, 1))["finish"] == "stop"


async def test_a_prompt_beyond_the_context_is_an_overflow() -> None:
    small = TransformersEngine(TINY, stop_ids=frozenset({END}), context_tokens=64)
    await small.start()
    with pytest.raises(ContextOverflow) as refused:
        await collect(small, 1)
    assert (refused.value.prompt_tokens, refused.value.context_tokens) == (len(prompt(1)), 64)
    await small.stop()


async def test_a_schema_is_obeyed_and_marked(engine: TransformersEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"word": {"enum": ["amber", "olive"]}},
        "required": ["word"],
        "additionalProperties": False,
    }
    run = await collect(engine, 1, Job(response_format=ResponseFormat("json_schema", schema=schema)))
    assert json.loads(TOKENIZER.decode(run["ids"][:-1]))["word"] in ("amber", "olive")
    assert run["ids"][-1] == END
    assert all(run["constrained"])
    assert engine.constrains(Job(response_format=ResponseFormat("json_object")))


# -- through ChatEngine, as the relay drives it ---------------------------------------------------------------------------


async def test_a_turn_of_the_demo_comes_out_parsed_and_exact() -> None:
    engine = build(settings())
    await engine.start()
    world = make_world(4)
    job = Job(
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": world.question()}],
        tools=[TOOL],
        top_logprobs=2,
        sampling=Sampling(seed=1),
    )
    events = [event async for event in engine.generate(Generate(1, "00000000000a", 0, "t", job))]
    await engine.stop()
    started, deltas, finish = events[0], events[1:-1], events[-1]
    assert isinstance(started, Started)
    assert isinstance(finish, Finish)
    assert finish.reason == "tool_calls"
    pieces = [delta for delta in deltas if isinstance(delta, Delta)]
    arguments = "".join(piece.arguments for delta in pieces for piece in delta.tool_calls)
    assert json.loads(arguments) == {"path": world.start}
    assert "".join(delta.reasoning for delta in pieces)
    ids = [token for delta in pieces for token in bytes_to_ids(delta.ids)]
    logprobs = [value for delta in pieces for value in bytes_to_floats(delta.logprobs)]
    assert len(ids) == finish.completion_tokens
    assert logprobs == pytest.approx(recomputed(bytes_to_ids(started.new_ids).tolist(), ids), abs=1e-3)
    assert all(len(token.top) <= 2 for delta in pieces for token in delta.tokens)


async def test_a_required_call_is_made_whatever_the_model_would_have_said() -> None:
    engine = build(settings())
    await engine.start()
    job = Job(
        messages=[{"role": "user", "content": "Hello."}],
        tools=[TOOL],
        tool_choice="required",
        sampling=Sampling(seed=1),
    )
    events = [event async for event in engine.generate(Generate(1, "00000000000b", 0, "t", job))]
    await engine.stop()
    assert events[0].constrained
    assert events[-1].reason == "tool_calls"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "/no/such/place"}, "not a directory"),
        ({"engine_args": ["--threats", "1"]}, "threats"),
        ({"context_tokens": 10**9}, "context_tokens"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(settings(**changes))


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    for file in TINY.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="template"):
        build(settings(model=str(tmp_path)))


async def test_weights_that_cannot_be_loaded_are_a_config_error(tmp_path: Path) -> None:
    for file in TINY.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    engine = build(settings(model=str(tmp_path)))
    with pytest.raises(ConfigError, match="can't be loaded"):
        await engine.start()


@pytest.mark.parametrize(
    ("law", "field"),
    [
        ({"temperature": 1e-320}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"min_tokens": 5, "stop_token_ids": list(range(1019))}, None),  # every id would end it, and none may
    ],
)
async def test_a_law_that_can_not_be_followed_ends_its_own_request_only(
    engine: TransformersEngine, law: dict[str, Any], field: str | None
) -> None:
    neighbour = asyncio.create_task(collect(engine, 1, max_tokens=40))
    with pytest.raises(BadRequest) as refused:
        await collect(engine, 2, **law)
    assert refused.value.field == field
    assert (await neighbour)["ids"] and engine.healthy
    assert engine.load()[0] == 0


async def test_a_grammar_that_gives_up_on_the_way_ends_its_own_request_only(engine: TransformersEngine) -> None:
    endless = ResponseFormat("json_schema", schema={"$ref": "#"})
    with pytest.raises(BadRequest, match="grammar") as refused:
        await collect(engine, 1, Job(response_format=endless))
    assert "\n" not in refused.value.message  # llguidance adds its whole state
    assert (await collect(engine, 2, max_tokens=3))["ids"] and engine.healthy

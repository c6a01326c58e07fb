"""Whole turns on the real engine: from messages to frames, and ten turns of one conversation (I1, I2)."""

from __future__ import annotations

import hashlib
import json

import pytest
import pytest_asyncio
import torch
from transformers import Qwen3ForCausalLM

from steno.contracts.chat import Job, Message, ResponseFormat, Sampling
from steno.contracts.errors import BadRequest, ContextOverflow
from steno.contracts.records import bytes_to_floats, bytes_to_ids, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish, Generate, Started
from steno_worker.chat.chat_engine import ChatEngine
from steno_worker.engines.vllm.engine import VllmTokens
from tests.integration.vllm.drawing import NOT_THINKING, STRICT, TOOLS, gathered

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


class Conversation:
    """A client and a record in one: what was said, and the ids that stand for it."""

    def __init__(self, engine: ChatEngine) -> None:
        self._engine = engine
        self.messages: list[Message] = []
        self.ids: list[int] = []
        self.drawn: list[tuple[int, float]] = []  # (position in ids, log-probability) of what was sampled
        self.turns = 0
        self._covered = 0
        self._finish = ""

    async def say(self, *messages: Message, **job: object) -> tuple[Started, list[Delta], Finish]:
        self.messages += messages
        self.turns += 1
        prefix = list(self.ids)
        request = Generate(
            stream=1,
            turn_id=f"{id(self):012x}{self.turns}",
            attempt=0,
            trial_id="t",
            job=Job(messages=list(self.messages), **job),
            prefix_ids=ids_to_bytes(prefix),
            prefix_messages=self._covered,
            prefix_finish=self._finish,
        )
        started, *deltas, finish = [event async for event in self._engine.generate(request)]
        assert isinstance(started, Started) and isinstance(finish, Finish)
        self.ids = prefix[: started.kept_tokens] + bytes_to_ids(started.new_ids).tolist()
        assert len(self.ids) == started.prompt_tokens
        assert hashlib.blake2b(ids_to_bytes(self.ids), digest_size=16).digest() == started.prompt_digest
        self._take(deltas, finish)
        return started, deltas, finish

    def _take(self, deltas: list[Delta], finish: Finish) -> None:
        for delta in deltas:
            ids = bytes_to_ids(delta.ids).tolist()
            self.drawn += enumerate(bytes_to_floats(delta.logprobs).tolist(), len(self.ids))
            self.ids += ids
        calls: dict[int, dict] = {}
        for piece in (piece for delta in deltas for piece in delta.tool_calls):
            call = calls.setdefault(piece.index, {"id": f"call_{self.turns}_{piece.index}", "type": "function"})
            function = call.setdefault("function", {"name": "", "arguments": ""})
            function["name"] += piece.name
            function["arguments"] += piece.arguments
        reply: Message = {"role": "assistant", "content": "".join(delta.content for delta in deltas)}
        if calls:
            reply["tool_calls"] = list(calls.values())
        if thought := "".join(delta.reasoning for delta in deltas):
            reply["reasoning_content"] = thought
        self.messages.append(reply)
        self._covered, self._finish = len(self.messages), finish.reason


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tokens: VllmTokens) -> ChatEngine:
    """The engine under the format, both checked; the session's one engine is not started twice."""
    chat = ChatEngine(_Started(tokens), tokens.format)
    await chat.start()
    return chat


class _Started:
    """A token engine that somebody else starts and stops."""

    def __init__(self, tokens: VllmTokens) -> None:
        self._tokens = tokens

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def __getattr__(self, name: str) -> object:
        return getattr(self._tokens, name)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def forward_logprobs(model: Qwen3ForCausalLM, talk: Conversation) -> list[float]:
    """Of every sampled token of the conversation, in one pass over its ids."""
    with torch.no_grad():
        logits = model(torch.tensor([talk.ids])).logits[0].float()
    at = torch.tensor([position - 1 for position, _ in talk.drawn])
    return gathered(torch.log_softmax(logits[at], -1), [talk.ids[position] for position, _ in talk.drawn])


@pytest.mark.parametrize("options", [{}, NOT_THINKING], ids=["thinking", "not thinking"])
async def test_ten_turns_are_one_path_of_exact_ids_and_logprobs(engine, reference, options):
    talk, cached = Conversation(engine), []
    for turn in range(10):
        before = list(talk.ids)
        reply = talk.messages[-1] if talk.messages else {}
        if reply.get("tool_calls"):
            news = [{"role": "tool", "tool_call_id": call["id"], "content": "nice"} for call in reply["tool_calls"]]
        else:
            news = [user(f"the weather in Paris, turn {turn}")]
        law = Sampling(max_tokens=48 if turn % 3 else 24)
        started, _, finish = await talk.say(*news, tools=TOOLS, template_kwargs=options, sampling=law)
        assert started.refused == "" and started.kept_tokens == len(before)
        assert talk.ids[: len(before)] == before
        assert bytes_to_ids(started.new_ids).tolist() == talk.ids[len(before) : started.prompt_tokens]
        assert finish.completion_tokens == len(talk.ids) - started.prompt_tokens
        cached.append(finish.cached_tokens)
    assert cached == sorted(cached) and cached[-1] > 300
    recorded = [logprob for _, logprob in talk.drawn]
    assert recorded == pytest.approx(forward_logprobs(reference, talk), abs=1e-3)


async def test_forced_calls_and_their_results_are_continued(engine, reference):
    talk = Conversation(engine)
    news = [user("the weather in Paris")]
    for _ in range(4):
        before = list(talk.ids)
        started, deltas, finish = await talk.say(
            *news, tools=STRICT, tool_choice="required", template_kwargs=NOT_THINKING, parallel_tool_calls=False,
            sampling=Sampling(max_tokens=120),
        )  # fmt: skip
        assert started.constrained and not started.resumable and all(delta.constrained for delta in deltas)
        assert talk.ids[: len(before)] == before and started.kept_tokens == len(before)
        (call,) = talk.messages[-1]["tool_calls"]
        assert call["function"]["name"] in ("weather", "forecast")
        assert finish.reason == "tool_calls" and set(json.loads(call["function"]["arguments"])) == {"celsius"}
        news = [{"role": "tool", "tool_call_id": call["id"], "content": "nice"}]


async def test_a_schema_through_a_whole_turn(engine):
    schema = ResponseFormat(type="json_schema", name="r", schema=TOOLS[0]["function"]["parameters"])
    talk = Conversation(engine)
    started, _, finish = await talk.say(user("nice"), response_format=schema, template_kwargs=NOT_THINKING)
    assert started.constrained and finish.reason == "stop"
    assert isinstance(json.loads(talk.messages[-1]["content"])["celsius"], bool)


async def test_a_client_that_asks_for_logprobs_sees_those_on_record(engine):
    talk = Conversation(engine)
    _, deltas, _ = await talk.say(user("nice"), top_logprobs=3, sampling=Sampling(max_tokens=12, ignore_eos=True))
    shown = [token.logprob for delta in deltas for token in delta.tokens]
    hidden = sum(id_ in engine._format.stop_ids for id_ in talk.ids[-12:])
    assert len(shown) == 12 - hidden
    assert set(shown) <= {logprob for _, logprob in talk.drawn}
    assert all(len(token.top) == 3 for delta in deltas for token in delta.tokens)


async def test_completions_of_text_and_of_ids_are_not_rendered(engine, tokens):
    ids = tokens.format.encode("the weather")
    for job in (Job(prompt_text="the weather"), Job(prompt_ids=ids_to_bytes(ids))):
        job = Job(prompt_text=job.prompt_text, prompt_ids=job.prompt_ids, sampling=Sampling(max_tokens=4))
        request = Generate(stream=1, turn_id="0" * 12, attempt=0, trial_id="t", job=job)
        started, *_ = [event async for event in engine.generate(request)]
        assert bytes_to_ids(started.new_ids).tolist() == ids


async def test_what_a_turn_refuses(engine):
    with pytest.raises(ContextOverflow):
        await Conversation(engine).say(user("the weather " * 2000))
    with pytest.raises(BadRequest) as caught:
        await Conversation(engine).say(user("nice"), template_kwargs={"chat_template": "{{ 1 }}"})
    assert "chat_template" in str(caught.value.field)


@pytest.mark.parametrize("text", ["a" * 3_500_000, "the weather " * 300_000])
async def test_what_cannot_fit_is_refused_before_it_is_tokenised(engine, text):
    with pytest.raises(ContextOverflow, match="at least") as refused:
        await Conversation(engine).say(user(text))
    assert refused.value.field == "messages"
    job = Job(prompt_text=text)
    with pytest.raises(ContextOverflow, match="at least") as refused:
        _ = [
            one async for one in engine.generate(Generate(stream=1, turn_id="0" * 12, attempt=0, trial_id="t", job=job))
        ]
    assert refused.value.field == "prompt"


async def test_the_format_is_known_to_be_extendable(engine):
    assert "continuation" in engine.cards()[0].capabilities

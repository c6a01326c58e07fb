"""`ChatEngine`: from a job to its events, over an engine that says what a test tells it to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest, BodyTooLarge, ContextOverflow, EngineFailed, NoWorker, UnsoundOutput
from steno.contracts.records import bytes_to_floats, bytes_to_ids, ids_to_bytes
from steno.contracts.wire.frames import Count, Counted, Delta, Finish, Generate, ModelCard, Started
from steno_worker.chat.chat_engine import ChatEngine
from steno_worker.chat.reader import ONE_CALL
from steno_worker.interfaces import TokenStep, TokenTally
from tests.unit.worker.chat.families import TOOLS, chat_format, encoded, one_by_one

FORMAT = chat_format("qwen3")
STOP = min(FORMAT.stop_ids)
QUESTION = [{"role": "user", "content": "Weather?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def tokens(text: str) -> list[int]:
    return encoded("qwen3", "byte_level", text)


def step(ids: list[int], finish: Any = None, **more: Any) -> TokenStep:
    return TokenStep(ids, more.pop("logprobs", [-0.25 * index for index in range(len(ids))]), "base/0", finish, **more)


class Told:
    """A `TokenEngine` that gives the steps it was told, and remembers what it was asked and whether it was closed."""

    def __init__(self, *steps: TokenStep, context: int = 4096, grammar: bool = False, synthetic: bool = False) -> None:
        self.tally = TokenTally()
        self.steps, self.grammar, self.closed = steps, grammar, False
        self.prompt: list[int] = []
        self.law = Sampling()
        self.refuses = False
        self._card = ModelCard("told", context, synthetic=synthetic, capabilities=["tools"])

    def card(self) -> ModelCard:
        return self._card

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def load(self) -> tuple[int, int, float]:
        return (1, 2, 0.5)

    def constrains(self, job: Job) -> bool:
        return self.grammar

    async def check(self, prompt_ids: list[int], law: Sampling, job: Job) -> None:
        if self.refuses:
            raise BadRequest("not this")

    async def sample(
        self, request_id: str, prompt_ids: list[int], law: Sampling, job: Job, *, trial_id: str = ""
    ) -> AsyncIterator[TokenStep]:
        self.prompt, self.law = prompt_ids, law
        try:
            for one in self.steps:
                yield one
        finally:
            self.closed = True


class Outcome:
    def __init__(self, events: list[Any]) -> None:
        self.started: Started = events[0]
        self.deltas: list[Delta] = events[1:-1]
        self.finish: Finish = events[-1]
        self.content = "".join(delta.content for delta in self.deltas)
        self.reasoning = "".join(delta.reasoning for delta in self.deltas)
        self.pieces = [piece for delta in self.deltas for piece in delta.tool_calls]
        self.arguments = "".join(piece.arguments for piece in self.pieces)
        self.ids = [id_ for delta in self.deltas for id_ in bytes_to_ids(delta.ids)]
        self.logprobs = [value for delta in self.deltas for value in bytes_to_floats(delta.logprobs)]
        assert self.finish.completion_tokens == len(self.ids)


async def run(told: Told, job: Job, attempt: int = 0, **request: Any) -> Outcome:
    engine = ChatEngine(told, FORMAT)
    await engine.start()
    try:
        asked = Generate(7, "0123456789ab", attempt, "t", job, **request)
        return Outcome([event async for event in engine.generate(asked)])
    finally:
        await engine.stop()


def chat(**fields: Any) -> Job:
    return Job(**{"messages": QUESTION, "tools": TOOLS, **fields})


async def test_started_tells_exactly_what_the_engine_was_given() -> None:
    told = Told(step([*tokens("Cold."), STOP], "stop"))
    out = await run(told, chat(sampling=Sampling(max_tokens=10**6)))
    assert told.prompt == FORMAT.render(QUESTION, TOOLS, {})
    raw = ids_to_bytes(told.prompt)
    assert out.started.new_ids == raw and out.started.prompt_tokens == len(told.prompt)
    assert out.started.prompt_digest == hashlib.blake2b(raw, digest_size=16).digest()
    assert out.started.law == told.law and told.law.max_tokens == 4096 - len(told.prompt)
    assert out.started.resumable and not out.started.constrained and not out.started.refused
    assert (out.content, out.finish.reason, out.ids[-1]) == ("Cold.", "stop", STOP)


async def test_what_the_engine_refuses_of_a_request_has_not_begun() -> None:
    """What comes after Started is a turn; a refused request is none."""
    told = Told(step([STOP], "stop"))
    told.refuses = True
    engine = ChatEngine(told, FORMAT)
    await engine.start()
    try:
        with pytest.raises(BadRequest, match="not this"):
            await anext(engine.generate(Generate(7, "0123456789ab", 0, "t", chat())))  # type: ignore[arg-type]
        assert told.prompt == []
    finally:
        await engine.stop()


async def test_a_count_is_what_the_engine_would_be_given_and_it_is_not_asked() -> None:
    told = Told(step([STOP], "stop"))
    engine = ChatEngine(told, FORMAT)
    await engine.start()
    try:
        assert await engine.count(chat()) == len(FORMAT.render(QUESTION, TOOLS, {}))
        assert await engine.count(Job(prompt_text="Hello")) == len(FORMAT.encode("Hello"))
        assert told.prompt == []
    finally:
        await engine.stop()


async def test_a_model_that_is_not_served_here_is_refused() -> None:
    told = Told(step([STOP], "stop"))
    assert (await run(told, chat(), model="told")).ids == [STOP]
    with pytest.raises(NoWorker, match="'told', not 'other'"):
        await run(told, chat(), model="other")


async def test_continuation_sends_only_what_is_new() -> None:
    first = await run(Told(step([*one_by_one("qwen3", "byte_level", "Cold."), STOP], "stop")), chat())
    prefix = first.started.new_ids + ids_to_bytes(first.ids)
    messages = [*QUESTION, {"role": "assistant", "content": "Cold."}, {"role": "user", "content": "And?"}]
    told = Told(step([STOP], "stop"))
    out = await run(told, chat(messages=messages), prefix_ids=prefix, prefix_messages=2, prefix_finish="stop")
    assert out.started.kept_tokens == len(prefix) // 4
    assert ids_to_bytes(told.prompt) == prefix + out.started.new_ids


async def test_one_delta_a_step_with_reasoning_content_and_calls() -> None:
    ids = [*tokens(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"), STOP]
    steps = [step([token_id]) for token_id in ids[:-1]] + [
        step(ids[-1:], "stop", cached_tokens=3, timings={"prefill": 0.1})
    ]
    out = await run(Told(*steps), chat())
    assert len(out.deltas) == len(ids) and out.ids == ids
    assert (out.reasoning, out.content, out.arguments) == ("Hm.", "I look.", '{"city": "Oslo"}')
    assert [piece.name for piece in out.pieces if piece.name] == ["weather"]
    assert (out.finish.reason, out.finish.cached_tokens, out.finish.timings) == ("tool_calls", 3, {"prefill": 0.1})


@given(st.lists(st.integers(1, 60)), st.sampled_from(["three", " two", "e, f", "\n\n", "zzz"]))
async def test_stop_strings_end_text_and_ids_whatever_the_steps(cuts: list[int], stop: str) -> None:
    text = "one, two, three, four\n\nfive"
    ids = tokens(text)
    places = [0, *sorted({cut for cut in cuts if cut < len(ids)}), len(ids)]
    pieces = [ids[start:end] for start, end in pairwise(places)]
    told = Told(*(step(piece, "length" if index == len(pieces) - 1 else None) for index, piece in enumerate(pieces)))
    out = await run(told, chat(sampling=Sampling(stop=[stop])))
    if stop not in text:
        assert (out.content, out.finish.reason, out.ids) == (text, "length", ids)
        return
    assert (out.content, out.finish.reason, out.finish.stop) == (text[: text.index(stop)], "stop", stop)
    sampled = FORMAT.decoder().feed(out.ids, final=True)
    assert stop in sampled and stop not in FORMAT.decoder().feed(out.ids[:-1], final=True)
    assert told.closed
    assert out.logprobs == [-0.25 * index for piece in pieces for index in range(len(piece))][: len(out.ids)], (
        "the first"
    )


async def test_stop_strings_wait_for_min_tokens() -> None:
    ids = tokens("stop and stop and go")
    law = Sampling(stop=["stop"], min_tokens=len(tokens("stop")) + 1)
    out = await run(Told(step(ids, "length")), chat(sampling=law))
    assert out.content == "stop and " and all(delta.constrained for delta in out.deltas)
    law = Sampling(stop=["x"], min_tokens=1)
    assert (await run(Told(step(tokens("x, x"), "length")), chat(sampling=law))).content == "x, ", "not before one more"


async def test_stop_token_ids_show_no_text() -> None:
    ids = tokens("Cold!")
    for law in (Sampling(stop_token_ids=ids[-1:]), Sampling(stop_token_ids=ids[-1:], stop=["never"])):
        out = await run(Told(step(ids, "stop")), chat(sampling=law))
        assert (out.content, out.ids, out.finish.stop) == (FORMAT.decoder().feed(ids[:-1]), ids, str(ids[-1]))


@pytest.mark.parametrize("finish_alone", [False, True])
async def test_text_held_back_comes_out_at_the_end(finish_alone: bool) -> None:
    ids = tokens("almost EN")
    steps = [step(ids), step([], "length")] if finish_alone else [step(ids, "length")]
    assert (await run(Told(*steps), chat(sampling=Sampling(stop=["END"])))).content == "almost EN"
    half = tokens("🚀")[:-1]
    steps = [step(half), step([], "length")] if finish_alone else [step(half, "length")]
    assert "\ufffd" in (await run(Told(*steps), chat())).content


async def test_one_call_only_where_no_grammar_sees_to_it() -> None:
    ids = [*tokens(f"{CALL}\n{CALL}"), STOP]
    job = chat(parallel_tool_calls=False)
    told = Told(step(ids, "stop"))
    out = await run(told, job)
    assert len([piece for piece in out.pieces if piece.name]) == 1 and out.arguments == '{"city": "Oslo"}'
    assert (out.finish.reason, out.finish.stop, out.ids) == ("tool_calls", ONE_CALL, tokens(CALL))
    assert out.logprobs == [-0.25 * index for index in range(len(out.ids))]
    assert told.closed
    out = await run(Told(step(ids, "stop"), grammar=True), job)
    assert len([piece for piece in out.pieces if piece.name]) == 2


async def test_tool_choice_none_makes_calls_content() -> None:
    out = await run(Told(step([*tokens(CALL), STOP], "stop")), chat(tool_choice="none"))
    assert (out.content, out.pieces, out.finish.reason) == (CALL, [], "stop")


async def test_cut_off_call_is_length() -> None:
    out = await run(Told(step(tokens(CALL)[:-4], "length")), chat())
    assert out.finish.reason == "length" and out.pieces


async def test_marks_of_the_law() -> None:
    plain = await run(Told(step([STOP], "stop")), chat())
    assert not plain.deltas[0].constrained
    bent = await run(Told(step([STOP], "stop")), chat(sampling=Sampling(top_p=0.9, presence_penalty=1.0)))
    assert bent.deltas[0].constrained and not bent.started.resumable and not bent.started.constrained
    grammar = await run(Told(step([STOP], "stop", constrained=True), grammar=True), chat())
    assert grammar.deltas[0].constrained and grammar.started.constrained and not grammar.started.resumable


async def test_each_delta_says_whether_older_weights_had_a_part_in_its_cache() -> None:
    steps = [step(tokens("a"), mixed_kv=False), step(tokens("b"), mixed_kv=True), step([STOP], "stop")]
    assert [delta.mixed_kv for delta in (await run(Told(*steps), chat())).deltas] == [False, True, False]


async def test_log_probabilities_for_the_client_only_on_request() -> None:
    ids = tokens("hi")
    top = [[(token_id, -0.5), (STOP, -1.0)] for token_id in [*ids, STOP]]
    steps = step([*ids, STOP], "stop", top=top)
    out = await run(Told(steps), chat(top_logprobs=1))
    seen = [token for delta in out.deltas for token in delta.tokens]
    assert "".join(token.text for token in seen) == out.content == "hi"
    assert seen[0].top == [(*FORMAT.token_text(ids[0]), -0.5)]
    assert [token.logprob for token in seen] == out.logprobs[:-1]
    assert (await run(Told(steps), chat())).deltas[0].tokens == []


@pytest.mark.parametrize("logprobs", [None, [], [math.nan, 0.0]])
async def test_missing_log_probabilities_are_an_error(logprobs: Any) -> None:
    with pytest.raises(EngineFailed):
        await run(Told(step([STOP, STOP], "stop", logprobs=logprobs)), chat())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_log_probability_that_is_no_number_is_the_models_doing_unless_the_law_was_bent(value: float) -> None:
    steps = step([STOP, STOP], "stop", logprobs=[value, 0.0])
    with pytest.raises(UnsoundOutput):
        await run(Told(steps), chat())
    with pytest.raises(EngineFailed) as failed:
        await run(Told(steps), chat(sampling=Sampling(top_p=0.5)))
    assert not isinstance(failed.value, UnsoundOutput)


async def test_synthetic_engines_have_none() -> None:
    out = await run(Told(step([*tokens("hi"), STOP], "stop", logprobs=None), synthetic=True), chat(top_logprobs=2))
    assert out.logprobs == [] and out.content == "hi" and out.deltas[0].tokens == []


async def test_an_engine_that_just_ends_has_failed() -> None:
    with pytest.raises(EngineFailed):
        await run(Told(step(tokens("hi"))), chat())


async def test_context_overflow_has_both_numbers() -> None:
    prompt = len(FORMAT.render(QUESTION, TOOLS, {}))
    with pytest.raises(ContextOverflow) as overflow:
        await run(Told(context=prompt), chat())
    assert (overflow.value.prompt_tokens, overflow.value.context_tokens) == (prompt, prompt)
    assert overflow.value.field == "messages"
    out = await run(Told(step([STOP], "stop"), context=prompt + 1), chat())
    assert out.started.law.max_tokens == 1


async def test_completions_skip_template_and_parser() -> None:
    for job in (Job(prompt_text="Once"), Job(prompt_ids=ids_to_bytes(tokens("Once")))):
        told = Told(step([*tokens(CALL), STOP], "stop"))
        out = await run(told, job)
        assert told.prompt == tokens("Once") and out.content == CALL and out.finish.reason == "stop"
    continued = await run(told, Job(prompt_text="Once"), prefix_ids=ids_to_bytes(tokens("Once")[:1]))
    assert continued.started.kept_tokens == 1


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (Job(prompt_ids=ids_to_bytes([5, FORMAT.vocab_size])), "prompt"),
        (Job(prompt_ids=ids_to_bytes([-1])), "prompt"),
        (Job(prompt_text=""), "prompt"),
        (chat(messages=[{"role": "assistant", "content": "no user"}]), "messages"),
        (chat(sampling=Sampling(max_tokens=0)), "max_tokens"),
    ],
)
async def test_what_cannot_be_honoured_names_its_field(job: Job, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await run(Told(), job)
    assert refused.value.field == field


async def test_the_tokens_of_a_prompt_are_those_that_it_would_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ChatEngine(Told(), FORMAT)
    await engine.start()
    whole = await engine.tokenize(Count(7, chat(), "strings"))
    ids = FORMAT.render(QUESTION, TOOLS, {})
    assert (whole.stream, whole.prompt_tokens, whole.strings) == (7, len(ids), FORMAT.strings(ids))
    assert bytes_to_ids(whole.ids).tolist() == ids and await engine.count(chat()) == len(ids)
    empty = await engine.tokenize(Count(8, Job(prompt_text=""), "ids", bare=True))
    assert empty == Counted(8, 0)
    text = await engine.tokenize(Count(9, Job(prompt_ids=whole.ids), "text"))
    assert (text.prompt_tokens, text.ids, text.text) == (len(ids), b"", FORMAT.decode(ids))
    with pytest.raises(BadRequest, match="can't say 'more'"):
        await engine.tokenize(Count(10, chat(), "more"))
    monkeypatch.setattr("steno_worker.chat.tokens.MAX_ANSWER_BYTES", 100)
    for wants in ("ids", "strings", "text"):
        with pytest.raises(BodyTooLarge, match="the answer would have"):
            await engine.tokenize(Count(11, Job(prompt_ids=whole.ids), wants))
    await engine.stop()


async def test_the_card_says_whether_turns_can_be_continued() -> None:
    engine = ChatEngine(Told(), FORMAT)
    assert engine.cards()[0].capabilities == ["tools", "takeover", "tokenize", "texts"] and engine.load() == (1, 2, 0.5)
    await engine.start()
    assert engine.cards()[0].capabilities == ["tools", "takeover", "tokenize", "texts", "continuation"]
    await engine.stop()


async def test_closing_the_events_cancels_the_engine() -> None:
    told = Told(*(step(tokens("a")) for _ in range(9)))
    engine = ChatEngine(told, FORMAT)
    await engine.start()
    events = engine.generate(Generate(1, "0123456789ab", 0, "t", chat()))
    assert isinstance(await anext(events), Started) and isinstance(await anext(events), Delta)
    await events.aclose()  # type: ignore[attr-defined]
    assert told.closed
    await engine.stop()


async def test_ids_after_the_end_of_a_step_are_told_from_those_that_were_sent() -> None:
    told = Told(step(tokens("almost END and more")))
    out = await run(told, chat(sampling=Sampling(stop=["END"])))
    assert out.content == "almost "
    assert told.tally.unsent == {"after_end": len(told.steps[0].ids) - len(out.ids)} and told.tally.unsent.total() > 0
    silent = Told(TokenStep(tokens("x"), None, "base/0"))
    with pytest.raises(EngineFailed):
        await run(silent, chat())
    assert silent.tally.unsent == {"failed": len(tokens("x"))}


async def test_a_stop_string_is_shown_to_who_asks_and_the_ids_are_the_same() -> None:
    said = step([*tokens("one two three"), STOP], "stop")
    hidden, shown = [
        await run(Told(said), chat(sampling=Sampling(stop=["wo"]), shows_stop=shows)) for shows in (False, True)
    ]
    assert (hidden.content, shown.content) == ("one t", "one two")
    assert hidden.ids == shown.ids and shown.finish.stop == "wo"


@pytest.mark.parametrize("begun", ["It is", "<think>\nLet me"])
async def test_a_final_message_is_continued_after_its_last_character(begun: str) -> None:
    """`continue_final_message`: no header, nothing that closes the message, and thinking goes on where it was."""
    messages = [*QUESTION, {"role": "assistant", "content": begun}]
    told = Told(step([*tokens(" so.</think>cold" if "think" in begun else " cold"), STOP], "stop"))
    job = Job(messages=messages, template_kwargs={"add_generation_prompt": False, "continue_final_message": True})
    out = await run(told, job)
    text = FORMAT._tokenizer.decode(told.prompt)
    assert text.endswith(begun) and text.count("<|im_start|>assistant") == 1
    assert (out.content, out.reasoning) == (("cold", " so.") if "think" in begun else (" cold", ""))
    assert out.started.new_ids == ids_to_bytes(told.prompt) and out.started.resumable


async def test_without_a_generation_prompt_the_prompt_ends_with_the_last_message() -> None:
    told = Told(step([*tokens("x"), STOP], "stop"))
    await run(told, Job(messages=QUESTION, template_kwargs={"add_generation_prompt": False}))
    whole = FORMAT.render(QUESTION, [], {})
    assert told.prompt == whole[: len(told.prompt)] and "assistant" not in FORMAT._tokenizer.decode(told.prompt)


async def test_what_ends_elsewhere_than_after_a_header_is_never_extended() -> None:
    """The stub that new messages are rendered behind ends in a header; so this is rendered whole, and is a branch (I2)."""
    first = await run(Told(step([*tokens("Hm."), STOP], "stop")), Job(messages=QUESTION))
    prefix = first.started.new_ids + ids_to_bytes(first.ids)
    messages = [*QUESTION, {"role": "assistant", "content": "Hm."}, *QUESTION, {"role": "assistant", "content": "So"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    told = Told(step([STOP], "stop"))
    out = await run(told, Job(messages=messages, template_kwargs=options), prefix_ids=prefix, prefix_messages=2)
    assert told.prompt == FORMAT.render(messages, [], options)
    assert out.started.kept_tokens in (0, len(prefix) // 4) and bool(out.started.kept_tokens) is not bool(
        out.started.refused
    )


async def test_the_card_names_what_every_engine_honours_here() -> None:
    engine = ChatEngine(Told(), FORMAT)
    [card] = engine.cards()
    assert {
        "include_stop_str_in_output",
        "skip_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
    } == set(card.fields)

"""Going on with a completion that another worker began: whole, exact and silent about what was said (I9)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from steno.contracts.chat import Job, Sampling, ToolCallPiece
from steno.contracts.records import ids_to_bytes
from steno.contracts.wire.frames import Shown
from steno_worker.chat.replay import law_of_the_rest
from tests.unit.worker.chat.test_job import CALL, STOP, Outcome, Told, chat, run, step, tokens

WHOLE = [*tokens(f"<think>\nLet me see.\n</think>\n\nI look, twice.\n{CALL}\n{CALL}"), STOP]


def shown_after(out: Outcome, count: int) -> Shown:
    """What the first `count` tokens have shown."""
    shown = Shown()
    seen = 0
    for delta in out.deltas:
        seen += len(delta.ids) // 4
        if seen > count:
            break
        shown.reasoning += len(delta.reasoning)
        shown.content += len(delta.content)
        for piece in delta.tool_calls:
            if piece.index == len(shown.calls):
                shown.calls.append(0)
            shown.calls[piece.index] += len(piece.arguments)
    return shown


async def take_over(first: Outcome, count: int, told: Told, job: Job, shown: Shown | None = None) -> Outcome:
    assert not first.started.kept_tokens
    return await run(
        told,
        chat_with(job, first.started.law),
        attempt=1,
        prefix_ids=first.started.new_ids,
        sampled_ids=ids_to_bytes(first.ids[:count]),
        shown=shown if shown is not None else shown_after(first, count),
    )


def chat_with(job: Job, law: Sampling) -> Job:
    return chat(sampling=law, tools=job.tools, parallel_tool_calls=job.parallel_tool_calls)


def calls(pieces: Iterable[ToolCallPiece], begun: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """(name, arguments) of each call, the first of them as they were begun."""
    found = [list(call) for call in begun]
    for piece in pieces:
        if piece.index == len(found):
            found.append([piece.name, ""])
        else:
            assert not piece.name, "a call is told once"
        found[piece.index][1] += piece.arguments
    return [(name, arguments) for name, arguments in found]


async def test_wherever_the_cut_is_both_parts_are_the_whole() -> None:
    first = await whole(chat())
    for count in range(1, len(WHOLE) + 1):
        told = Told(*steps(WHOLE[count:]))
        out = await take_over(first, count, told, chat())
        part = shown_after(first, count)
        assert first.content[: part.content] + out.content == first.content
        assert first.reasoning[: part.reasoning] + out.reasoning == first.reasoning
        all_calls = calls(first.pieces)
        begun = [(name, text[:size]) for (name, text), size in zip(all_calls, part.calls, strict=False)]
        assert calls(out.pieces, begun) == all_calls
        assert out.ids == WHOLE[count:]
        assert out.started.kept_tokens == out.started.prompt_tokens and out.started.new_ids == b""
        assert out.started.prompt_digest == first.started.prompt_digest
        assert out.finish.reason == "tool_calls"
        if count < len(WHOLE):
            assert told.prompt[-count:] == WHOLE[:count]
        else:
            assert told.prompt == [], "it had ended: nothing is sampled"


def steps(ids: list[int]) -> list[Any]:
    return [step([token], "stop" if token == STOP else None) for token in ids]


async def whole(job: Job) -> Outcome:
    return await run(Told(*steps(WHOLE)), job)


@pytest.mark.parametrize("apart", [-6, -1, 1, 6])
async def test_what_was_shown_earlier_or_later_than_by_this_parser_is_shown_once(apart: int) -> None:
    """Another parser may hold back less, or more, of the same text. apart: characters, at each place of a cut."""
    first = await whole(chat())
    for count in range(1, len(WHOLE)):
        shown = shown_after(first, count)
        if not shown.calls:
            shown.content = min(len(first.content), max(0, shown.content + apart))
        out = await take_over(first, count, Told(*steps(WHOLE[count:])), chat(), shown)
        assert first.content[: shown.content] + out.content == first.content


async def test_a_stop_string_is_found_across_the_cut_and_in_what_is_replayed() -> None:
    ids = tokens("one, two, STOP three")
    job = chat(tools=[], sampling=Sampling(stop=["STOP"]))
    first = await run(Told(*[step([token]) for token in ids], step([STOP], "stop")), job)
    assert (first.content, first.finish.stop) == ("one, two, ", "STOP")
    for count in range(1, len(first.ids) + 1):
        told = Told(*[step([token]) for token in ids[count:]], step([STOP], "stop"))
        out = await take_over(first, count, told, job)
        assert first.content[: shown_after(first, count).content] + out.content == "one, two, "
        assert first.ids[:count] + out.ids == first.ids
        assert (out.finish.reason, out.finish.stop) == ("stop", "STOP")
        assert bool(told.prompt) == (count < len(first.ids))


async def test_limits_go_on_where_they_were() -> None:
    ids = tokens("one, two, three, four")
    job = chat(tools=[], sampling=Sampling(max_tokens=len(ids), min_tokens=3, seed=7))
    first = await run(Told(step(ids, "length")), job)
    told = Told(step(ids[2:], "length"))
    out = await take_over(first, 2, told, job, Shown())
    assert (told.law.max_tokens, told.law.min_tokens) == (len(ids) - 2, 1)
    assert told.law.seed not in (None, 7)
    assert out.content == "one, two, three, four" and out.finish.completion_tokens == len(ids) - 2
    assert out.started.law == first.started.law
    out = await take_over(first, len(ids), told := Told(), job, Shown())
    assert (out.finish.reason, out.finish.completion_tokens, told.prompt) == ("length", 0, [])
    assert out.content == "one, two, three, four"


async def test_a_stop_id_before_min_tokens_does_not_end_it() -> None:
    sampled, rest = [*tokens("ab"), STOP], [*tokens("cdefgh"), STOP]
    for least, goes_on in ((0, False), (len(sampled), True)):
        told = Told(step(rest, "stop"))
        request = {
            "prefix_ids": ids_to_bytes(tokens("hi")),
            "sampled_ids": ids_to_bytes(sampled),
            "shown": Shown(0, 2, []),
        }
        out = await run(told, chat(sampling=Sampling(min_tokens=least)), attempt=1, **request)
        assert out.ids == (rest if goes_on else []) and bool(told.prompt) == goes_on


async def test_a_stop_id_that_the_request_named_ends_it() -> None:
    ids = tokens("one, two")
    job = chat(tools=[], sampling=Sampling(stop_token_ids=[ids[-1]]))
    first = await run(Told(step(ids[:-1]), step(ids[-1:], "stop")), job)
    out = await take_over(first, len(ids), told := Told(), job)
    assert (out.finish.reason, out.finish.stop, told.prompt) == ("stop", str(ids[-1]), [])
    assert out.content == ""


@pytest.mark.parametrize("job", [Job(prompt_text="Say"), Job(prompt_ids=ids_to_bytes([5, 6]))])
async def test_a_plain_prompt_is_taken_over_too(job: Job) -> None:
    ids = tokens("one, two")
    first = await run(Told(step(ids), step([STOP], "stop")), job)
    told = Told(step([STOP], "stop"))
    out = await run(
        told, job, attempt=1, prefix_ids=first.started.new_ids, sampled_ids=ids_to_bytes(ids), shown=Shown(content=4)
    )
    assert out.content == "one, two"[4:]
    assert told.prompt == [*told.prompt[: -len(ids)], *ids] and out.started.prompt_digest == first.started.prompt_digest


def test_seeds_differ_by_attempt_and_no_seed_stays_none() -> None:
    law = Sampling(max_tokens=9, seed=1)
    assert len({law_of_the_rest(law, 3, attempt).seed for attempt in range(5)}) == 5
    assert law_of_the_rest(Sampling(), 3, 1) == Sampling()

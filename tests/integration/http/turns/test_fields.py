"""vLLM's fields end to end: ids that are those on record, and a field that the worker does not know."""

from __future__ import annotations

import json
from typing import Any

from steno.contracts.records import bytes_to_ids
from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine

AGAIN = {"x-stainless-retry-count": "1"}


def whole(turns: list[Any], turn: Any) -> list[int]:
    """The ids of a turn's whole prompt, from the record."""
    ids: list[int] = bytes_to_ids(turn.new_prompt_ids).tolist()
    parent = next((one for one in turns if one.turn_id == turn.parent_id), None)
    if parent is None:
        return ids
    return [*whole(turns, parent), *bytes_to_ids(parent.completion_ids), *ids]


async def chunks(proxy: Proxy, body: dict[str, Any], headers: dict[str, str]) -> list[dict[str, Any]]:
    async with proxy.http.stream("POST", "/t/v1/chat/completions", json=body, headers=headers) as response:
        lines = [line[5:] async for line in response.aiter_lines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if "[DONE]" not in line]


async def test_the_ids_that_a_client_asks_for_are_those_on_record_also_when_given_again(proxy: Proxy) -> None:
    """What Harbor, verifiers and SkyRL read."""
    first = (await proxy.chat("t", "hi", return_token_ids=True)).json()
    [turn] = await proxy.turns("t")
    assert first["prompt_token_ids"] == whole([turn], turn)
    assert first["choices"][0]["token_ids"] == bytes_to_ids(turn.completion_ids).tolist()
    body = {
        "messages": [{"role": "user", "content": "hi"}, first["choices"][0]["message"], {"role": "user", "content": "on"}],
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    for headers in ({}, AGAIN):  # the second is answered from the record
        seen = await chunks(proxy, body, headers)
        turns = await proxy.turns("t")
        assert len(turns) == 2 and turns[1].parent_id == turn.turn_id
        assert [chunk.get("prompt_token_ids") for chunk in seen] == [whole(turns, turns[1]), *[None] * (len(seen) - 1)]
        sampled = [token for chunk in seen for token in chunk["choices"][0].get("token_ids") or []]
        assert sampled == bytes_to_ids(turns[1].completion_ids).tolist()


async def test_a_field_that_no_worker_honours_is_refused_by_name_and_nothing_is_sampled(proxy: Proxy) -> None:
    """The card of a worker of the last release names none: it would leave the field out, and sample under another law."""
    for given in ({"allowed_token_ids": [5]}, {"structured_outputs": {"regex": "a+"}}, {"guided_choice": ["a"]}):
        answer = await proxy.chat("t", "hi", **given)
        assert answer.status_code == 400 and "by the served model" in answer.json()["error"]["message"]
    assert (
        not proxy.engine.requests and (await proxy.chat("t", "hi", guided_json={"type": "object"})).status_code == 200
    )


async def test_a_worker_that_honours_them_gets_them_and_the_law_on_record_says_so() -> None:
    fields = ["allowed_token_ids", "bad_words", "structured_outputs.choice"]
    async with running(ParrotEngine(fields=fields)) as proxy:
        await proxy.chat("t", "hi", allowed_token_ids=[5], bad_words=["no"], structured_outputs={"choice": ["a", "b"]})
        [turn], [request] = await proxy.turns("t"), proxy.engine.requests
    assert request.job.response_format.choice == ["a", "b"]
    assert (turn.law["allowed_token_ids"], turn.law["bad_words"]) == ([5], ["no"])
    assert turn.options["response_format"] == {"type": "choice", "choice": ["a", "b"]}
    assert turn.constrained == [(0, 6)]

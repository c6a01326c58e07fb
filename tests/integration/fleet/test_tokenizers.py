"""A fleet of two models, each with a tokenizer of its own: ids of one are never given to the other (I1, I2), and a name means
the model that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from steno.models import TINY
from tests.integration.fleet.fleet import wait_for
from tests.integration.vllm.model import make
from tests.support.programs.stack import Stack, running

TOKENS = {"temperature": 1.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "other")


def worker(model: Path, name: str) -> list[str]:
    return ["--engine", "transformers", "--model", str(model), "--worker-id", name]


def ask(stack: Stack, trial: str, messages: list[dict[str, Any]], model: str = "gpt-5") -> dict[str, Any]:
    answer = httpx.post(
        stack.base_url(trial) + "/chat/completions", json={"model": model, "messages": messages} | TOKENS, timeout=60
    )
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def test_a_conversation_stays_with_its_tokenizer_and_begins_anew_where_there_is_none(
    tmp_path: Path, other: Path
) -> None:
    with running(tmp_path / "logs", worker(TINY, "a")) as stack:
        [a] = stack.workers
        said = [{"role": "user", "content": "Where is the key?"}]
        said += [ask(stack, "t", said), {"role": "user", "content": "Sure?"}]
        b = stack.start_worker(*worker(other, "b"), name="b")
        wait_for(stack, "a", "b")
        for trial in range(6):  # whatever their hashes say: none of these is begun on b and none goes on there
            both = [{"role": "user", "content": "Hello"}]
            both += [ask(stack, f"both-{trial}", both), {"role": "user", "content": "And?"}]
            ask(stack, f"both-{trial}", both)
            first, second = stack.turns(f"both-{trial}")
            assert first["worker_id"] == second["worker_id"] and second["parent_id"] == first["turn_id"]
        a.terminate()
        a.wait(60)
        wait_for(stack, "b")
        said += [ask(stack, "t", said), {"role": "user", "content": "Really?"}]
        stack.start_worker(*worker(TINY, "a"), name="a2")
        wait_for(stack, "a", "b")
        said += [ask(stack, "t", said), {"role": "user", "content": "Well?"}]
        b.terminate()
        b.wait(60)
        stack.workers.remove(b)
        wait_for(stack, "a")
        ask(stack, "t", said)
        turns = stack.turns("t")
    assert [turn["worker_id"] for turn in turns] == ["a", "b", "b", "a"]
    assert [turn["fork_reason"] for turn in turns] == [None, "tokenizer_changed", None, "tokenizer_changed"]
    assert [turn["parent_id"] for turn in turns] == [None, None, turns[1]["turn_id"], None]
    for turn, folder, asked in ((turns[1], other, said[:3]), (turns[3], TINY, said)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.decode(turn["new_prompt_ids"])
        assert len(turn["new_prompt_ids"]) == turn["prompt_tokens"]
        assert all(message["content"] in text for message in asked if message["role"] == "user")


def test_a_models_own_name_means_it_and_any_other_the_default_policy(tmp_path: Path, other: Path) -> None:
    with running(tmp_path / "logs", worker(TINY, "a")) as stack:
        stack.start_worker(*worker(other, "b"), "--policy", "judge", name="b")
        wait_for(stack, "a", "b")
        for trial in range(6):
            hello = [{"role": "user", "content": "Hello"}]
            hello += [ask(stack, f"t{trial}", hello), {"role": "user", "content": "And?"}]
            ask(stack, f"t{trial}", hello, model="other")
            ask(stack, f"t{trial}", hello, model="tiny")
            turns = stack.turns(f"t{trial}")
            assert [(turn["worker_id"], turn["served_model"], turn["policy"]) for turn in turns] == [
                ("a", "tiny", "default"),
                ("b", "other", "judge"),
                ("a", "tiny", "default"),
            ]
            assert [turn["fork_reason"] for turn in turns[:2]] == [None, "tokenizer_changed"]

"""The texts of a tokenizer's tokens: asked of a real worker once, kept, and read and exported when no worker is up."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from steno import Client
from steno.contracts.errors import NotFound, WorkerLost
from steno.contracts.records import bytes_to_ids, tokenizer_key
from steno.contracts.rest import TEXTS_SUFFIX
from steno.contracts.wire.frames import TEXTS, Count, Counted, ModelCard
from steno.models import TINY
from steno_cli.exports.export import export_sessions
from steno_proxy.store.memory.store import MemoryStore
from steno_proxy.store.token_texts import MOST_TOKENIZERS
from steno_proxy.workers import token_texts
from steno_proxy.workers.token_texts import TokenTextsKeeper
from steno_worker.chat import tokens
from tests.support.waiting import until
from tests.support.workers.spoken import kept, spoken


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_texts, "LOOK_S", 0.02)
    monkeypatch.setattr(token_texts, "SLICE_IDS", 500)


async def test_a_record_is_read_with_its_texts_when_no_worker_is_up(tmp_path: Path) -> None:
    async with spoken(tmp_path) as (proxy, worker):
        await proxy.chat("t", "Where is the key?")
        [turn] = await proxy.turns("t", 1)
        await kept(proxy, turn.tokenizer)
        worker.stop()
        worker.stop()
        await until(lambda: not proxy.app.state.hub.cards())
        texts = await proxy.steno.token_texts(turn.tokenizer)
        plain = await proxy.http.get(f"/workers/tokenizers/{turn.tokenizer}", headers={"accept-encoding": "identity"})
        assert plain.json() == texts.model_dump() and "content-encoding" not in plain.headers
        ids = bytes_to_ids(turn.new_prompt_ids).tolist() + bytes_to_ids(turn.completion_ids).tolist()
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        assert len(texts.texts) == len(tokenizer)
        assert as_bytes([texts.texts[one] for one in ids]).decode() == tokenizer.decode(ids)
        assert "naïve 😀 words" in tokenizer.decode(ids)
        assert any(texts.texts[one].startswith("<0x") for one in ids), "bytes of the emoji are tokens of their own"
        special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        assert set(texts.special) == special and "<|im_start|>" in {texts.texts[one] for one in special}
        with pytest.raises(NotFound):
            await proxy.steno.token_texts("0" * 16)
        refused = await proxy.http.get("/workers/tokenizers/..%2F..")
        assert refused.status_code in (404, 422, 400)


def as_bytes(texts: list[str]) -> bytes:
    """What texts stand for: `<0xE2>` is a byte."""
    return re.sub(rb"<0x([0-9A-F]{2})>", lambda byte: bytes.fromhex(byte[1].decode()), "".join(texts).encode())


@pytest.mark.parametrize("name", ["turns.jsonl", "turns.parquet"])
async def test_turns_are_exported_with_a_file_of_texts_beside(tmp_path: Path, name: str) -> None:
    async with spoken(tmp_path) as (proxy, _):
        await proxy.chat("t", "Where is the key?")
        [turn] = await proxy.turns("t", 1)
        await kept(proxy, turn.tokenizer)

        def export() -> int:
            with Client(proxy.url) as client:
                return export_sessions(client, ["t"], tmp_path / name)

        assert await asyncio.to_thread(export) == 1
        texts = await proxy.steno.token_texts(turn.tokenizer)
    [line] = (tmp_path / (name + TEXTS_SUFFIX)).read_text().splitlines()
    assert json.loads(line) == texts.model_dump()


class Speaker:
    """A worker as far as it is asked about texts. says: what it answers, of the ids that it was asked about."""

    eligible = True

    def __init__(self, says: Any, digest: str = "d", vocabulary_size: int = 700) -> None:
        self.says, self.asked = says, 0
        card = {"name": "m", "context_tokens": 10, "tokenizer_digest": digest, "capabilities": [TEXTS]}
        self.models = [msgspec.convert(card | {"vocabulary_size": vocabulary_size}, ModelCard)]

    async def count(self, asked: Count) -> Counted:
        self.asked += 1
        said: Counted = await self.says(bytes_to_ids(asked.job.prompt_ids or b"").tolist())
        return said


def saying(texts: Callable[[list[int]], list[bytes]], special: bytes = b"") -> Any:
    async def says(ids: list[int]) -> Counted:
        return Counted(1, len(ids), special, texts=texts(ids))

    return says


async def lost(ids: list[int]) -> Counted:
    raise WorkerLost("the worker is lost")


async def silent(ids: list[int]) -> Counted:
    return await asyncio.get_running_loop().create_future()


def true(ids: list[int]) -> list[bytes]:
    return [b"x"] * len(ids)


LIES = {
    "lost": lost,
    "silent": silent,
    "too few": saying(lambda ids: true(ids)[1:]),
    "too many": saying(lambda ids: [*true(ids), b"x"]),
    "special ids of its own": saying(true, b"\xff\xff\xff\x7f"),
    "special ids that are none": saying(true, b"\x00\x00\x00"),
    "too long": saying(lambda ids: [b"x" * 100_000] * len(ids)),
    "one too long": saying(lambda ids: [*true(ids)[1:], b"\xff" * 4097]),
    "too much in all": saying(lambda ids: [b"x" * 4096] * len(ids)),
}


@pytest.mark.parametrize("lie", LIES)
async def test_what_can_not_be_is_not_kept_and_asked_again_later_and_later(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_texts, "ANSWER_S", 0.05)
    monkeypatch.setattr(token_texts, "LOOK_S", 2.0)
    monkeypatch.setattr(token_texts, "MOST_BYTES", 1 << 20)
    store, worker, sound, now = MemoryStore().token_texts, Speaker(LIES[lie]), Speaker(saying(true), "e"), [0.0]
    keeper = TokenTextsKeeper(store, lambda: [worker, sound], lambda: now[0])  # type: ignore[list-item]
    at = []
    while now[0] < 3 * token_texts.AGAIN_S:
        before = worker.asked
        await keeper.look()
        if worker.asked > before:
            at.append(now[0])
        now[0] += 2.0
    assert at[:4] == [0.0, 8.0, 40.0, 168.0] and len(at) <= 9
    assert not await store.touch(key_of(worker)) and await store.touch(key_of(sound))
    worker.says = saying(true)
    now[0] += token_texts.AGAIN_S
    await keeper.look()
    assert await store.touch(key_of(worker))


def key_of(worker: Speaker) -> str:
    return tokenizer_key(worker.models[0].tokenizer_digest).hex()


async def test_a_vocabulary_that_is_too_large_is_not_asked_for() -> None:
    worker = Speaker(saying(true), vocabulary_size=token_texts.MOST_IDS + 1)
    await TokenTextsKeeper(MemoryStore().token_texts, lambda: [worker]).look()  # type: ignore[list-item]
    assert worker.asked == 0


async def test_what_another_replica_has_asked_is_not_asked_again_until_it_is_gone() -> None:
    store, now = MemoryStore().token_texts, [0.0]
    first, second = Speaker(saying(true)), Speaker(saying(true))
    await TokenTextsKeeper(store, lambda: [first]).look()  # type: ignore[list-item]
    keeper = TokenTextsKeeper(store, lambda: [second], lambda: now[0])  # type: ignore[list-item]
    await keeper.look()
    assert (first.asked, second.asked) == (2, 0)
    for number in range(MOST_TOKENIZERS):
        await store.keep(f"{number}", b"t")
    await keeper.look()
    assert second.asked == 0
    now[0] += token_texts.AGAIN_S
    await keeper.look()
    assert second.asked == 2 and await store.touch(key_of(second))


async def test_one_process_asks_about_so_many_tokenizers_in_an_hour() -> None:
    store, now = MemoryStore().token_texts, [0.0]
    workers = [Speaker(saying(true), f"d{number}") for number in range(token_texts.MOST_LOOKED_AT + 9)]
    keeper = TokenTextsKeeper(store, lambda: workers, lambda: now[0])  # type: ignore[arg-type,return-value]
    for _ in range(3):
        await keeper.look()
    assert sum(worker.asked > 0 for worker in workers) == token_texts.MOST_LOOKED_AT


async def test_bytes_that_are_no_text_are_named() -> None:
    store = MemoryStore().token_texts
    said = [b"\xff\xfe", "naïve".encode(), " 😀".encode()[:3], b"\xed\xa0\x80", b"<0x41>", b""]
    worker = Speaker(saying(lambda ids: said), vocabulary_size=len(said))
    await TokenTextsKeeper(store, lambda: [worker]).look()  # type: ignore[list-item]
    piece = await store.get(key_of(worker))
    assert piece is not None
    texts = json.loads(gzip.decompress(piece))["texts"]
    assert texts == ["<0xFF><0xFE>", "naïve", " <0xF0><0x9F>", "<0xED><0xA0><0x80>", "<0x41>", ""]


async def test_a_worker_that_lies_goes_on_with_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = tokens.tokenized, []

    def lying(count: Count, *rest: Any) -> Counted:
        counted = real(count, *rest)
        if count.wants == TEXTS:
            asked.append(count.stream)
            counted.texts = [b"\xff" * 4000] * (len(counted.texts) + 1)
        return counted

    monkeypatch.setattr("steno_worker.chat.chat_engine.tokenized", lying)
    async with spoken(tmp_path) as (proxy, _):
        for times in range(1, 4):
            answer = await proxy.chat(f"t{times}", "Where is the key?")
            assert answer.status_code == 200, answer.text
            await until(partial(seen, asked, times))
        [turn] = await proxy.turns("t3", 1)
        assert turn.finish_reason == "stop" and not await proxy.store.token_texts.touch(turn.tokenizer)


def seen(asked: list[int], times: int) -> bool:
    return len(asked) >= times

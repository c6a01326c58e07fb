"""Tokens as texts: of a worker that is gone, of a file without a proxy; ids where nobody has said any."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from steno.contracts.errors import ConfigError
from steno.contracts.records import Session, floats_to_bytes, ids_to_bytes
from steno_cli.recorded.texts_file import TextsFile
from steno_proxy.workers import token_texts
from tests.integration.http.conftest import Proxy
from tests.integration.viewer.conftest import looking
from tests.integration.viewer.test_file import steno
from tests.support.records.shown_sessions import long_session, made_turn, record
from tests.support.waiting import until
from tests.support.workers.spoken import kept, spoken

pytestmark = pytest.mark.viewer

SAYS = "naïve 😀 words\n<b>bold</b>"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_tokens_are_shown_as_texts_when_no_worker_and_no_proxy_is_up(
    scheme: str, tmp_path: Path, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_texts, "LOOK_S", 0.02)
    file = tmp_path / "turns.parquet"
    async with spoken(tmp_path, SAYS) as (proxy, worker):
        await proxy.chat("t", "Where is the key?")
        [turn] = await proxy.turns("t", 1)
        await kept(proxy, turn.tokenizer)
        worker.stop()
        worker.stop()
        await until(lambda: not proxy.app.state.hub.cards())
        async with looking(browser, proxy.url, scheme) as looker:
            shown = await strip(looker)
            await looker.shot(f"token-texts-{scheme}")
            said = await looker.page.locator(".done .tok").all_text_contents()
            ids = turn.to_numpy().completion_ids.tolist()
            assert len(said) == len(ids)
            line = "".join(said)
            assert "na<0xC3><0xAF>ve <0xF0><0x9F><0x98><0x80> words↵\n<b>bold</b>" in line, (
                "bytes of a character are tokens"
            )
            assert await looker.page.locator(".done .tok.special").all_text_contents() == ["<|im_end|>"]
            assert "<|im_start|>" in await looker.page.locator(".fresh .tok.special").all_text_contents()
            await looker.page.locator(".done .tok.special").hover()
            detail = await looker.page.text_content(".token-detail")
            assert f"id {ids[-1]}" in detail and 'special "<|im_end|>"' in detail and "worker" in detail
            await looker.page.locator(".done .tok", has_text="↵").first.hover()
            assert "\\n" in await looker.page.text_content(".token-detail")
            assert await looker.faults() == []
            await looker.page.select_option("text=Tokens as", "ids")
            cells = looker.page.locator(".done .tok.id")
            await cells.first.wait_for()
            assert await cells.all_text_contents() == [str(one) for one in ids]
            assert looker.troubles == []
        export = await steno("sessions", "export", "t", "-o", str(file), "--proxy", proxy.url)
        assert await export.wait() == 0, (await export.communicate())[1]
    page = await steno("ui", str(file), "--no-open")
    try:
        assert page.stdout is not None
        address = (await asyncio.wait_for(page.stdout.readline(), 60)).decode().strip()
        async with looking(browser, address.removesuffix("/ui/"), scheme) as looker:
            assert await strip(looker) == shown
            assert looker.troubles == []
    finally:
        page.terminate()
        await page.wait()


async def strip(looker: Any) -> list[str]:
    await looker.go("sessions/t?tab=tokens", ".done .tok:not(.id)")
    found: list[str] = await looker.page.locator(".strip .tok").all_text_contents()
    return found


async def test_texts_that_a_worker_made_up_do_nothing(proxy: Proxy, browser: Any) -> None:
    texts = [
        "<img src=x onerror=alert(1)>",
        "\u202eturned\u200b",
        "a" * 1_000_000,
        "\x1b[31m",
        "\ud7ff\U0010ffff",
        "",
        "\r\n\t",
    ]
    piece = {"tokenizer": "ab" * 8, "texts": texts, "special": [1, 99, -1]}
    await proxy.store.token_texts.keep("ab" * 8, gzip.compress(json.dumps(piece).encode()))
    ids = ids_to_bytes([*range(len(texts)), 7, 2**31 - 1])
    logprobs = floats_to_bytes([-0.5] * (len(ids) // 4))
    made = made_turn(
        1, 0, None, time.time(), tokenizer="ab" * 8, completion_ids=ids, sampling_logprobs=logprobs, versions=[]
    )
    await record(proxy.store, Session(trial_id="hostile", created_at=1.0, updated_at=1.0), [made])
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions/hostile?tab=tokens", ".done .tok:not(.id)")
        cells = looker.page.locator(".done .tok")
        shown = await cells.all_text_contents()
        assert shown[:2] == [texts[0], "U+202EturnedU+200B"] and shown[2] == "a" * 64 + "…"
        assert shown[3:] == ["U+001B[31m", "U+D7FFU+10FFFF", "5", "U+000D↵\n⇥\t", "7", str(2**31 - 1)]
        for cell in await cells.all():
            await cell.hover()
        await cells.nth(2).hover()
        assert len(await looker.page.text_content(".token-detail")) < 1000
        assert await looker.page.locator("main img").count() == 0 and looker.troubles == []


async def test_ids_are_shown_where_nobody_has_said_texts(proxy: Proxy, browser: Any) -> None:
    await long_session(proxy.store, "long", turns=2, tokens=64)
    async with looking(browser, proxy.url) as looker:
        await looker.go("sessions/long?tab=tokens", ".done .tok")
        assert await looker.page.locator(".tok:not(.id):not(.key *)").count() == 0
        assert await looker.page.locator("text=Tokens as").count() == 0 and looker.troubles == []


def test_a_file_of_texts_that_is_something_else_is_refused_in_words(tmp_path: Path) -> None:
    beside = tmp_path / "t.jsonl.tokenizers.jsonl"
    for wrong in (b'{"tokenizer": 1}\n', b"\xff\xfe\n", b"[" * 100_000):
        beside.write_bytes(b'{"tokenizer": "ab", "texts": ["x"], "special": []}\n' + wrong)
        with pytest.raises(ConfigError, match=r"t\.jsonl\.tokenizers\.jsonl, line 2: no texts of tokens"):
            TextsFile(tmp_path / "t.jsonl")

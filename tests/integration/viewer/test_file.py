"""`steno ui FILE`: the same page over what was exported, without a proxy; and `steno ui` of a proxy."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.http.conftest import Proxy
from tests.integration.viewer.conftest import looking

pytestmark = pytest.mark.viewer


async def steno(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "steno", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


@pytest.mark.parametrize("name", ["turns.jsonl", "turns.parquet"])
async def test_exported_turns_are_shown_as_they_were_recorded(
    name: str, proxy: Proxy, browser: Any, tmp_path: Path
) -> None:
    file = tmp_path / name
    export = await steno("sessions", "export", "--run", "fix-the-parser", "-o", str(file), "--proxy", proxy.url)
    assert await export.wait() == 0, (await export.communicate())[1]
    shown = await steno("ui", str(file), "--no-open")
    try:
        assert shown.stdout is not None
        address = (await asyncio.wait_for(shown.stdout.readline(), 60)).decode().strip()
        url = address.removesuffix("/ui/")
        async with looking(browser, url) as looker:
            await looker.go("sessions", "table.rows tbody tr")
            assert await looker.page.locator("table.rows tbody tr").count() == 24
            await looker.go("sessions/parser-05.0", "section.turn")
            of_file = await looker.page.locator(".conversation").text_content()
            await looker.go("sessions/parser-05.0?tab=tokens", ".done .tok")
            assert await looker.page.locator("option[value=reason]").count() == 0, "the file says no group's purpose"
            await looker.page.locator(".done .tok").first.hover()
            told = await looker.page.text_content(".token-detail")
            assert "logprob" in told and "ledger" not in told
            await looker.go("sessions/parser-05.3", ".pill.aborted")
            assert looker.troubles == []
        async with looking(browser, proxy.url) as looker:
            await looker.go("sessions/parser-05.0", "section.turn")
            assert of_file and await looker.page.locator(".conversation").text_content() == of_file
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            assert (await client.get("/sessions", headers={"host": "evil.example"})).status_code == 403
            assert (await client.get("/sessions", headers={"sec-fetch-site": "cross-site"})).status_code == 403
            turns = (await client.get("/sessions/parser-05.0/turns?limit=1000")).json()["items"]
            recorded = (await proxy.http.get("/sessions/parser-05.0/turns?limit=1000")).json()["items"]
            assert [turn["completion_ids"] for turn in turns] == [turn["completion_ids"] for turn in recorded]
            assert [turn["reply"] for turn in turns] == [turn["reply"] for turn in recorded]
    finally:
        shown.terminate()
        await shown.wait()


async def test_what_is_no_file_of_turns_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "no.jsonl").write_text('{"trial_id": "t"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "no.parquet").write_text("no")
    for name, word in (
        ("no.jsonl", "row 1"),
        ("empty.jsonl", "no turn"),
        ("no.parquet", "no.parquet"),
        ("none.jsonl", "no such file"),
    ):
        ended = await steno("ui", str(tmp_path / name), "--no-open")
        _, said = await ended.communicate()
        assert ended.returncode == 2 and word in said.decode() and "Traceback" not in said.decode(), said


async def test_a_port_that_is_taken_is_said_in_a_line(tmp_path: Path) -> None:
    turn = {"trial_id": "t", "index": 0, "timings": {"queued": 1.0}, "completion_ids": [1], "new_prompt_ids": [1]}
    (tmp_path / "turns.jsonl").write_text(json.dumps(turn))
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ended = await steno("ui", str(tmp_path / "turns.jsonl"), "--no-open", "--port", str(taken))
        _, said = await asyncio.wait_for(ended.communicate(), 60)
    why = f"error: --port: can't listen on 127.0.0.1:{taken}: the address is in use already\n"
    assert (ended.returncode, said.decode()) == (1, why)


async def test_the_page_of_a_proxy_is_named(proxy: Proxy) -> None:
    ended = await steno("ui", "--no-open", "--proxy", proxy.url)
    said, _ = await ended.communicate()
    assert (ended.returncode, said.decode().strip()) == (0, f"{proxy.url}/ui/")

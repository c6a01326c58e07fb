"""What was left out of requests is seen on their session: by REST, by the client, and in what `steno sessions show` prints."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from rich.console import Console

from steno_cli.terminal.tree import headline
from tests.integration.http.conftest import Proxy

SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
BASH: Any = {"type": "bash_20250124", "name": "bash"}


async def test_dropped_tools_are_counted_on_the_session(proxy: Proxy) -> None:
    async with anthropic.AsyncAnthropic(base_url=f"{proxy.url}/t", api_key="none", max_retries=0) as client:
        for _ in range(5):
            await client.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}], tools=[SEARCH, BASH]
            )
    [tool] = proxy.engine.requests[0].job.tools
    assert tool["function"]["name"] == "bash" and tool["function"]["parameters"]["properties"]["command"]
    async with asyncio.timeout(60):
        while not (session := await proxy.steno.session("t")).notes or session.notes.counts.get("dropped", 0) < 5:
            await asyncio.sleep(0.05)
    [note] = session.notes.newest
    assert (note.kind, note.text, note.times) == ("dropped", "web_search_20250305", 5)
    console = Console(record=True, width=100)
    console.print(headline(session))
    assert "dropped (5 times): web_search_20250305" in console.export_text()

"""The same requests through the official SDKs, unmodified. A call takes the request's body and returns the answer's body as
the SDK parsed it, so that the SDK's own work is checked.

The SDKs of OpenAI and Anthropic repeat a request by themselves, and mark the retry. Google's would not mark it, and is told not
to repeat.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import httpx
import httpx2
import openai
from google import genai
from google.genai import errors, types

RETRIES = 8
BROKEN = (
    openai.APIError, anthropic.APIError, errors.APIError, httpx.HTTPError, httpx2.HTTPError, aiohttp.ClientError, RuntimeError,
    ValueError,
)  # fmt: skip
"""What the SDKs raise where no whole answer came. RuntimeError: OpenAI's, of a stream without its last event; ValueError:
Google's, of a chunk that was cut."""


@dataclass(frozen=True)
class Ask:
    """url: the trial's. model: the name to ask for. silence_s: seconds without a byte after which the SDK gives up. on_retry:
    called for each request that the SDK marks as a retry."""

    url: str
    body: dict[str, Any]
    model: str
    silence_s: float
    on_retry: Callable[[], None]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    async def look(self, request: httpx.Request | httpx2.Request) -> None:
        """Before a request leaves."""
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            self.on_retry()

    def without(self, *names: str) -> dict[str, Any]:
        return {name: value for name, value in self.body.items() if name not in names}


def status_of(error: Exception) -> int | None:
    """None: it was no answer with a status."""
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else None


async def _chat(ask: Ask) -> Any:
    async with _openai(ask) as client:
        return (await client.chat.completions.create(**ask.without("stream"))).model_dump(
            mode="json", exclude_none=True
        )


async def _responses(ask: Ask) -> Any:
    async with _openai(ask) as client:
        if not ask.streams:
            return (await client.responses.create(**ask.without("stream"))).model_dump(mode="json", exclude_unset=True)
        async with client.responses.stream(**ask.without("stream")) as events:
            found = (await events.get_final_response()).model_dump(mode="json", exclude_unset=True)
    for item in found["output"]:
        for part in (item, *(item.get("content") or ())):
            part.pop("parsed", None)  # the SDK's own
            part.pop("parsed_arguments", None)
    return found


async def _messages(ask: Ask) -> Any:
    http = anthropic.DefaultAsyncHttpxClient(event_hooks={"request": [ask.look]})
    async with anthropic.AsyncAnthropic(
        api_key="none", base_url=ask.url, max_retries=RETRIES, timeout=ask.silence_s, http_client=http
    ) as client:
        if not ask.streams:
            return (await client.messages.create(**ask.without("stream"))).model_dump(mode="json", exclude_none=True)
        async with client.messages.stream(**ask.without("stream")) as events:
            return (await events.get_final_message()).model_dump(mode="json", exclude_none=True)


async def _gemini(ask: Ask) -> Any:
    at = types.HttpOptions(
        base_url=ask.url, timeout=int(2000 * ask.silence_s), retry_options=types.HttpRetryOptions(attempts=1)
    )
    config = types.GenerateContentConfig(
        tools=[types.Tool.model_validate(tool) for tool in ask.body["tools"]],
        system_instruction=ask.body.get("systemInstruction", {"parts": []})["parts"] or None,
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    contents: Any = [types.Content.model_validate(content) for content in ask.body["contents"]]
    client = genai.Client(api_key="none", http_options=at)
    try:
        found = await client.aio.models.generate_content(model=ask.model, contents=contents, config=config)
    finally:
        await client.aio.aclose()
    return found.model_dump(mode="json", by_alias=True, exclude_none=True)


def _openai(ask: Ask) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [ask.look]})
    return openai.AsyncOpenAI(
        api_key="none", base_url=ask.url + "/v1", max_retries=RETRIES, timeout=ask.silence_s, http_client=http
    )


SDKS: dict[str, Callable[[Ask], Awaitable[Any]]] = {
    "chat": _chat, "messages": _messages, "responses": _responses, "gemini": _gemini,
}  # fmt: skip

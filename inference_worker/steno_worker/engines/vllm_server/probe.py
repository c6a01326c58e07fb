"""Whether a vLLM server can serve exact records: it is asked once, at start, by a handful of requests of one or two tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from steno.contracts.errors import BadRequest, ConfigError, EngineFailed, StenoError
from steno_worker.engines.vllm_server.format import ServerFormat
from steno_worker.engines.vllm_server.http import VllmServer
from steno_worker.engines.vllm_server.wire import CHAT, PROMPT

_MESSAGES = [{"role": "user", "content": "ok"}]
_SURE = -1e-3
"""A most likely token above this (natural log) is no evidence: temperature hardly moves it."""
_SAME = 1e-4


class InexactServer(StenoError):
    """The server does not give what an exact record needs; the message says what."""

    code = "config_error"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """context_tokens: prompt + completion at most. processed_logprobs: log-probabilities are of the distribution that is drawn
    from, after temperature; otherwise before it."""

    context_tokens: int
    processed_logprobs: bool


async def probe(server: VllmServer, model: str, format: ServerFormat) -> ServerFacts:
    """Find out whether the server gives what an exact record needs. Raises: InexactServer; ConfigError: no such model;
    EngineFailed: the server can't be reached."""
    context = await _context_tokens(server, model)
    try:
        rendered = await server.post("/tokenize", {"model": model, "messages": _MESSAGES, "return_token_strs": True})
        ids = rendered["tokens"]
        if not rendered["token_strs"] or not ids:
            raise InexactServer("its /tokenize gives no token strings")
        # Two ids more than the messages have, so that a server which renders the messages instead is found out.
        await _echoes(server, model, [*ids, *ids[-2:]])
        return ServerFacts(context, await _is_processed(server, model, ids))
    except (BadRequest, EngineFailed, KeyError, TypeError, IndexError) as error:
        what = error.message if isinstance(error, StenoError) else f"an answer without {error}"
        raise InexactServer(f"it does not accept token ids: {what}") from error


async def _context_tokens(server: VllmServer, model: str) -> int:
    served = (await server.get("/v1/models")).get("data") or []
    for found in served:
        if found.get("id") == model:
            return int(found.get("max_model_len") or 0) or _unknown(model)
    names = ", ".join(str(found.get("id")) for found in served) or "none"
    raise ConfigError(f"model: the server does not serve {model!r}; it serves {names}", field="model")


def _unknown(model: str) -> int:
    raise InexactServer(f"it gives no max_model_len for {model}: not a vLLM server")


async def _echoes(server: VllmServer, model: str, ids: list[int]) -> None:
    """A chat request is sampled from the ids that it carries, and comes with ids and log-probabilities."""
    body = {
        "model": model, "messages": _MESSAGES, "kv_transfer_params": {"prompt_token_ids": ids}, "max_tokens": 1,
        "return_token_ids": True, "logprobs": True, "top_logprobs": 0,
    }  # fmt: skip
    answer = await server.post(CHAT, body)
    if answer.get("prompt_token_ids") != ids:
        raise InexactServer("it renders chats itself and ignores the ids that they carry (vLLM before 0.32?)")
    choice = answer["choices"][0]
    if len(choice["token_ids"]) != 1 or choice["logprobs"]["content"][0]["logprob"] is None:
        raise InexactServer("it gives no ids or no log-probabilities of what it samples")


async def _is_processed(server: VllmServer, model: str, ids: list[int]) -> bool:
    """Whether temperature moves the log-probability of the likeliest token."""
    likeliest: list[float] = []
    for temperature in (1.0, 0.5):
        body: dict[str, Any] = {
            "model": model, "prompt": ids, "max_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": 0, "logprobs": 1,
        }  # fmt: skip
        answer = await server.post(PROMPT, body)
        likeliest.append(max(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()))
    plain, sharp = likeliest
    return plain < _SURE and abs(plain - sharp) > _SAME

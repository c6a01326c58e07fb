"""What is sent to a vLLM server, and what its events become. Pure: values in, values out.

Every sampling field is said, since the server's defaults are its model's generation config. The reader keeps I1: as many
log-probabilities as ids, and the prompt that was given, or an EngineFailed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from steno.contracts.chat import FinishReason, Job, Sampling, TokenLogprob, ToolCallPiece
from steno.contracts.errors import EngineFailed
from steno.contracts.records import floats_to_bytes, ids_to_bytes
from steno.contracts.wire.frames import Delta, Finish
from steno_worker.chat.hermes import HermesParser
from steno_worker.engines.vllm_server.format import in_vllm_words
from steno_worker.interfaces import ended_by_engine

FIELDS = ["allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens"]
"""Of `ModelCard.fields`: what every vLLM takes that gives token ids. `structured_outputs` came later, and a server that does
not know it would leave it out in silence."""
CHAT, PROMPT = "/v1/chat/completions", "/v1/completions"
MISSING = -9999.0
"""vLLM writes this, or nothing, where it has no log-probability: JSON has no minus infinity."""


def constrains(job: Job) -> bool:
    """Whether the job asks for a grammar. Whether the server puts one on by itself is asked at start (`find_grammar`)."""
    if job.response_format.type != "text":
        return True
    if not job.tools or job.tool_choice == "none":
        return False
    strict = any(tool["function"].get("strict") for tool in job.tools)
    return strict or job.tool_choice != "auto" or not job.parallel_tool_calls


def body_of(job: Job, model: str, prompt_ids: list[int], law: Sampling, stop_ids: Collection[int]) -> dict[str, Any]:
    """The request's body. `law.max_tokens` is set."""
    body: dict[str, Any] = {
        "model": model, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "n": 1,
        "temperature": law.temperature, "top_p": law.top_p, "top_k": max(law.top_k, 0), "min_p": law.min_p,
        "presence_penalty": law.presence_penalty, "frequency_penalty": law.frequency_penalty,
        "repetition_penalty": law.repetition_penalty, "min_tokens": law.min_tokens, "max_tokens": law.max_tokens,
        "seed": law.seed, "stop": law.stop, "ignore_eos": law.ignore_eos,
        "stop_token_ids": [*law.stop_token_ids, *(() if law.ignore_eos else sorted(stop_ids))],
        "logit_bias": {str(token): bias for token, bias in law.logit_bias.items()} or None,
        # Unsaid, a server with --watermark-config draws by a key, and its log-probabilities are of what it did not draw from.
        "watermarking": False,
    }  # fmt: skip
    body |= {name: value for name, value in _not_everyones(job, law).items() if value}
    if job.shows_special:
        body["skip_special_tokens"] = False
    if not job.messages:
        return body | {"prompt": prompt_ids, "logprobs": job.top_logprobs or 0}
    # The prompt's ids stand for the messages. Some parsers number calls through the conversation, and look for earlier ones.
    has_calls = any(message.get("tool_calls") for message in job.messages)
    body |= {
        "messages": [in_vllm_words(message) for message in (job.messages if has_calls else job.messages[-1:])],
        "kv_transfer_params": {"prompt_token_ids": prompt_ids},
        "logprobs": True,
        "top_logprobs": job.top_logprobs or 0,
    }
    if job.template_kwargs:
        body["chat_template_kwargs"] = job.template_kwargs  # parsers look at enable_thinking
    if job.tools:
        body |= {
            "tools": job.tools,
            "tool_choice": _choice(job.tool_choice),
            "parallel_tool_calls": job.parallel_tool_calls,
        }
    wanted = job.response_format
    if wanted.type == "json_schema":
        schema = {"name": wanted.name or "reply", "schema": wanted.schema, "strict": wanted.strict}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted.type != "text":
        body["response_format"] = {"type": wanted.type}
    return body


def _not_everyones(job: Job, law: Sampling) -> dict[str, Any]:
    return {
        "allowed_token_ids": law.allowed_token_ids,
        "bad_words": law.bad_words,
        "include_stop_str_in_output": job.shows_stop,
    }


def _choice(choice: str) -> Any:
    if choice.startswith("function:"):
        return {"type": "function", "function": {"name": choice.removeprefix("function:")}}
    return choice


class AnswerReader:
    """Events of one answer -> deltas.

    The server's reasoning parser looks at the whole prompt, and where thinking of earlier turns is kept in it, it may believe
    that reasoning has ended. So content that begins with `<think>` is parted here again.

    Attributes: has_begun: the server has said which prompt it uses, and it is the one that was given.
    """

    def __init__(
        self, stream: int, prompt_ids: list[int], version: str, *, is_chat: bool, constrained: bool, job: Job,
        grammar: bool = False,
    ) -> None:  # fmt: skip
        self.has_begun = False
        self._stream = stream
        self._prompt_ids = prompt_ids
        self._version = version
        self._constrained = constrained
        self._grammar = grammar
        self._wants_tokens = job.top_logprobs is not None
        self._splitter = HermesParser(tools=False) if is_chat else None
        self._sampled = 0
        self._cached_tokens = 0
        self._reason: FinishReason | None = None
        self._stop = ""

    def read(self, event: Mapping[str, Any]) -> Delta | None:
        """Raises: EngineFailed: the event contradicts what was asked for (I1)."""
        if usage := event.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self._cached_tokens = cached if type(cached) is int else 0
        choices = event.get("choices")
        if not choices:
            return None
        choice = choices[0]
        self._check_prompt(event.get("prompt_token_ids") or choice.get("prompt_token_ids"))
        delta = self._delta(choice)
        if finish := choice.get("finish_reason"):
            self._end(finish, choice.get("stop_reason"))
        return delta

    def rest(self) -> Delta | None:
        """Text that was held back, at the end."""
        if self._splitter is None:
            return None
        parsed = self._splitter.feed("", final=True)
        if not parsed.content and not parsed.reasoning:
            return None
        return Delta(self._stream, b"", b"", self._version, parsed.content, parsed.reasoning)

    def finish(self) -> Finish:
        """Raises: EngineFailed: the server did not say how it ended."""
        if self._reason is None:
            raise EngineFailed("the vLLM server ended a completion without a finish reason")
        return Finish(self._stream, self._reason, self._sampled, self._stop, self._cached_tokens)

    def _check_prompt(self, used: list[int] | None) -> None:
        if used is None:
            if not self.has_begun:
                raise EngineFailed("the vLLM server gave no prompt ids")
            return
        if used != self._prompt_ids:
            raise EngineFailed(
                f"the vLLM server used a different prompt, of {len(used)} tokens; it was sent one of {len(self._prompt_ids)}"
            )
        self.has_begun = True

    def _delta(self, choice: Mapping[str, Any]) -> Delta | None:
        ids = choice.get("token_ids") or []
        said = Delta(self._stream, ids_to_bytes(ids), b"", self._version, constrained=self._constrained and bool(ids))
        if self._splitter is None:
            said.content = _text(choice.get("text"))
            tokens = _prompt_logprobs(choice.get("logprobs"))
        else:
            delta = choice.get("delta") or {}
            said.reasoning = _text(delta.get("reasoning"))
            said.tool_calls = [_call(piece) for piece in delta.get("tool_calls") or ()]
            # Text that is held back came before the call.
            parsed = self._splitter.feed(_text(delta.get("content")), final=bool(said.tool_calls))
            said.content, said.reasoning = parsed.content, said.reasoning + parsed.reasoning
            tokens = _chat_logprobs(choice.get("logprobs"))
        if ids:
            if len(tokens) != len(ids) or not all(token.logprob > MISSING for token in tokens):
                raise EngineFailed("the vLLM server gave tokens without log-probabilities")
            said.logprobs = floats_to_bytes([token.logprob for token in tokens])
            self._sampled += len(ids)
            if self._wants_tokens:
                said.tokens = tokens
        return said if ids or said.content or said.reasoning or said.tool_calls else None

    def _end(self, reason: str, stop: Any) -> None:
        if reason not in ("stop", "length", "tool_calls"):
            raise ended_by_engine(reason, grammar=self._grammar)
        self._reason = reason  # type: ignore[assignment]
        self._stop = stop if isinstance(stop, str) else ""


def _text(said: Any) -> str:
    if not isinstance(said, str | None):
        raise EngineFailed(f"the vLLM server gave {type(said).__name__}, expected text")
    return said or ""


def _call(piece: Mapping[str, Any]) -> ToolCallPiece:
    function = piece.get("function") or {}
    index = piece.get("index") or 0
    said = (function.get("arguments") or "", piece.get("id") or "", function.get("name") or "")
    if type(index) is not int or not all(isinstance(word, str) for word in said):
        raise EngineFailed(f"the vLLM server gave an unexpected tool call: index {str(index)[:40]!r}")
    return ToolCallPiece(index, *said)


def _chat_logprobs(given: Mapping[str, Any] | None) -> list[TokenLogprob]:
    tokens = []
    for token in (given or {}).get("content") or ():
        others = [(other["token"], _raw(other), other["logprob"]) for other in token.get("top_logprobs") or ()]
        logprob = token.get("logprob")
        tokens.append(TokenLogprob(token["token"], _raw(token), MISSING if logprob is None else logprob, others))
    return tokens


def _raw(token: Mapping[str, Any]) -> bytes:
    given = token.get("bytes")
    return bytes(given) if given is not None else str(token["token"]).encode()


def _prompt_logprobs(given: Mapping[str, Any] | None) -> list[TokenLogprob]:
    """Of plain completions: parallel lists, alternatives by their text."""
    if not given:
        return []
    tokens = []
    tops = given.get("top_logprobs") or [None] * len(given["tokens"])
    for text, logprob, top in zip(given["tokens"], given["token_logprobs"], tops, strict=True):
        others = [(other, other.encode(), value) for other, value in (top or {}).items()]
        tokens.append(TokenLogprob(text, text.encode(), MISSING if logprob is None else logprob, others))
    return tokens

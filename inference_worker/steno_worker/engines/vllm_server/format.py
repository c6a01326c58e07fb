"""A chat format that lives on a vLLM server: prompts are rendered there, by `/tokenize`, in the model's own template.

Enough to continue a conversation by its new messages alone (I2). Text is never made of sampled ids here: the server decodes and
parses them. The strings of rendered tokens serve to find places in a prompt, and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from steno.contracts.chat import THINKS, Message, Tool
from steno.contracts.errors import BadRequest, EngineFailed
from steno_worker.chat.check import called
from steno_worker.chat.fold import readable_calls
from steno_worker.chat.interfaces import Decoder
from steno_worker.engines.vllm_server.http import VllmServer
from steno_worker.engines.vllm_server.limits import MAX_BAD_WORD_TOKENS, forms_of, tokens_of, too_many_bad_word_tokens
from steno_worker.engines.vllm_server.waits import Waits

T = TypeVar("T")
REFUSED_OPTIONS = frozenset(
    {"chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "tools", "messages"}
)
"""Template options that mean something to the renderer itself: `chat_template` would run the agent's own (I8)."""
MAX_CLOSERS = 24
"""Candidates that are tried, one request of a few tokens each."""
_PROBE = "The 3 quick brown foxes; def f(x):\n\treturn {'é': x ** 2}  # \u4f60\u597d, \U0001f98a"
"""Words, digits, code, white space, other scripts: two tokenizers that cut all of it alike are the same, of one model name."""
_SAID = "ok?"
_ASKED: Message = {"role": "user", "content": _SAID}
TOKENIZE_S = 30.0
"""How long the server may take to tokenise or render one text: all prompts of an upstream wait in one line."""


class ServerFormat:
    """A `Renderer`. Its methods wait for the server: to be called from a thread, not from the event loop `loop`.

    Attributes: stop_ids: empty until `find_stop_ids`. waits: lets the event loop end what a thread waits for here.
    """

    def __init__(self, server: VllmServer, model: str, loop: asyncio.AbstractEventLoop) -> None:
        self.stop_ids: frozenset[int] = frozenset()
        self.waits = Waits(loop)
        self._server = server
        self._model = model
        self._strings: dict[int, str] = {}

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: dict[str, Any]) -> list[int]:
        for key in options:
            if key in REFUSED_OPTIONS:
                raise BadRequest(f"template option {key!r} can't be set", field=f"chat_template_kwargs.{key}")
        body: dict[str, Any] = {
            "messages": [in_vllm_words(message) for message in messages],
            "add_generation_prompt": True,
        }
        if tools:
            body["tools"] = list(tools)
        if options:
            body["chat_template_kwargs"] = options
        return self._tokenize(body)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Plain text -> ids. special: with what the tokenizer adds (BOS)."""
        return self._tokenize({"prompt": text, "add_special_tokens": special})

    def strings(self, ids: Sequence[int]) -> list[str]:
        """Of ids that the server has rendered or encoded."""
        return [self._strings.get(token, "") for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        answer = self._wait(self._post("/detokenize", {"tokens": list(ids)}))
        return str(answer["prompt"])

    async def check_bad_words(self, words: Sequence[str]) -> None:
        """In the event loop. Raises: BadRequest: as vLLM counts them, they are more tokens than its engine takes."""
        count = 0
        for word in dict.fromkeys(words):
            forms = [await self._ids_of(form) for form in forms_of(word)]
            count += tokens_of(*forms)
        if count > MAX_BAD_WORD_TOKENS:
            raise BadRequest(too_many_bad_word_tokens(count), field="bad_words")

    def digest(self) -> str:
        """Of what continuing a conversation depends on and can be seen from outside, 32 hex digits: for
        `ModelCard.tokenizer_digest`. Not of what a template writes before the first words: some write the date there."""
        seen = [self._model, sorted(self.stop_ids), self.encode(_PROBE), self._rendered_from(_ASKED, _SAID)]
        return hashlib.blake2b(json.dumps(seen).encode(), digest_size=16).hexdigest()

    def decoder(self) -> Decoder:
        return _Strings(self._strings, self.stop_ids)

    def find_stop_ids(self) -> None:
        """Learn what ends a reply: the ids that the template writes after one and at which the engine stops; it is asked.

        Where it stops at none of them, the first is made one (a base model's end of text is not its template's).
        """
        nonce, after = secrets.token_hex(8), secrets.token_hex(8)
        user, said = {"role": "user", "content": "ok"}, {"role": "assistant", "content": nonce}
        candidates = self._between([user, said, {"role": "user", "content": after}], nonce, after)
        first = candidates[:1]
        try:
            candidates += self._between([user, *called(nonce[:9], after)], "value", after)
        except BadRequest:  # a template without tools
            first = candidates[:1]
        found = {token for token in dict.fromkeys(candidates[:MAX_CLOSERS]) if self._wait(self._stops_at(token))}
        self.stop_ids = frozenset(found or first)

    def find_grammar(self, *, strict: bool = False) -> bool | None:
        """Whether the server puts a grammar on a request just because it has tools (GLM's parser does, and --tool-strict-level).

        It tries what no grammar allows: each id that may open a call is forced, three times in a row.
        Args: strict: with a tool that asks for a grammar. Returns: None: the server takes no tools.
        """
        options: dict[str, Any] = dict.fromkeys(THINKS, False)  # a grammar waits for the end of reasoning
        try:
            opening = self._between([_ASKED, *called("abcdefghi")], "ok?", "probe")
        except BadRequest:
            return None
        prompt = self.render([_ASKED], [_probe_tool(strict)], options)
        for token in dict.fromkeys(opening[:MAX_CLOSERS]):
            try:
                if not self._wait(self._passes(token, prompt, strict, options)):
                    return True
            except BadRequest:
                return None
        return False

    async def _passes(self, token: int, prompt: list[int], strict: bool, options: dict[str, Any]) -> bool:
        body = {
            "model": self._model, "messages": [_ASKED], "kv_transfer_params": {"prompt_token_ids": prompt}, "max_tokens": 3,
            "temperature": 0, "logit_bias": {str(token): 100}, "return_token_ids": True, "tools": [_probe_tool(strict)],
            "tool_choice": "auto", "chat_template_kwargs": options,
        }  # fmt: skip
        ids = (await self._server.post("/v1/chat/completions", body))["choices"][0]["token_ids"]
        return all(sampled == token for sampled in ids)

    def _between(self, messages: Sequence[Message], start: str, end: str) -> list[int]:
        """The ids from the end of `start` to the beginning of `end`."""
        ids = self.render(messages, [], {})
        text, ends = self._text_of(ids)
        begin, last = text.find(start), text.rfind(end)
        if begin < 0 or last < begin:
            return []
        return [token for token, at in zip(ids, ends, strict=True) if begin + len(start) < at <= last]

    def _rendered_from(self, message: Message, words: str) -> list[int]:
        """The ids of this message's prompt, from the last place of `words` on; all of them where it has no such place."""
        ids = self.render([message], [], {})
        text, ends = self._text_of(ids)
        begin = text.rfind(words)
        return [token for token, at in zip(ids, ends, strict=True) if at > begin]

    def _text_of(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The strings of rendered ids, joined, and where each of them ends in that."""
        text, ends = "", []
        for token in ids:
            text += self._strings.get(token, "")
            ends.append(len(text))
        return text, ends

    async def _stops_at(self, token: int) -> bool:
        body = {
            "model": self._model, "prompt": [token], "max_tokens": 2, "temperature": 0, "logit_bias": {str(token): 100},
            "return_token_ids": True,
        }  # fmt: skip
        choice = (await self._server.post("/v1/completions", body))["choices"][0]
        return bool(choice["finish_reason"] == "stop" and choice["token_ids"] == [token])

    def _tokenize(self, body: dict[str, Any]) -> list[int]:
        answer = self._wait(self._post("/tokenize", {"return_token_strs": True, **body}))
        ids: list[int] = answer["tokens"]
        self._strings.update(zip(ids, (str(text) for text in answer["token_strs"]), strict=True))
        return ids

    async def _ids_of(self, text: str) -> list[int]:
        answer = await self._post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return list(answer["tokens"])

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Raises: EngineFailed: the server takes longer than TOKENIZE_S; StenoError."""
        try:
            async with asyncio.timeout(TOKENIZE_S):
                return await self._server.post(path, {"model": self._model, **body})
        except TimeoutError as error:
            raise EngineFailed(f"the vLLM server did not answer {path} within {TOKENIZE_S:g} s") from error

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.waits.result_of(work)


def _probe_tool(strict: bool) -> Tool:
    schema = {
        "type": "object",
        "properties": {"key": {"type": "string"}},
        "required": ["key"],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": "probe", "description": "", "parameters": schema, "strict": strict},
    }


class _Strings:
    """A `Decoder` in the tokenizer's own alphabet, where letters and digits are themselves: nonces can be found in it."""

    def __init__(self, strings: dict[int, str], stop_ids: frozenset[int]) -> None:
        self._strings = strings
        self._stop_ids = stop_ids

    def feed(self, ids: Sequence[int], *, final: bool = False) -> str:
        return "".join(self._strings.get(token, "") for token in ids if token not in self._stop_ids)


def in_vllm_words(message: Message) -> Message:
    """vLLM reads `reasoning`, and gives templates both names; it reads the arguments of calls, too."""
    copied = {key: value for key, value in message.items() if key != "reasoning_content"}
    if "reasoning_content" in message:
        copied["reasoning"] = message["reasoning_content"]
    if message.get("tool_calls"):
        copied["tool_calls"] = readable_calls(message["tool_calls"])
    return copied

"""A `ChatFormat` over a transformers tokenizer: its chat template, its vocabulary, the built-in tool format.

Does not sample and does not fold roles. Strings are tokenised once, with the tokenizer's own special tokens read as such and none
added: the template has written them all.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from steno.contracts.chat import OPEN_END, Job, Message, Tool
from steno.contracts.errors import BadRequest, ConfigError
from steno_worker.chat.decode import ByteDecoder, TokenBytes
from steno_worker.chat.fewest import FewestTokens
from steno_worker.chat.hermes import THINK, THINK_END, HermesParser
from steno_worker.chat.interfaces import Decoder, Parser, check_template_options

_TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a template raises on messages that it was not written for."""


class HfChatFormat:
    """The chat format of one model, by its Hugging Face tokenizer and template.

    Args:
        tokenizer: a fast one, with a chat template.
        stop_ids: those of the model's generation config. The tokenizer's end of sequence is added, and, if none of them
            closes a reply in the template, the special token that does.
        context_tokens: of the model. What can't be fewer tokens is refused before it is tokenised, which takes seconds for
            megabytes and holds up all other prompts; None: nothing is.
    Raises: ConfigError: no fast tokenizer, no template, or a vocabulary that can't be streamed.
    """

    def __init__(
        self, tokenizer: Any, *, name: str = "", stop_ids: Iterable[int] = (), context_tokens: int | None = None
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(f"tokenizer: {type(tokenizer).__name__} is not a fast tokenizer (no tokenizer.json)")
        if not tokenizer.chat_template:
            raise ConfigError(
                "tokenizer: the model has no chat template: take an instruct model, or add chat_template.jinja to its folder"
            )
        self.name = name or tokenizer.name_or_path
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # some files ask for it; a prompt is what was asked, or refused
        self._backend.no_padding()
        self._bytes = TokenBytes(self._backend)
        self._fewest = FewestTokens(self._backend, self._bytes)
        self._context_tokens = context_tokens
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._arguments_as_text = not self._prints_json_arguments()
        self._empty_is_none = not self._prints_calls("") and self._prints_calls(None)
        stops = set(stop_ids)
        if tokenizer.eos_token_id is not None:
            stops.add(tokenizer.eos_token_id)
        self.stop_ids: frozenset[int] = frozenset(stops | self._closer(stops))

    @classmethod
    def load(cls, model_dir: str | Path, *, context_tokens: int | None = None) -> HfChatFormat:
        """From a model's directory (or a hub name); reads tokenizer, template and generation config, no weights."""
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        try:
            eos = GenerationConfig.from_pretrained(model_dir).eos_token_id
        except OSError:  # the file is optional
            eos = None
        stops = eos if isinstance(eos, list) else [] if eos is None else [eos]
        return cls(tokenizer, name=Path(model_dir).name, stop_ids=stops, context_tokens=context_tokens)

    @property
    def digest(self) -> str:
        """Of vocabulary and template, 32 hex digits: for `ModelCard.tokenizer_digest`."""
        whole = self._backend.to_str() + json.dumps(self._tokenizer.chat_template)
        return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: dict[str, Any]) -> list[int]:
        check_template_options(options, PreTrainedTokenizerFast.apply_chat_template)
        if self._context_tokens is not None:
            self._fewest.check_messages(messages, self._context_tokens)
        try:
            text = self._template([self._plain(message) for message in messages], list(tools) or None, **options)
        except _TEMPLATE_FAILURES as refusal:
            raise BadRequest(
                f"the model's chat template refuses these messages: {refusal}", field="messages"
            ) from refusal
        return self._ids(text, "messages")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self._ids(text, "prompt", add_special_tokens=special)

    def strings(self, ids: Sequence[int]) -> list[str]:
        return [self._backend.id_to_token(token_id) or "" for token_id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        raw = self._bytes[token_id]
        return raw.decode("utf-8", "replace"), raw

    def decoder(self) -> Decoder:
        return ByteDecoder(self._bytes, self.stop_ids)

    def parser(self, job: Job, generation_prompt_ids: Sequence[int]) -> Parser:
        prompt = b"".join(self._bytes[token_id] for token_id in generation_prompt_ids)
        thinking = prompt.rfind(THINK.encode()) > prompt.rfind(THINK_END.encode())
        return HermesParser(tools=bool(job.tools) and job.tool_choice != "none", thinking=thinking)

    def _ids(self, text: str, field: str, *, add_special_tokens: bool = False) -> list[int]:
        """Raises: ContextOverflow: `text` can't be as few tokens as fit."""
        if self._context_tokens is not None:
            self._fewest.check(text, self._context_tokens, field)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _template(self, messages: list[Message], tools: list[Any] | None, **options: Any) -> str:
        options = {OPEN_END: True, **options}
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        assert isinstance(text, str)
        return text

    def _plain(self, message: Message) -> Message:
        """Contents as one string (parts on a line each); arguments as objects where they are one and the template takes one;
        no content beside calls as None where the template would otherwise leave out the calls (DeepSeek R1)."""
        plain = dict(message)
        if not isinstance(plain["content"], str):
            plain["content"] = "\n".join(part["text"] for part in plain["content"])
        if plain.get("tool_calls") and not self._arguments_as_text:
            plain["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": _object_or_text(call["function"]["arguments"])}}
                for call in plain["tool_calls"]
            ]
        if plain.get("tool_calls") and not plain["content"] and self._empty_is_none:
            plain["content"] = None
        return plain

    def _prints_json_arguments(self) -> bool:
        """Whether the template takes arguments as an object. Some join them to strings: that fails, or prints Python."""
        function = {"name": "probe", "arguments": {"flag": True}}
        calls = [{"id": "abcdefghi", "type": "function", "function": function}]
        asked = {"role": "user", "content": "ok"}
        try:
            text = self._template([asked, {"role": "assistant", "content": "", "tool_calls": calls}], None)
        except _TEMPLATE_FAILURES:
            return False
        return "{'flag': True}" not in text

    def _prints_calls(self, content: str | None) -> bool:
        """Whether the template renders calls beside this content."""
        name = f"t{secrets.token_hex(4)}"
        function = {"name": name, "arguments": "{}" if self._arguments_as_text else {}}
        calls = [{"id": "abcdefghi", "type": "function", "function": function}]
        reply: Message = {"role": "assistant", "content": content, "tool_calls": calls}
        try:
            return name in self._template([{"role": "user", "content": "ok"}, reply], None)
        except _TEMPLATE_FAILURES:
            return False

    def _closer(self, stops: set[int]) -> set[int]:
        """The special token that ends a reply in the template, if none of `stops` does (a base model's end of text, say)."""
        nonce, after = secrets.token_hex(8), secrets.token_hex(8)
        turns = [("user", "ok"), ("assistant", nonce), ("user", after)]
        try:
            text = self._template([{"role": role, "content": words} for role, words in turns], None)
        except _TEMPLATE_FAILURES:
            return set()
        between = text[text.rfind(nonce) + len(nonce) : text.rfind(after)]
        ids = self._backend.encode(between, add_special_tokens=False).ids
        if stops & set(ids):
            return set()
        special = {id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special}
        return set([id_ for id_ in ids if id_ in special][:1])


def _object_or_text(arguments: str) -> Any:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments

"""One model's chat format as vLLM has it: its renderer, its tool and reasoning parsers, the grammars they switch on.

Prompts are rendered and replies parsed by the very code that `vllm serve` runs, without HTTP. Nothing here samples.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase
from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.parser import Parser
from vllm.renderers import ChatParams, TokenizeParams, renderer_from_config
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.mistral import is_mistral_tokenizer

from steno.contracts.chat import CONTINUES, OPEN_END, Job, Message, Tool
from steno.contracts.errors import BadRequest, ConfigError
from steno_worker.chat.decode import ByteDecoder
from steno_worker.chat.fewest import FewestTokens
from steno_worker.chat.fold import readable_calls
from steno_worker.chat.interfaces import END_OF_PROMPT, Decoder, check_template_options
from steno_worker.chat.interfaces import Parser as ParserSeam
from steno_worker.engines.grammars import check_format, check_tools
from steno_worker.engines.vllm.args import EngineArgs
from steno_worker.engines.vllm.chat_decode import SlowDecoder, token_bytes
from steno_worker.engines.vllm.chat_parser import PlainParser, VllmParser, parser_class

_JOBS_REMEMBERED = 64
"""How many jobs' grammars are cached. One start of a generation asks for its job's three times; fewer jobs start at once."""

_TOKENIZE = TokenizeParams(max_total_tokens=None, add_special_tokens=False)
"""The template writes the special tokens; the length is checked against the context later, with the numbers at hand."""


@dataclass(frozen=True, slots=True)
class VllmGrammar:
    """What constrains a job. `reasoning_kwargs`: for the engine's own reasoning parser, which frees what comes before
    `</think>`. from_start: the grammar itself allows for reasoning, so that it applies from the first token."""

    outputs: StructuredOutputsParams
    reasoning_kwargs: dict[str, Any] | None
    from_start: bool


class VllmFormat:
    """A `ChatFormat` over vLLM's renderer and parsers."""

    def __init__(self, config: VllmConfig, args: EngineArgs) -> None:
        """Raises: ConfigError: the parsers and the tokenizer don't go together."""
        self.name = config.model_config.model
        self._model_config = config.model_config
        self._args = args
        self._renderer = renderer_from_config(config)
        self._tokenizer = self._renderer.get_tokenizer()
        self._parser_class = parser_class(config, args, self._tokenizer)
        self._grammars: OrderedDict[int, tuple[Job, VllmGrammar | None]] = OrderedDict()
        self._bytes = token_bytes(self._tokenizer)
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        marked = [token_id for token_id, token in added.items() if token.special]
        self.special_ids = frozenset([*marked, *self._tokenizer.all_special_ids])
        self._fewest = FewestTokens(self._tokenizer.backend_tokenizer, self._bytes) if self._bytes is not None else None
        self.vocab_size: int = config.model_config.get_vocab_size()
        ends = config.model_config.try_get_generation_config().get("eos_token_id") or []
        own = self._renderer.get_eos_token_id()
        stops = {ends} if isinstance(ends, int) else set(ends)
        stops |= set() if own is None else {own}
        self.stop_ids = frozenset(stops | self._closer(stops))
        if self._always_adjusts:
            self._check_mistral_grammars()

    @property
    def has_tools(self) -> bool:
        return self._parser_class is not None and self._parser_class.tool_parser_cls is not None

    @property
    def has_reasoning(self) -> bool:
        return self._parser_class is not None and self._parser_class.reasoning_parser_cls is not None

    @property
    def is_tekken(self) -> bool:
        return bool(is_mistral_tokenizer(self._tokenizer) and self._tokenizer.is_tekken)

    @cached_property
    def digest(self) -> str:
        """Of vocabulary and template, 32 hex digits: for `ModelCard.tokenizer_digest`."""
        template = self._args.chat_template or getattr(self._tokenizer, "chat_template", None)
        whole = json.dumps([sorted(self._tokenizer.get_vocab().items()), template])
        return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()

    # -- text to ids and back

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: dict[str, Any]) -> list[int]:
        check_template_options(options, PreTrainedTokenizerBase.apply_chat_template)
        kwargs = {
            **self._template_kwargs(options),
            "add_generation_prompt": options.get(OPEN_END, True),
            "continue_final_message": options.get(CONTINUES, False),
            "tools": list(tools) or None,
            "tokenize": is_mistral_tokenizer(self._tokenizer),
        }
        params = ChatParams(self._args.chat_template, self._args.chat_template_content_format, kwargs)
        try:
            _, prompt = self._renderer.render_messages([_in_vllm_words(message) for message in messages], params)
            self._check_fits(prompt.get("prompt"), "messages")
            rendered = self._renderer.tokenize_prompts([prompt], _TOKENIZE)[0]
        except (VLLMClientError, ValueError, TypeError, RecursionError) as error:
            raise BadRequest(
                f"the model's chat template refuses this conversation: {error}", field="messages"
            ) from error
        return list(rendered["prompt_token_ids"])

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self._check_fits(text, "prompt")
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def strings(self, ids: Sequence[int]) -> list[str]:
        return [string or "" for string in self._tokenizer.convert_ids_to_tokens(list(ids))]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        if self._bytes is not None:
            raw = self._bytes[token_id]
            return raw.decode(errors="replace"), raw
        if token_id >= len(self._tokenizer):  # a padded embedding
            return "", b""
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        return text, text.encode()

    def decoder(self) -> Decoder:
        if self._bytes is not None:
            return ByteDecoder(self._bytes, self.stop_ids)
        return SlowDecoder(self._tokenizer, self.stop_ids)

    # -- parsing

    def parser(self, job: Job, generation_prompt_ids: Sequence[int]) -> ParserSeam:
        if self._parser_class is None:
            return PlainParser()
        request = self.request(job)
        if any(message.get("tool_calls") for message in job.messages):
            # Kimi numbers its calls through the conversation; nothing else in parsing looks at the history.
            request.messages = [_in_vllm_words(message) for message in job.messages]
        return VllmParser(self._make_parser(request, job), request, list(generation_prompt_ids))

    def request(self, job: Job) -> ChatCompletionRequest:
        """The job as vLLM's parsers know it, without its messages.

        Raises: BadRequest naming the field.
        """
        fields: dict[str, Any] = {"messages": [], "stream": True}
        if job.tools:
            fields["tools"] = job.tools
            fields["tool_choice"] = _tool_choice(job.tool_choice)
            fields["parallel_tool_calls"] = job.parallel_tool_calls
        asked = job.response_format
        if asked.type == "json_object":
            fields["response_format"] = {"type": "json_object"}
        elif asked.type == "json_schema":
            schema = {"name": asked.name or "reply", "schema": asked.schema, "strict": asked.strict}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif asked.type != "text":
            fields["structured_outputs"] = {asked.type: getattr(asked, asked.type)}
        try:
            return ChatCompletionRequest.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise BadRequest(f"{where}: {first['msg']}", field=where or None) from error
        except VLLMClientError as error:
            raise BadRequest(str(error), field=getattr(error, "parameter", None)) from error

    def grammar(self, job: Job) -> VllmGrammar | None:
        """The grammar that a job switches on: asked for, needed by its tool choice, or brought by the model's tool parser.

        Raises: BadRequest naming the field.
        """
        if not job.tools and job.response_format.type == "text" and not self._always_adjusts:
            return None
        known = self._grammars.get(id(job))
        if known is not None and known[0] is job:
            return known[1]
        grammar = self._grammar(job)
        self._grammars[id(job)] = (job, grammar)
        if len(self._grammars) > _JOBS_REMEMBERED:
            self._grammars.popitem(last=False)
        return grammar

    def reasoning_ended(self, job: Job, generation_prompt_ids: Sequence[int]) -> bool | None:
        """Whether what is generated starts after the reasoning. None: there is no reasoning parser to say."""
        if self._parser_class is None or not self.has_reasoning:
            return None
        return bool(self._make_parser(self.request(job), job).is_reasoning_end(list(generation_prompt_ids)))

    def generation_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        """The end of a prompt, from after its last stop id. What the assistant thought in earlier turns is not in it, and a
        template's opening of the next turn (`<think>` or its absence) is."""
        for at in range(len(prompt_ids) - 1, -1, -1):
            if prompt_ids[at] in self.stop_ids:
                return list(prompt_ids[at + 1 :])
        return list(prompt_ids)

    # -- inside

    @property
    def _always_adjusts(self) -> bool:
        """Mistral's own tokenizer has a grammar for every request, so that its special tokens can't leak."""
        return is_mistral_tokenizer(self._tokenizer) and self._tokenizer.supports_grammar and self.has_tools

    def _check_mistral_grammars(self) -> None:
        """Raises: ConfigError: vLLM's parser fails at each request, as with a mistral-common that it does not know."""
        try:
            self._grammar(Job())
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"vLLM's tool parser fails with this tokenizer: {error}. vLLM 0.32 needs 'mistral-common<1.13', installed is "
                f"{version('mistral-common')}",
                field="tool_call_parser",
            ) from error

    def _check_fits(self, text: object, field: str) -> None:
        """Raises: ContextOverflow, before anything is tokenised."""
        if self._fewest is not None and isinstance(text, str):
            self._fewest.check(text, self._model_config.max_model_len, field)

    def _closer(self, stops: set[int]) -> set[int]:
        """The special token that ends a reply in the template, if none of `stops` does: a base model's end of text is not
        what its chat template closes a reply with, and where a reply ends must be known for it to be continued (I2)."""
        nonce, after = secrets.token_hex(8), secrets.token_hex(8)
        turns = [("user", "ok"), ("assistant", nonce), ("user", after)]
        try:
            ids = self.render([{"role": role, "content": words} for role, words in turns], [], {})
        except BadRequest:
            return set()
        texts = [self.token_text(token_id)[0] for token_id in ids]
        first = next((n for n in range(len(ids)) if nonce in "".join(texts[: n + 1])), len(ids))
        last = next((n for n in range(len(ids), first, -1) if after in "".join(texts[n - 1 :])), len(ids))
        between = ids[first + 1 : last - 1]
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = {token_id for token_id, token in added.items() if token.special}
        return set() if stops & set(between) else set([token_id for token_id in between if token_id in special][:1])

    def _template_kwargs(self, options: dict[str, Any]) -> dict[str, Any]:
        """Without what is said to the renderer itself."""
        said = {key: value for key, value in options.items() if key not in END_OF_PROMPT}
        return {**(self._args.default_chat_template_kwargs or {}), **said}

    def _make_parser(self, request: ChatCompletionRequest, job: Job) -> Parser:
        assert self._parser_class is not None
        return self._parser_class(
            self._tokenizer,
            request.tools,
            model_config=self._model_config,
            chat_template_kwargs=self._template_kwargs(job.template_kwargs),
        )

    def _grammar(self, job: Job) -> VllmGrammar | None:
        request = self.request(job)
        forced = job.tools and job.tool_choice not in ("auto", "none")
        if forced and not self.has_tools:
            raise BadRequest(
                f"tool_choice {job.tool_choice!r} needs a worker started with --tool-call-parser", field="tool_choice"
            )
        check_format(job.response_format)
        if self._parser_class is not None:
            request = self._make_parser(request, job).adjust_request(request)
        outputs = request.extract_structured_outputs()
        if outputs is None:
            return None
        check_tools(job.tools, "tools")
        kwargs = {"chat_template_kwargs": self._template_kwargs(job.template_kwargs)} if self.has_reasoning else None
        return VllmGrammar(outputs, kwargs, from_start=request._grammar_from_parser)


def _tool_choice(choice: str) -> str | dict[str, Any]:
    if choice.startswith("function:"):
        return {"type": "function", "function": {"name": choice.removeprefix("function:")}}
    return choice


def _in_vllm_words(message: Message) -> Message:
    """vLLM's renderer reads `reasoning` (and gives templates both names); it changes tool calls in place."""
    if message["role"] != "assistant":
        return message
    copied = {key: value for key, value in message.items() if key != "reasoning_content"}
    if message.get("reasoning_content"):
        copied["reasoning"] = message["reasoning_content"]
    if message.get("tool_calls"):
        copied["tool_calls"] = readable_calls(message["tool_calls"])
    return copied

"""vLLM's reasoning and tool parsers behind the worker's `Parser` seam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager
from vllm.tool_parsers import ToolParser

from steno.contracts.chat import ToolCallPiece
from steno.contracts.errors import ConfigError
from steno_worker.chat.interfaces import ParsedText
from steno_worker.engines.vllm.args import EngineArgs

_RANDOM_CALL_ID = "chatcmpl-tool-"
"""How ids begin that vLLM makes up for formats that have none (`renderers.chat_utils.make_tool_call_id`)."""


def parser_class(config: VllmConfig, args: EngineArgs, tokenizer: Any) -> type[Parser] | None:
    """The model's parsers composed by vLLM, checked against its tokenizer; None where none is configured.

    Raises: ConfigError.
    """
    model = config.model_config
    try:
        composed: type[Parser] | None = ParserManager.get_parser(
            tool_parser_name=args.tool_call_parser,
            reasoning_parser_name=args.engine.reasoning_parser,
            enable_auto_tools=args.tool_call_parser is not None,
            model_name=model.model,
            is_harmony=model.hf_config.model_type == "gpt_oss",
            tool_strict_level=args.tool_strict_level,
            tokenizer=tokenizer,
        )
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"tool_call_parser, reasoning_parser: {error}", field="tool_call_parser") from error
    if composed is not None and args.tool_strict_level == "auto":
        composed.tool_parser_cls = _unforced(composed.tool_parser_cls)
    return composed


def _unforced(tool_parser: type[ToolParser] | None) -> type[ToolParser] | None:
    """GLM's parser puts a grammar on every request with tools by itself: not when nobody asked for one."""
    if tool_parser is None or tool_parser.default_tool_strict_level is None:
        return tool_parser
    return type(tool_parser.__name__, (tool_parser,), {"default_tool_strict_level": None})


class VllmParser:
    """One completion through vLLM's reasoning and tool parsers.

    It is given the ids of the generation prompt only: thinking that is kept from earlier turns makes several parsers
    believe that reasoning has ended.

    With `parallel_tool_calls: false` nothing is told of a second call, nor of what follows its beginning.

    Attributes: closed_calls: how many calls are complete. These parsers say of none that it is: the next one's beginning does.
    """

    def __init__(self, parser: Parser, request: ChatCompletionRequest, generation_prompt_ids: list[int]) -> None:
        self._parser = parser
        self._request = request
        self._prompt_ids = generation_prompt_ids
        self.closed_calls = 0
        self._first: int | None = None  # the index of the call that began first
        parser.set_prompt_token_ids(generation_prompt_ids)

    def feed(self, text: str, ids: Sequence[int], *, final: bool = False) -> ParsedText:
        delta = self._parser.parse_delta(text, list(ids), self._request, self._prompt_ids, finished=final)
        if delta is None:
            return ParsedText()
        was_over = self.closed_calls > 0 and self._request.parallel_tool_calls is False
        pieces = [
            ToolCallPiece(
                call.index,
                (call.function.arguments or "") if call.function else "",
                "" if not call.id or call.id.startswith(_RANDOM_CALL_ID) else call.id,
                (call.function.name or "") if call.function else "",
            )
            for call in delta.tool_calls
        ]
        for piece in pieces:
            self._first = piece.index if self._first is None else self._first
            self.closed_calls = max(self.closed_calls, piece.index - self._first)
        if self._request.parallel_tool_calls is False:
            pieces = [piece for piece in pieces if piece.index == self._first]
        if was_over:
            return ParsedText(tool_calls=pieces)
        return ParsedText(delta.content or "", delta.reasoning or "", pieces)


class PlainParser:
    """No parser configured: everything is content, as vLLM has it."""

    def feed(self, text: str, ids: Sequence[int], *, final: bool = False) -> ParsedText:
        return ParsedText(text)

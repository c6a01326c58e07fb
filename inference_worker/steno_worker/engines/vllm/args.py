"""What the vLLM engine is started with: every engine argument of vLLM's, and those of its front-end that concern the chat format.

The command line after `--` is read by vLLM's own argument parser, so that names, types, help and errors are vLLM's. This
module adds what recording needs (I1) and refuses what would contradict it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

from vllm.config import StructuredOutputsConfig, WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs, get_kwargs
from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import load_chat_template
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from steno.contracts.errors import ConfigError
from steno_worker.engines.vllm.weight_receiver import EXTENSION, NAME

LOGPROBS_MODE = "processed_logprobs"
"""Log-probabilities after temperature, penalties and masks: those of the distribution that was sampled from (I1)."""
ADAPTED = [
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
]  # fmt: skip
"""Layers that can be adapted with --enable-lora, where --lora-target-modules says nothing."""
HEADS = ["lm_head", "embed_tokens"]
"""Never trained (`steno train --lora-rank`). vLLM 0.32 fails on a CPU when it scores prompts beside others by an adapted head."""


@dataclasses.dataclass(frozen=True)
class EngineArgs:
    """`engine` is what AsyncLLM takes; the rest are the flags of `vllm serve` that shape prompts and parsing, with its names.

    enable_auto_tool_choice is accepted for the sake of copied command lines: a tool-call parser alone switches tools on.
    tool_strict_level: `auto` follows the request. Unlike `vllm serve`, it does so for every family: there GLM's parser puts a
    grammar on each request with tools, whose tokens could then not be trained. `function` or `parameter` bring that back.
    """

    engine: AsyncEngineArgs
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    default_chat_template_kwargs: dict[str, Any] | None = None
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    tool_parser_plugin: str = ""
    tool_strict_level: str = "auto"

    def checked(self) -> EngineArgs:
        """The same arguments with what recording and weight updates need, parser names verified and the chat template loaded.

        Raises: ConfigError: names the argument, and for a parser the names there are.
        """
        if self.engine.logprobs_mode not in (LOGPROBS_MODE, AsyncEngineArgs.logprobs_mode):
            raise ConfigError(
                f"logprobs_mode: got {self.engine.logprobs_mode}, must be {LOGPROBS_MODE} (the default here): "
                "others are not the sampling log-probabilities",
                field="logprobs_mode",
            )
        if self.tool_parser_plugin:
            ToolParserManager.import_tool_parser(self.tool_parser_plugin)
        if self.engine.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(self.engine.reasoning_parser_plugin)
        _known("tool_call_parser", self.tool_call_parser, ToolParserManager.list_registered())
        _known("reasoning_parser", self.engine.reasoning_parser, ReasoningParserManager.list_registered())
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ConfigError("enable_auto_tool_choice needs tool_call_parser", field="tool_call_parser")
        try:
            template = load_chat_template(self.chat_template)
        except (OSError, ValueError) as error:
            raise ConfigError(f"chat_template: {error}", field="chat_template") from error
        targets = self.engine.lora_target_modules or (ADAPTED if self.engine.enable_lora else None)
        if heads := [word for word in targets or () if word in HEADS]:
            raise ConfigError(f"lora_target_modules: {heads[0]} can't be adapted here", field="lora_target_modules")
        engine = dataclasses.replace(
            self.engine,
            lora_target_modules=targets,
            logprobs_mode=LOGPROBS_MODE,
            weight_transfer_config=self.engine.weight_transfer_config or WeightTransferConfig(backend=NAME),
            worker_extension_cls=self.engine.worker_extension_cls or EXTENSION,
        )
        return dataclasses.replace(self, engine=engine, chat_template=template)


def one_grammar_backend(config: StructuredOutputsConfig, *, tekken: bool) -> None:
    """In place of `auto`, one backend for all grammars. By `auto` vLLM 0.32 checks each request with the one that suits it, and
    compiles all with the one that suited its first: forced tool calls fail then, or lengths are not enforced.

    Args: tekken: the tokenizer is Mistral's Tekken. There xgrammar would let special tokens pass as text, and vLLM itself takes
        guidance for what the tool parser writes.
    """
    if config.backend == "auto":
        config.backend = "guidance" if tekken else "xgrammar"


FRONTEND = tuple(field.name for field in dataclasses.fields(EngineArgs) if field.name != "engine")
"""The arguments of vLLM's HTTP front-end that mean something without HTTP."""


def parse_args(argv: Sequence[str], model: str | None = None) -> EngineArgs:
    """vLLM's command line, as after `steno worker --engine vllm --model DIR --`, whose DIR is `model`.

    Raises: SystemExit: with vLLM's own message or help, as argparse does.
    """
    parser = FlexibleArgumentParser(
        prog="steno worker --engine vllm --model DIR --", usage="%(prog)s [arguments of vLLM]"
    )
    AsyncEngineArgs.add_cli_args(parser)
    group = parser.add_argument_group("Chat format")
    flags = BaseFrontendArgs._customize_cli_kwargs(get_kwargs(BaseFrontendArgs))
    for name in FRONTEND:
        group.add_argument(*flags[name].pop("flags", []), f"--{name.replace('_', '-')}", **flags[name])
    # vLLM looks for the model as soon as its arguments are made, so it can't be filled in later.
    parsed = parser.parse_args([*(["--model", model] if model else []), *argv])
    return EngineArgs(AsyncEngineArgs.from_cli_args(parsed), **{name: getattr(parsed, name) for name in FRONTEND})


def from_fields(fields: dict[str, Any]) -> EngineArgs:
    """The same from a mapping (a config file): names as in `AsyncEngineArgs` and `FRONTEND`.

    Raises: ConfigError: an unknown name, with the nearest known one; a value that vLLM refuses.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} | set(FRONTEND)
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"engine_args.{name}: no such vLLM argument{hint}", field=f"engine_args.{name}")
    front = {name: fields[name] for name in FRONTEND if name in fields}
    try:
        engine = AsyncEngineArgs(**{name: value for name, value in fields.items() if name not in front})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"engine_args: {error}", field="engine_args") from error
    return EngineArgs(engine, **front)


def _known(argument: str, name: str | None, names: Sequence[str]) -> None:
    if name and name not in names:
        raise ConfigError(f"{argument}: no parser named {name!r}; there are {', '.join(sorted(names))}", field=argument)

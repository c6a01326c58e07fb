"""Grammars for the embedded engine: which jobs have one, and which tokens it allows next (llguidance).

A grammar starts with the first token of the completion: a constrained reply does not think first. Its log-probabilities are not
the policy's, so all its tokens are marked constrained (I1). `strict` tools switch no grammar on here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
import torch
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from steno.contracts.chat import Job
from steno.contracts.errors import BadRequest
from steno_worker.engines.grammars import check_format, check_tools, field_of_format

_SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""JSON as `json.dumps` writes it: where whitespace is free, a small model never gets out of it."""


def constrains(job: Job) -> bool:
    """Whether a grammar will be active for this job."""
    return job.response_format.type != "text" or _forced(job)


def _forced(job: Job) -> bool:
    return bool(job.tools) and job.tool_choice not in ("auto", "none")


def _first_line(error: str) -> str:
    """What follows it is llguidance's whole state, the tokens so far among it: nothing for an error message or a log."""
    return error.partition("\n")[0]


class Matcher:
    """A grammar's state along one completion. `done`: it was followed to its end, and a stop id came after it."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int, stop_ids: frozenset[int]) -> None:
        self.done = False
        self._stop_ids = stop_ids
        self._matcher = matcher
        self._bits = llguidance.numpy.allocate_token_bitmask(1, vocabulary)

    def allowed(self, size: int) -> torch.Tensor:
        """bool (size,): which ids may come next; where nothing can be added, the stop ids."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        flags = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little", count=size)
        return torch.from_numpy(flags.view(np.bool_))

    def accept(self, token: int) -> str:
        """Take a token. Returns: why the grammar can't go on, or "". Either it has reached llguidance's resource limits (it then
        allows stop ids only, which must not count as its end), or it refuses a token that it had allowed."""
        if self._matcher.is_error():
            return _first_line(self._matcher.get_error())
        if token in self._stop_ids:
            self.done = True
        elif not self._matcher.consume_token(token):
            return _first_line(self._matcher.get_error()) or f"token {token} is refused"
        return ""


class Grammars:
    """Makes matchers for one tokenizer. Building the table takes a second for a large vocabulary: done at first use.

    Thread-safe once built; callers build it away from the event loop.
    """

    def __init__(self, model_dir: Path, vocabulary: int, stop_ids: frozenset[int]) -> None:
        self._model_dir = model_dir
        self._vocabulary = vocabulary
        self._stop_ids = stop_ids
        self._table: llguidance.LLTokenizer | None = None
        self._markers = {"<tool_call>": '"<tool_call>"', "</tool_call>": '"</tool_call>"'}

    def matcher(self, job: Job) -> Matcher:
        """Raises: BadRequest naming the field, for a schema that llguidance can't follow."""
        table = self._ready()
        asked = job.response_format
        field = "tool_choice" if _forced(job) else field_of_format(asked)
        if _forced(job):
            check_tools(job.tools, field)
        else:
            check_format(asked)
        try:
            grammar = self._of_tools(job) if _forced(job) else self._of_format(job)
        except ValueError as error:
            raise BadRequest(f"{field}: {error}", field=field) from error
        found = llguidance.LLMatcher(table, grammar, log_level=0)
        matcher = Matcher(found, self._vocabulary, self._stop_ids)
        if asked.type not in ("json_object", "json_schema") and not found.is_error():
            matcher.allowed(
                self._vocabulary
            )  # patterns are compiled by what is asked of them: here, and not where all wait
        if found.is_error():
            raise BadRequest(f"{field}: it can't be enforced: {_first_line(found.get_error())}", field=field)
        return matcher

    def _ready(self) -> llguidance.LLTokenizer:
        if self._table is None:
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(self._model_dir)
            vocabulary = tokenizer.get_vocab()
            # By id where the tokenizer has them as one token: special tokens can't be matched by their text.
            for marker in self._markers:
                if marker in vocabulary:
                    self._markers[marker] = f"<[{vocabulary[marker]}]>"
            self._table = llguidance.hf.from_tokenizer(
                tokenizer, n_vocab=self._vocabulary, eos_token=sorted(self._stop_ids)
            )
        return self._table

    def _of_format(self, job: Job) -> str:
        asked = job.response_format
        if asked.type == "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(asked.regex))
        if asked.type == "choice":
            return f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in asked.choice)}\n"
        if asked.type == "grammar":
            try:
                return str(any_to_lark(asked.grammar))
            except (GbnfToLarkError, RecursionError) as error:
                raise ValueError(str(error)) from error
        schema = job.response_format.schema if job.response_format.type == "json_schema" else None
        if job.response_format.type == "json_schema" and schema is None:
            raise ValueError("json_schema needs a schema")
        return f"start: %json {_spaced(schema if schema is not None else {'type': 'object'})}\n"

    def _of_tools(self, job: Job) -> str:
        named = job.tool_choice.removeprefix("function:") if job.tool_choice.startswith("function:") else None
        tools = [tool["function"] for tool in job.tools if named in (None, tool["function"]["name"])]
        if not tools:
            raise ValueError(f"no tool is named {named!r}")
        rules = "\n".join(f"tool_{i}: %json {_spaced(_call_schema(tool))}" for i, tool in enumerate(tools))
        choice = " | ".join(f"tool_{i}" for i in range(len(tools)))
        more = ' ("\\n" call)*' if job.parallel_tool_calls and named is None else ""
        opened, closed = self._markers["<tool_call>"], self._markers["</tool_call>"]
        return f'start: call{more}\ncall: {opened} "\\n" ({choice}) "\\n" {closed}\n{rules}\n'


def _call_schema(function: dict[str, Any]) -> dict[str, Any]:
    """Schema of {"name": …, "arguments": …}. Definitions move to the root, since references name them from there."""
    parameters = dict(function.get("parameters") or {"type": "object"})
    hoisted = {key: parameters.pop(key) for key in ("$defs", "definitions") if key in parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        **hoisted,
    }


def _spaced(schema: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _SPACING})

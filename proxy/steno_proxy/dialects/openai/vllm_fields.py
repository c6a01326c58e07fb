"""One table of every field of vLLM's requests (chat, completions, Responses): honoured, ignored or refused.

A field that changes what may be sampled, or what the prompt is, is never ignored in silence. It is *honoured* with vLLM's
meaning, or *refused* by name with a 400; what can change neither is *ignored*. The value that vLLM takes for a field that is
absent is never refused. The table in docs/dialects.md is made from this one, and a test holds it against vLLM's own classes.

A field that vLLM has in one of the three formats counts in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from steno.contracts.errors import BadRequest

Does = Literal["honoured", "refused", "ignored"]
Law = Literal["", "plain", "neutralised", "constrained", "constrained or neutralised"]
"""What the field makes of the sampling law. neutralised: it bends the law, and is taken out in trials that are trained.
constrained: it is kept there too, and its tokens are not trained. "": it has no part in it."""
CHAT, COMPLETIONS, RESPONSES = "chat", "completions", "responses"
ALL = (CHAT, COMPLETIONS, RESPONSES)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a request.

    on: the dialects that this row is about. harmless: besides null, the values that are never refused.
    resumable: whether another worker may go on with such a turn after a token has been sampled (I9).
    retry: whether a request with another value is another request, and no retry of this one.
    older: vLLM 0.32 has it no more, and clients still send it.
    """

    name: str
    does: Does
    note: str
    on: tuple[str, ...] = ALL
    law: Law = ""
    resumable: bool = True
    retry: bool = False
    harmless: tuple[Any, ...] = ()
    older: bool = False


def _sampling() -> Iterator[Field]:
    def row(
        name: str, note: str, law: Law = "neutralised", *, resumable: bool = True, on: tuple[str, ...] = ALL
    ) -> Field:
        return Field(name, "honoured", note, on, law, resumable, retry=True)

    yield row(
        "temperature",
        "0 is greedy; in trials that are trained 1 stands for it, and for whatever is below 0.01",
        "plain",
    )
    for name in ("top_p", "top_k", "min_p"):
        yield row(name, "truncates the distribution")
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        yield row(name, "", resumable=False)
    yield row("logit_bias", "at most 1,024 ids")
    yield row("allowed_token_ids", "at most 1,024 ids")
    yield row("bad_words", "at most 64 texts, of 256 characters", resumable=False)
    yield row("min_tokens", "")
    yield row("ignore_eos", "")
    yield row("max_tokens", "clamped to what the context leaves", "plain")
    yield row("max_completion_tokens", "wins over `max_tokens`", "plain", on=(CHAT,))
    yield row("max_output_tokens", "", "plain", on=(RESPONSES,))
    yield row("seed", "of n choices each has its own, counted up from it", "plain")
    yield row("stop", "at most 16 texts", "plain")
    yield row("stop_token_ids", "at most 128 ids", "plain")
    yield row("include_stop_str_in_output", "of texts in `stop`; beside `stop_token_ids` it is refused", "plain")
    yield row("skip_special_tokens", "`false` beside `ignore_eos` or `include_stop_str_in_output` is refused", "plain")
    yield row("structured_outputs", "`json`, `json_object`, `regex`, `choice`, `grammar`; its other fields are refused",
              "constrained", resumable=False)  # fmt: skip
    yield row(
        "response_format",
        "`text`, `json_object`, `json_schema`",
        "constrained",
        resumable=False,
        on=(CHAT, COMPLETIONS),
    )
    yield row("text", "its `format`, like chat's `response_format`", "constrained", resumable=False, on=(RESPONSES,))
    yield row("tools", "`strict` ones bring a grammar", "constrained or neutralised", on=(CHAT, RESPONSES))
    yield row(
        "tool_choice", "one that forces a call brings a grammar", "constrained or neutralised", on=(CHAT, RESPONSES)
    )
    yield row("parallel_tool_calls", "`false` may bring a grammar", "constrained or neutralised", on=(CHAT, RESPONSES))
    for name, member in (("json", "json"), ("regex", "regex"), ("choice", "choice"), ("grammar", "grammar")):
        yield Field(f"guided_{name}", "honoured", f"`structured_outputs.{member}` of older clients", law="constrained",
                    resumable=False, retry=True, older=True)  # fmt: skip


def _prompt() -> Iterator[Field]:
    def row(name: str, note: str, *on: str) -> Field:
        return Field(name, "honoured", note, on or ALL, "plain", retry=True)

    yield row("model", "recorded; a name that some worker has served means that model")
    yield row("messages", "", CHAT)
    yield row("prompt", "one text, or one list of token ids", COMPLETIONS)
    yield row("input", "", RESPONSES)
    yield row("instructions", "", RESPONSES)
    yield row("previous_response_id", "", RESPONSES)
    yield row("chat_template_kwargs", "what the renderer itself knows is refused", CHAT, RESPONSES)
    yield row("reasoning_effort", "a template option", CHAT)
    yield row("reasoning", "its `effort` is a template option", RESPONSES)
    yield row("add_generation_prompt", "`false`: no assistant's header is added. A new branch, rendered whole", CHAT)
    yield row(
        "continue_final_message", "with `add_generation_prompt: false`; the last message is an assistant's text", CHAT
    )


def _answer() -> Iterator[Field]:
    def row(name: str, note: str, *on: str, retry: bool = False) -> Field:
        return Field(name, "honoured", note, on or ALL, retry=retry)

    yield row("n", "at most 64", CHAT, COMPLETIONS, retry=True)
    yield row("stream", "")
    yield row(
        "stream_options", "of a stream only: `include_usage`, and with it `continuous_usage_stats`", CHAT, COMPLETIONS
    )
    yield row("logprobs", "", CHAT, COMPLETIONS, retry=True)
    yield row("top_logprobs", "at most 20", CHAT, RESPONSES, retry=True)
    yield row("return_token_ids", "`prompt_token_ids` once, in the first chunk; `token_ids` with each choice. Of models whose "
              "upstream gives ids. The body counts three times in `max_inflight_bytes`", CHAT, COMPLETIONS)  # fmt: skip
    yield row("include_reasoning", "`false`: the answer holds no reasoning, no ids and no log-probabilities; the record holds "
              "all of them", CHAT)  # fmt: skip
    yield row("include", "`reasoning.encrypted_content`, `message.output_text.logprobs`", RESPONSES)
    yield row("store", "", RESPONSES)
    yield row("metadata", "", RESPONSES)


def _refused() -> Iterator[Field]:
    def row(name: str, note: str, *harmless: Any, on: tuple[str, ...] = ALL, older: bool = False) -> Field:
        return Field(name, "refused", note, on, harmless=harmless, older=older)

    yield row("truncate_prompt_tokens", "prompts are recorded whole and never truncated; one that is too long is a 400")
    yield row("thinking_token_budget", "it inserts tokens that the policy did not sample")
    yield row("prompt_logprobs", "only sampled tokens have recorded log-probabilities")
    yield row("logprob_token_ids", "use `top_logprobs`")
    yield row("use_beam_search", "tokens of dropped beams would not be recorded", False)
    yield row("watermarking", "it changes the sampling law by a key that is not recorded", False)
    yield row("repetition_detection", "it ends a reply by a rule that is not recorded")
    yield row("echo", "answers hold sampled tokens only", False)
    yield row("suffix", "fill-in-the-middle is not supported", "")
    yield row("prompt_embeds", "prompts are text or token ids")
    yield row("add_special_tokens", "the chat template adds special tokens", False, on=(CHAT, RESPONSES))
    yield row(
        "add_special_tokens",
        "the tokenizer decides; send token ids for a prompt without special tokens",
        True,
        on=(COMPLETIONS,),
    )
    yield row("chat_template", "the model's own template is used; an agent's template would run on the worker (I8)")
    yield row("documents", "put documents into a message", [])
    for name in ("media_io_kwargs", "mm_processor_kwargs", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"):
        yield row(name, "it can change the prompt or the sampling inside the engine", {})
    yield row("return_tokens_as_token_ids", "use `return_token_ids`", False)
    yield row("return_token_offsets", "no engine gives offsets", False)
    yield row("return_prompt_text", "use `return_token_ids` for the prompt's ids", False)
    yield row("return_mm_kwargs", "answers hold text only", False)
    yield row("return_token_ids", "only chat and completions have a field for token ids", False, on=(RESPONSES,))
    yield row("include_reasoning", "only chat can leave reasoning out", True, on=(RESPONSES,))
    yield row("response_format", "use `text.format`", {"type": "text"}, on=(RESPONSES,))
    for name, plain in (("add_generation_prompt", True), ("continue_final_message", False)):
        yield row(name, "only chat has an open final message", plain, on=(COMPLETIONS, RESPONSES))
    yield row("background", "responses do not run in the background", False, on=(RESPONSES,))
    yield row("prompt", "the proxy stores no prompts", {}, on=(RESPONSES,))
    yield row("previous_input_messages", "send messages in `input`", [], on=(RESPONSES,))
    yield row("enable_response_messages", "read messages from the record", False, on=(RESPONSES,))
    yield row("guided_whitespace_pattern", "the engine's own is used", older=True)


def _ignored() -> Iterator[Field]:
    def row(name: str, note: str, *on: str, older: bool = False) -> Field:
        return Field(name, "ignored", note, on or ALL, older=older)

    for name in ("user", "request_id", "session_id"):
        yield row(name, "a name for who asks")
    yield row("priority", "trials take turns")
    yield row("cache_salt", "of a cache")
    yield row("stream_interval", "how often events come")
    yield row("length_penalty", "of beams, which are refused")
    yield row("truncation_side", "of `truncate_prompt_tokens`, which is refused")
    yield row("spaces_between_special_tokens", "no spaces are added to what was sampled")
    yield row("routed_experts_prompt_start", "of routed experts, which are not answered", CHAT, COMPLETIONS)
    yield row("mm_payload", "of `return_mm_kwargs`, which is refused")
    yield row("guided_decoding_backend", "the worker's own is used", older=True)
    yield row("include_reasoning", "completions show none", COMPLETIONS)
    yield row("service_tier", "", RESPONSES)
    yield row("prompt_cache_key", "of a cache", RESPONSES)
    yield row("max_tool_calls", "of tools that a provider runs; there are none", RESPONSES)
    yield row("truncation", "a prompt that is too long is a 400, never cut", RESPONSES)


FIELDS: tuple[Field, ...] = (*_sampling(), *_prompt(), *_answer(), *_refused(), *_ignored())
_REFUSED = {on: tuple(row for row in FIELDS if row.does == "refused" and on in row.on) for on in ALL}

if TYPE_CHECKING:

    class Refusable(msgspec.Struct):
        """The fields of a body that some dialect refuses, of any type. None: not given."""
else:
    Refusable = msgspec.defstruct(
        "Refusable",
        [(name, Any, None) for name in dict.fromkeys(row.name for row in FIELDS if row.does == "refused")],
    )


def refuse(body: Refusable, on: str) -> None:
    """Raises: BadRequest: a field that this dialect does not support is given, by its name."""
    for row in _REFUSED[on]:
        value = getattr(body, row.name)
        if value is not None and not any(value == plain and type(value) is type(plain) for plain in row.harmless):
            raise BadRequest(f"{row.name} is not supported: {row.note.replace('`', '')}", field=row.name)

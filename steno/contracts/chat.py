"""The canonical request: the one form that every dialect is turned into, and that every worker takes.

Messages, tools and tool calls have OpenAI chat shapes, as plain dicts (they are rendered by chat templates, which take
dicts), normalised by the dialect as follows:

    role          system | user | assistant | tool        (developer has become system)
    content       str, or a list of parts; never None and never absent ("" instead)
                  {"type": "text", "text": str}
                  {"type": "image_url", "image_url": {"url": "data:image/…;base64,…" | "https://…", "detail"?: str}}, in
                  user and tool messages only
    reasoning_content   str, assistant only, absent when there is none
    tool_calls    [{"id": str, "type": "function", "function": {"name": str, "arguments": str (JSON text as sent)}}]
    tool_call_id  str, tool only
    name          str, optional

Tools are [{"type": "function", "function": {"name", "description"?, "parameters"?, "strict"?}}].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import msgspec

Message = dict[str, Any]
Tool = dict[str, Any]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]
"""How a turn ended. `cancelled`: the client went away or the session was frozen; `error`: the worker or engine failed.
Both are recorded with what had been sampled by then."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sampling law: how each token is drawn from the policy's distribution. Units: none; None means not set.

    `temperature` 0 is greedy. `top_k` 0 is off. The neutral law (plain temperature sampling) is every field at its default.
    `allowed_token_ids`: no other id is drawn; empty: all are. `bad_words`: texts that are not drawn, as the engine tokenises
    them. Workers of older releases know neither of the two: see `needs`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    allowed_token_ids: list[int] = []
    bad_words: list[str] = []

    def is_plain(self) -> bool:
        """Whether a token's log-probability under this law is the policy's own at this temperature (I1)."""
        return (
            self.temperature > 0.0
            and self.top_p >= 1.0
            and self.top_k <= 0
            and self.min_p <= 0.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
            and self.min_tokens <= 0
            and not self.ignore_eos
            and not self.allowed_token_ids
            and not self.bad_words
        )

    def remembers_output(self) -> bool:
        """Whether the law depends on the tokens drawn so far, so that it can't be rebuilt elsewhere (I9)."""
        penalised = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
        return penalised or bool(self.bad_words)


class ResponseFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the reply must be. `regex`: a text that the pattern matches whole. `choice`: one of these texts. `grammar`: a text of
    this grammar, in EBNF (`root ::= …`) or Lark (`start: …`). Workers of older releases know none of the three: see `needs`.
    """

    type: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"] = "text"
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool = False
    regex: str = ""
    choice: list[str] = []
    grammar: str = ""


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """What to generate: the part of a canonical request that a worker needs. One completion; `n` of them are `n` jobs.

    Exactly one of three is the input: `messages` (chat), `prompt_text` or `prompt_ids` (completions, raw int32 LE).

    tool_choice: "auto", "none", "required", or "function:<name>".
    template_kwargs: passed to the chat template (`enable_thinking`, `reasoning_effort`, …).
        OPEN_END and CONTINUES are the two that say where the prompt ends.
    top_logprobs: alternatives per token the *client* asked for; None: it asked for no log-probabilities at all
        (they are recorded either way).
    shows_stop: the stop string that ends the reply is part of its text. shows_special: so are all special tokens, but for the one
        that ends it.
    """

    messages: list[Message] = []
    prompt_text: str | None = None
    prompt_ids: bytes | None = None
    tools: list[Tool] = []
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()
    template_kwargs: dict[str, Any] = {}
    top_logprobs: int | None = None
    sampling: Sampling = Sampling()
    shows_stop: bool = False
    shows_special: bool = False


OPEN_END = "add_generation_prompt"
"""Template option; False: no header of an assistant's message after the messages."""
THINKS = ("enable_thinking", "thinking")
"""Template options: whether the model thinks first. Qwen's and GLM's templates read the first one, Kimi's and DeepSeek's the
second one. Parsers read both."""
CONTINUES = "continue_final_message"
"""Template option; True: the prompt ends inside the last message, which is an assistant's, and the reply goes on from there."""


def needs(job: Job) -> frozenset[str]:
    """Fields of the request that not every worker honours, as their clients name them: `ModelCard.fields` must have all of
    them. A worker that does not know a field drops it, and would sample under another law, or after another prompt."""
    law, asked = job.sampling, job.response_format.type
    if asked in _OLD_FORMATS and not (
        law.allowed_token_ids or law.bad_words or job.shows_stop or job.shows_special or job.template_kwargs
    ):
        return _NOTHING
    found = {
        "allowed_token_ids": bool(law.allowed_token_ids),
        "bad_words": bool(law.bad_words),
        "include_stop_str_in_output": job.shows_stop,
        "skip_special_tokens": job.shows_special,
        f"structured_outputs.{asked}": asked not in _OLD_FORMATS,
        OPEN_END: OPEN_END in job.template_kwargs,
        CONTINUES: CONTINUES in job.template_kwargs,
    }
    return frozenset(name for name, needed in found.items() if needed)


_OLD_FORMATS = ("text", "json_object", "json_schema")
_NOTHING: frozenset[str] = frozenset()
RECORDED = "recorded"
"""Key of an assistant message in a request that stands for the recorded reply of the turn it names (a reference to a stored
item). It is replaced by that reply before anything else looks at the messages."""


class CanonicalRequest(msgspec.Struct):
    """One request of an agent, whatever its dialect.

    asked: the sampling fields exactly as the client sent them, for the record.
    model: the name the client asked for. It is recorded, and says which of the served models answers.
    dropped: types of the items that were left out of the messages because the dialect does not know them, one each.
    images: dotted paths of the images among the messages, as the client names them.
    after: turn id; the stored conversation that this turn ended comes before the messages. "": they are the whole.
    leading: how many of the messages (a request's instructions) stand before that conversation; its own are left out.
    refers: whether any message is RECORDED.
    carried: what a request that goes on from its answer needs to know of it.
    local: the answer `after` was given on this connection, so it need not be stored; holds what that answer's request carried.
        None: `after` must be a stored answer.
    usage_in_chunks: every event says the usage so far. returns_ids: the answer holds the ids of prompt and completion.
    hides_reasoning: the answer does not hold the reasoning, which is on record all the same.
    kept: what the dialect needs to answer again when the stored answer is asked for, and what it carried; recorded in the turn's
        options.
    body_bytes: how long the body was that this came in.
    merges: whether the dialect's provider takes neighbouring messages of the user, or of the assistant, for one
        (docs/adr/0017). The messages are as the client sent them all the same.
    compacts: the answer is a summary of the conversation. One that says nothing is a failure, and is not given again.
    prefills: it ends with an assistant's message, in a dialect whose provider takes that for the beginning of the answer.
    traceparent: as the client sent it, where turns are traced.
    """

    dialect: str
    model: str
    job: Job
    asked: dict[str, Any] = {}
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    usage_in_chunks: bool = False
    returns_ids: bool = False
    hides_reasoning: bool = False
    dropped: list[str] = []
    images: list[str] = []
    after: str = ""
    leading: int = 0
    refers: bool = False
    carried: dict[str, Any] = {}
    local: dict[str, Any] | None = None
    kept: dict[str, Any] = {}
    body_bytes: int = 0
    merges: bool = False
    compacts: bool = False
    prefills: bool = False
    traceparent: str = ""

    def goes_on_from(self, carried: dict[str, Any], tools: list[Tool]) -> None:
        """Take over from the conversation that this request goes on from what is not in its messages.

        Args: carried: `carried` of the request before, whose answer ended that conversation. tools: that this answer's turn had.
        Raises: BadRequest: with these, this request can't be honoured.
        """


IMAGES = "images"
"""The capability, on a model's card, of taking images in messages."""
NO_IMAGES = "Could not process image: the model takes text only"
"""It begins with Anthropic's words: by these Claude Code and Kimi Code know to ask again without the image."""
_BILLING_HEADERS = re.compile(r"(?:\s*+x-anthropic-billing-header:[^\n]*+\n?+)*+", re.IGNORECASE)
EMPTY_TEXT = "[System: Empty message content sanitised to satisfy protocol]"
"""What LiteLLM (1.106.2, `_sanitize_empty_text_content`) sends to Anthropic in place of a text that is empty or white space:
Anthropic refuses those. In a reply it is no text: nobody said it."""


def after_billing_headers(text: str) -> str:
    """A system text without the lines that Claude Code puts before it: a word to the provider, whose hash changes between
    conversations."""
    found = _BILLING_HEADERS.match(text)
    return text[found.end() :] if found else text


def has_images(messages: list[Message]) -> bool:
    """Whether any message holds an image: then only a model whose card says IMAGES can be asked."""
    return any(
        part["type"] == "image_url"
        for message in messages
        if type(content := message.get("content")) is list
        for part in content
    )


MERGED = frozenset({"user", "assistant"})
"""Roles whose neighbours are one message, where a provider says so of its format (`CanonicalRequest.merges`)."""


def runs_of_one_role(messages: Sequence[Message], roles: Collection[str]) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of two or more adjacent messages of one role, for these roles, in order. Compares roles alone."""
    start, last = 0, len(messages)
    for place in range(1, last + 1):
        if place < last and messages[place]["role"] == messages[start]["role"]:
            continue
        if place - start > 1 and messages[start]["role"] in roles:
            yield start, place
        start = place


def joined(messages: Sequence[Message]) -> Message:
    """One message with the texts, images, reasoning and calls of all of these, in their order. An empty one adds nothing.

    As if its client had put all of it into one message: texts stay parts of their own.
    """
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for message in messages:
        content = message["content"]
        parts += content if not isinstance(content, str) else [{"type": "text", "text": content}] if content else []
        reasoning.append(message.get("reasoning_content") or "")
        calls += message.get("tool_calls") or []
    one: Message = {"role": messages[0]["role"], "content": parts or ""}
    if len(parts) == 1 and parts[0]["type"] == "text":
        one["content"] = parts[0]["text"]
    if any(reasoning):
        one["reasoning_content"] = "".join(reasoning)
    if calls:
        one["tool_calls"] = calls
    return one


def merged(messages: Sequence[Message], roles: Collection[str]) -> list[Message]:
    """The messages with every run of them joined."""
    found: list[Message] = []
    place = 0
    for start, end in runs_of_one_role(messages, roles):
        found += [*messages[place:start], joined(messages[start:end])]
        place = end
    return [*found, *messages[place:]]


class ToolCallPiece(msgspec.Struct, array_like=True):
    """A fragment of one tool call. `id` and `name` come with the first piece of each `index`, arguments accumulate."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class TokenLogprob(msgspec.Struct, array_like=True):
    """One sampled token as a client sees it when it asks for log-probabilities. `top`: (text, bytes, logprob), best first."""

    text: str
    raw: bytes
    logprob: float
    top: list[tuple[str, bytes, float]] = []

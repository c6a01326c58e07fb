"""What every dialect is turned into, and what every worker understands.

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
        )

    def remembers_output(self) -> bool:
        """Whether the law depends on the tokens drawn so far, so that it can't be rebuilt elsewhere (I9)."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class ResponseFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool = False


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """What to generate: the part of a canonical request that a worker needs. One completion; `n` of them are `n` jobs.

    Exactly one of three is the input: `messages` (chat), `prompt_text` or `prompt_ids` (completions, raw int32 LE).

    tool_choice: "auto", "none", "required", or "function:<name>".
    template_kwargs: passed to the chat template (`enable_thinking`, `reasoning_effort`, …).
    top_logprobs: alternatives per token the *client* asked for; None: it asked for no log-probabilities at all
        (they are recorded either way).
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


RECORDED = "recorded"
"""Key of an assistant message in a request that stands for the recorded reply of the turn it names (a reference to a stored
item). It is replaced by that reply before anything else looks at the messages."""


class CanonicalRequest(msgspec.Struct):
    """One request of an agent, whatever its dialect.

    asked: the sampling fields exactly as the client sent them, for the record.
    model: the name the client asked for; recorded, never routed on.
    dropped: types of the items that were left out of the messages because the dialect does not know them, one each.
    images: dotted paths of the images among the messages, as the client names them.
    after: turn id; the stored conversation that this turn ended comes before the messages. "": they are the whole.
    leading: how many of the messages (a request's instructions) stand before that conversation; its own are left out.
    refers: whether any message is RECORDED.
    kept: what the dialect needs to answer again when the stored answer is asked for; recorded in the turn's options.
    body_bytes: how long the body was that this came in.
    """

    dialect: str
    model: str
    job: Job
    asked: dict[str, Any] = {}
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    user: str | None = None
    dropped: list[str] = []
    images: list[str] = []
    after: str = ""
    leading: int = 0
    refers: bool = False
    kept: dict[str, Any] = {}
    body_bytes: int = 0


IMAGES = "images"
"""The capability, on a model's card, of taking images in messages."""
NO_IMAGES = "images can't be read by the model that is served; only text can"


def has_images(messages: list[Message]) -> bool:
    """Whether any message holds an image: then only a model whose card says IMAGES can be asked."""
    return any(
        part["type"] == "image_url"
        for message in messages
        if type(content := message.get("content")) is list
        for part in content
    )


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

"""vLLM's `POST /tokenize` and `/detokenize`: what the tokenizer of the model that is served makes of a text, a conversation, ids.

Requests and answers are vLLM's. A conversation is read as chat completions read one (`chat_request.py`), and what they refuse is
refused here: a template of the client's own would run on the worker (I8). Nothing is tokenised here (I6): a `Count` goes to a
worker, and its `Counted` comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from steno.contracts.chat import Job
from steno.contracts.errors import BadRequest, StenoError
from steno.contracts.records import bytes_to_ids, ids_to_bytes
from steno.contracts.wire.frames import Count, Counted, ModelCard
from steno_proxy.dialects import bounds
from steno_proxy.dialects.base import decode
from steno_proxy.dialects.openai import common
from steno_proxy.dialects.openai.chat import ChatDialect
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.dialects.openai.schema import DETOKENIZE, TOKENIZE

_NULL = msgspec.Raw(b"null")
_AT_ONCE = 1 << 14
"""Items of a JSON array that are written at once."""


class TokenizeRequest(NamedTuple):
    """frame: for the worker, still without the stream's number. model: the name that the client asks for."""

    frame: Count
    model: str


class TokenizeFormat(Protocol):
    """What `Tokenize` and `Detokenize` have in common."""

    name: ClassVar[str]

    def parse(self, body: bytes) -> TokenizeRequest:
        """Raises: BadRequest with the dotted path of the field to blame."""
        ...

    def answer(self, request: TokenizeRequest, counted: Counted, card: ModelCard) -> Iterator[bytes]:
        """Its pieces, each the work of a few milliseconds."""
        ...

    def error(self, error: StenoError, request_id: str = "") -> bytes: ...
    def openapi(self) -> dict[str, Any]: ...


class TextBody(msgspec.Struct):
    """`prompt` or `messages`; the fields beside `messages` are those of chat completions."""

    model: str | None = None
    prompt: str | None = None
    messages: msgspec.Raw = _NULL
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class IdsBody(msgspec.Struct):
    tokens: list[bounds.TokenId]
    model: str | None = None


_text = msgspec.json.Decoder(TextBody)
_ids = msgspec.json.Decoder(IdsBody)


class Tokenize:
    name: ClassVar[str] = "tokenize"

    def parse(self, body: bytes) -> TokenizeRequest:
        given = decode(_text, body)
        wants, is_chat = "strings" if given.return_token_strs else "ids", bytes(given.messages) != b"null"
        if is_chat and given.prompt is not None:
            raise BadRequest("prompt: send it or messages, not both", field="prompt")
        if is_chat:
            request = ChatDialect().parse(body)
            return TokenizeRequest(Count(0, request.job, wants), request.model)
        if given.prompt is None:
            raise BadRequest("prompt, a string, or messages is required", field="prompt")
        bare = given.add_special_tokens is False
        return TokenizeRequest(Count(0, Job(prompt_text=given.prompt), wants, bare), given.model or "")

    def answer(self, request: TokenizeRequest, counted: Counted, card: ModelCard) -> Iterator[bytes]:
        ids = bytes_to_ids(counted.ids)
        yield b'{"count":%d,"max_model_len":%d,"tokens":' % (counted.prompt_tokens, card.context_tokens)
        yield from _array(len(ids), lambda part: ids[part].tolist())
        yield b',"token_strs":'
        if request.frame.wants == "strings":
            yield from _array(len(counted.strings), lambda part: counted.strings[part])
            yield b"}"
        else:
            yield b"null}"

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return common.error_body(error)

    def openapi(self) -> dict[str, Any]:
        return TOKENIZE


class Detokenize:
    name: ClassVar[str] = "detokenize"

    def parse(self, body: bytes) -> TokenizeRequest:
        given = decode(_ids, body)
        ids = ids_to_bytes(given.tokens)
        return TokenizeRequest(Count(0, Job(prompt_ids=ids), "text"), given.model or "")

    def answer(self, request: TokenizeRequest, counted: Counted, card: ModelCard) -> Iterator[bytes]:
        yield to_json({"prompt": counted.text})

    def error(self, error: StenoError, request_id: str = "") -> bytes:
        return common.error_body(error)

    def openapi(self) -> dict[str, Any]:
        return DETOKENIZE


def _array(length: int, items: Callable[[slice], list[Any]]) -> Iterator[bytes]:
    """A JSON array, in pieces."""
    yield b"["
    for at in range(0, length, _AT_ONCE):
        yield b"," * bool(at) + to_json(items(slice(at, at + _AT_ONCE)))[1:-1]
    yield b"]"

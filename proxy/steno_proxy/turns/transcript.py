"""The transcript of one completion: stream events in, pieces for the dialect out, then the record.

Pure. Keeps I1: as many log-probabilities as ids, as many ids as the worker says it sampled, one version for each id; what
does not add up is an EngineFailed, never padded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from steno.contracts.chat import TokenLogprob, ToolCallPiece
from steno.contracts.errors import EngineFailed
from steno.contracts.records import TokenSpan
from steno.contracts.wire.frames import Delta, Finish, ModelCard, Shown, Started
from steno_proxy.dialects.base import Choice, Piece
from steno_proxy.session_cache.session_state import AnswerSoFar
from steno_proxy.sessions.messages.call_ids import client_call_id, parse_call_id

_CALL_ARGUMENTS, _CALL_NAME, _CALL_OWN_ID = 0, 1, 2
_CONTENT, _REASONING, _NO_BLOCK = -1, -2, -3


class ChoiceTranscript:
    """One completion, as far as it has come.

    Attributes:
        started, finish: the frames, None until they came.
        tokens: sampled so far. delivered: of those, how many have left for the client in events.
        reasoning_tokens: those that became reasoning; one that showed nothing goes with what came out next.
        ids, logprobs: int32 LE and float32 LE.
        card: of the model that says it.
        workers: who sampled what of it, where there were several: (worker_id, start, end), the last one not among them yet.
    """

    __slots__ = (
        "_at", "_block", "_calls", "_constrained", "_content", "_reasoning", "_said_tokens", "_spans", "_token_logprobs",
        "call_prefix", "card", "delivered", "finish", "ids", "logprobs", "reasoning_tokens", "started", "tokens", "turn_id",
        "workers",
    )  # fmt: skip

    def __init__(self, turn_id: str, call_prefix: str, card: ModelCard) -> None:
        self.turn_id = turn_id
        self.started: Started | None = None
        self.finish: Finish | None = None
        self.tokens = 0
        self.delivered = 0
        self.reasoning_tokens = 0
        self.ids = bytearray()
        self.logprobs = bytearray()
        self.call_prefix = call_prefix
        self.card = card
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[Any]] = {}
        self._token_logprobs: list[TokenLogprob] = []
        self._spans: list[list[Any]] = []
        self._constrained: list[list[int]] = []
        self._block = _NO_BLOCK  # the one that is open: the index of a call, or which text
        self._at = 0  # where it began in the pieces of that text
        self._said_tokens = 0
        self.workers: list[tuple[str, int, int]] = []

    def take(self, event: Started | Delta | Finish) -> Piece | None:
        """Take in one event. Returns: for a Delta, the piece of it that the client is to see; else None.

        Raises: EngineFailed: the events contradict each other (I1).
        """
        if type(event) is Delta:
            return self._delta(event)
        if type(event) is Started:
            if self._before:
                self._check_taken_over(event)
                return None
            self.started = event
        elif type(event) is Finish:
            if self.text_only and not self.tokens:
                self.tokens, self.reasoning_tokens = event.completion_tokens, event.reasoning_tokens
            if event.completion_tokens + self._before != self.tokens:
                sent = self.tokens - self._before
                raise EngineFailed(
                    f"Finish: completion_tokens: got {event.completion_tokens}, but the worker sent {sent} tokens"
                )
            self.finish = event
        return None

    def _delta(self, event: Delta) -> Piece:
        count = len(event.ids) >> 2
        if count:
            if len(event.logprobs) != len(event.ids) and not (self.card.synthetic and not event.logprobs):
                raise EngineFailed(f"{count} tokens came with {len(event.logprobs) >> 2} log-probabilities")
            start, end = self.tokens, self.tokens + count
            self.tokens = end
            self.ids += event.ids
            self.logprobs += event.logprobs
            if self._spans and self._spans[-1][0] == event.version:
                self._spans[-1][2] = end
            else:
                self._spans.append([event.version, start, end])
            if event.constrained:
                if self._constrained and self._constrained[-1][1] == start:
                    self._constrained[-1][1] = end
                else:
                    self._constrained.append([start, end])
        going_on = self._block
        if event.reasoning:
            if self._block != _REASONING:
                self._block, self._at = _REASONING, len(self._reasoning)
            self._reasoning.append(event.reasoning)
            self.reasoning_tokens += self.tokens - self._said_tokens
            self._said_tokens = self.tokens
        if event.content:
            if self._block != _CONTENT:
                self._block, self._at = _CONTENT, len(self._content)
            self._content.append(event.content)
        if event.content or event.tool_calls:
            self._said_tokens = self.tokens
        if event.tokens:
            self._token_logprobs += event.tokens
        calls = [self._call(call) for call in event.tool_calls] if event.tool_calls else []
        for call in calls:
            if (
                call.index != going_on
            ):  # else it ends the call that was open, and comes before the text of the same piece
                self._block = call.index
        return Piece(event.content, event.reasoning, calls, event.tokens, event.ids)

    def _call(self, piece: ToolCallPiece) -> ToolCallPiece:
        """The piece with the id that clients see; the model's own is kept for the index row."""
        known = self._calls.get(piece.index)
        if known is None:
            self._calls[piece.index] = [[piece.arguments], piece.name, piece.id]
            shown = client_call_id(self.call_prefix, self.turn_id, piece.index)
            return ToolCallPiece(piece.index, piece.arguments, shown, piece.name)
        known[_CALL_ARGUMENTS].append(piece.arguments)
        return ToolCallPiece(piece.index, piece.arguments)

    # -- attempts

    def is_empty(self) -> bool:
        """Whether nothing has come yet that another attempt would have to go on from."""
        return not (self.tokens or self._content or self._reasoning or self._calls)

    def taken_over(self, worker_id: str, card: ModelCard) -> None:
        """Another worker goes on. worker_id: of the worker before, which sampled what came since the last call. card: the new
        worker's."""
        if self.is_empty():
            self.card = card
        if self.tokens > self._before:
            self.workers.append((worker_id, self._before, self.tokens))

    def shown(self) -> Shown:
        calls = [sum(map(len, self._calls[i][_CALL_ARGUMENTS])) for i in sorted(self._calls)]
        return Shown(sum(map(len, self._reasoning)), sum(map(len, self._content)), calls)

    @property
    def _before(self) -> int:
        """Tokens of earlier attempts."""
        return self.workers[-1][2] if self.workers else 0

    @property
    def last_version(self) -> str:
        """The policy version that sampled last; "" before any has."""
        return str(self._spans[-1][0]) if self._spans else ""

    def _check_taken_over(self, started: Started) -> None:
        """Check that the worker that goes on has the same prompt, id for id (I1)."""
        assert self.started is not None
        before, after = self.started, started
        if (after.prompt_digest, after.prompt_tokens) != (before.prompt_digest, before.prompt_tokens):
            raise EngineFailed("Started: the worker that resumes the turn has a different prompt")

    # -- what the transcript holds

    @property
    def text_only(self) -> bool:
        """There will be no ids; `tokens` is 0 until the Finish tells the upstream's count."""
        return self.card.text_only

    @property
    def prompt_tokens(self) -> int:
        """Of the whole prompt; of a text-only one, what its upstream counted, once it has said so."""
        assert self.started is not None
        return (self.finish.prompt_tokens if self.text_only and self.finish else 0) or self.started.prompt_tokens

    @property
    def is_counted(self) -> bool:
        """Whether `tokens` says how much there is: a text-only completion that broke has text, and nobody counted it."""
        said = self._content or self._reasoning or self._calls
        return not (self.text_only and not self.tokens and said)

    def message(self, *, closed: bool = False) -> dict[str, Any]:
        """The canonical assistant message, with the tool-call ids that the client sees. closed: without the open block."""
        block = self._block if closed else _NO_BLOCK
        content = self._content[: self._at] if block == _CONTENT else self._content
        reasoning = self._reasoning[: self._at] if block == _REASONING else self._reasoning
        calls = [each for each in sorted(self._calls.items()) if each[0] != block]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = [
                {
                    "id": client_call_id(self.call_prefix, self.turn_id, index),
                    "type": "function",
                    "function": {"name": call[_CALL_NAME], "arguments": "".join(call[_CALL_ARGUMENTS])},
                }
                for index, call in calls
            ]
        return message

    def newest(self, queued: float, most: int) -> AnswerSoFar:
        """The end of what has come, for viewers: the last `most` characters of each text, and the last call."""
        reasoning, content = _end(self._reasoning, most), _end(self._content, most)
        calls = [call for _, call in sorted(self._calls.items())[-1:]]
        ends = [_end(call[_CALL_ARGUMENTS], most) for call in calls]
        cut = len(self._calls) > 1 or any(part.cut for part in (reasoning, content, *ends))
        named = [(call[_CALL_NAME], end.text) for call, end in zip(calls, ends, strict=True)]
        return AnswerSoFar(self.turn_id, queued, self.tokens, reasoning.text, content.text, named, cut)

    def pieces(self) -> list[Piece]:
        """What has come so far, for a client that begins to listen now. All ids, and the tokens of log-probabilities, come with
        the first."""
        pieces = pieces_of(self.message(), bytes(self.ids))
        if self._token_logprobs:
            pieces = pieces or [Piece()]
            pieces[0].tokens = list(self._token_logprobs)
        return pieces

    def own_call_ids(self) -> list[str]:
        """The model's own ids, by index; "" where its format has none (and for an index that never came)."""
        last = max(self._calls, default=-1)
        return [self._calls[i][_CALL_OWN_ID] if i in self._calls else "" for i in range(last + 1)]

    def call_ids(self) -> dict[str, str]:
        """The ids that the client sees -> the model's own, where its format has any."""
        return {
            client_call_id(self.call_prefix, self.turn_id, index): call[_CALL_OWN_ID]
            for index, call in sorted(self._calls.items())
            if call[_CALL_OWN_ID]
        }

    def versions(self) -> list[TokenSpan]:
        return [TokenSpan.model_construct(version=version, start=start, end=end) for version, start, end in self._spans]

    def constrained(self) -> list[tuple[int, int]]:
        """Ranges of tokens that were not drawn by plain temperature sampling."""
        started = self.started
        if started is not None and (started.constrained or not started.law.is_plain()):
            return [(0, self.tokens)] if self.ids else []
        return [(start, end) for start, end in self._constrained]

    def choice(self, index: int) -> Choice:
        assert self.started is not None and self.finish is not None
        return Choice(
            index=index,
            message=self.message(),
            finish_reason=self.finish.reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            cached_tokens=self.finish.cached_tokens or self.started.cached_tokens,
            tokens=self._token_logprobs,
            stop=self.finish.stop,
            reasoning_tokens=self.reasoning_tokens,
        )


class _TextEnd(NamedTuple):
    text: str
    cut: bool


def _end(parts: list[str], most: int) -> _TextEnd:
    """The last `most` characters of these parts together; as many parts are looked at as that takes."""
    taken: list[str] = []
    length = 0
    for part in reversed(parts):
        taken.append(part)
        length += len(part)
        if length >= most:
            break
    text = "".join(reversed(taken))[-most:]
    return _TextEnd(text, length > most or len(taken) < len(parts))


def pieces_of(message: dict[str, Any], ids: bytes = b"") -> list[Piece]:
    """A canonical assistant message as what a stream of it would have said, in as few pieces: reasoning, content, each call.

    Args: ids: of its tokens; they come with the first piece.
    """
    pieces = []
    if reasoning := message.get("reasoning_content"):
        pieces.append(Piece(reasoning=reasoning))
    if content := message.get("content"):
        pieces.append(Piece(content=content))
    for i, call in enumerate(message.get("tool_calls") or ()):
        named = parse_call_id(call["id"])
        function = call["function"]
        said = ToolCallPiece(named[1] if named else i, function["arguments"], call["id"], function["name"])
        pieces.append(Piece(tool_calls=[said]))
    if ids:
        pieces = pieces or [Piece()]
        pieces[0].ids = ids
    return pieces

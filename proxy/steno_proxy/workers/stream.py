"""One stream as the proxy sees it: the mailbox between a worker's socket, which must never wait, and one consumer.

The reader appends to a list and wakes one future; the consumer takes all there is. How much can lie in the list is bounded by
credit: `window_tokens` at most may be on the way or unread, and a worker that sends more breaks the protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from steno.contracts.errors import BY_CODE, ContextOverflow, EngineFailed, ProtocolError, StenoError
from steno.contracts.wire.frames import Cancel, Credit, Delta, Failed, Finish, ModelCard, Started, StreamEvent
from steno_proxy import metrics
from steno_proxy.workers.soundness import ExpectedAnswer, check_delta, check_started

MAX_CALLS = 4096
"""Tool calls of one completion."""
MAX_SAID_BYTES = 32 * 2**20
"""What one completion may say: characters, EVENT_BYTES for each delta, PIECE_BYTES for each part of a call. As much as a request
may be by default."""
EVENT_BYTES, PIECE_BYTES = 16, 64
MAX_ALTERNATIVES = 64
"""Per token, beside the one that was sampled; an agent may ask for 20."""
MAX_TEXT_ONLY_TOKENS = 4096
"""Log-probabilities for the client in one delta of a text-only model, which has no ids to count them by."""
MAX_LAW_ENTRIES = 2**18
"""Stops, biases, allowed ids and bad words together: of every token of a large vocabulary."""
MAX_MESSAGE_CHARS = 2000
FROM_WORKERS = frozenset({
    "invalid_request", "context_length_exceeded", "body_too_large", "rate_limited", "no_worker", "worker_lost", "engine_failed",
    "unsound_output",
})  # fmt: skip
"""Codes that a worker's `Failed` may have. Others speak of keys, sessions, budgets or stores, of which it knows nothing."""
MAX_RETRY_AFTER_S = 3600.0
"""A worker (or the upstream behind it) that asks for a longer wait is not believed: clients would sleep for it."""
SendFrame = Callable[[Cancel | Credit], None]


class Stream:
    """What `Hub.open` returns. One consumer.

    Attributes:
        worker_id, card: the worker that generates, and the card of its model.
        number: the stream's number on its worker's channel.
        process, channel: names of the worker's boot, and of the channel of that boot, that the stream is on.
        packet: number of the packet that its request left in. trial_id: of its turn.
        received_tokens: sampled ids that have arrived (I4), whether the consumer has taken them or not.
        mixed_kv: some of them were sampled with a cache that older weights had a part in.
    """

    __slots__ = (
        "_events", "_expected", "_failure", "_forget", "_prefix_tokens", "_repaid", "_said", "_send", "_spent", "_waiter",
        "_window", "card", "channel", "ended", "mixed_kv", "number", "packet", "process", "received_tokens", "started",
        "trial_id", "worker_id",
    )  # fmt: skip

    def __init__(
        self, number: int, worker_id: str, card: ModelCard, window_tokens: int, prefix_tokens: int,
        send: SendFrame, forget: Callable[[int], None], expected: ExpectedAnswer | None = None,
    ) -> None:  # fmt: skip
        self.number = number
        self.worker_id = worker_id
        self.card = card
        self.channel = self.process = worker_id
        self.packet = 0
        self.trial_id = ""
        self.received_tokens = 0
        self.mixed_kv = False
        self.started = False
        self.ended = False  # nothing more will be appended
        self._expected = expected or ExpectedAnswer()
        self._prefix_tokens = prefix_tokens
        self._window = window_tokens
        self._spent = 0  # credit used by what has arrived
        self._said = 0  # bytes, as MAX_SAID_BYTES counts
        self._repaid = 0  # how much of `_spent` was granted anew
        self._events: list[StreamEvent] = []
        self._failure: StenoError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._send = send
        self._forget = forget

    # -- the consumer's side

    async def next(self) -> list[StreamEvent]:
        """Wait, then return all events since the last call, and grant credit for them. Cancel-safe.

        The last list ends with Finish. After it, and for a second consumer, RuntimeError.
        Raises: StenoError: what the worker failed with, or WorkerLost; after all that came before it was taken.
        """
        if not self._events:
            if self._failure is not None:
                raise self._failure
            if self.ended or self._waiter is not None:
                raise RuntimeError("the stream has ended" if self.ended else "a stream has one consumer")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self._events:
                assert self._failure is not None
                raise self._failure
        events, self._events = self._events, []
        if not self.ended:
            owed = self._spent - self._repaid  # the consumer has taken all of it
            if owed * 2 >= self._window:  # half a window: one Credit per thousands of tokens, and never a stall
                self._repaid = self._spent
                self._send(Credit(self.number, owed))
        return events

    def put_back(self, events: list[StreamEvent]) -> None:
        """Give back the last events of `next`, unread: the next call returns them first."""
        self._events[:0] = events

    def leftover(self) -> list[StreamEvent]:
        """Return, after `cancel`, the events that `next` has not returned. The consumer is done."""
        events, self._events = self._events, []
        return events

    def discard(self, reason: str) -> None:
        """`cancel` without a consumer: tokens that have arrived are counted as late (I4)."""
        self.cancel(reason)
        metrics.LATE_TOKENS.inc(sum(len(event.ids) >> 2 for event in self.leftover() if type(event) is Delta))

    def cancel(self, reason: str) -> None:
        """Stop the generation; later frames are dropped. Idempotent. `next` then ends with `Finish(cancelled)`."""
        if self.ended:
            return
        self._send(Cancel(self.number, reason))
        self._end()
        self._events.append(Finish(self.number, "cancelled", self.received_tokens))
        self._wake()

    # -- the hub's side

    def deliver(self, event: Started | Delta | Finish | Failed) -> None:
        """Take in a frame. One that exceeds a bound is dropped, and ends this turn with EngineFailed.

        Raises: ProtocolError: the frame is out of order or malformed. UnsoundOutput: its data are impossible; the caller must
            then call `refuse`.
        """
        kind = type(event)
        if kind is Delta:
            size = len(event.ids)  # type: ignore[union-attr]
            if size & 3 or (len(event.logprobs) != size and not self._may_lack_logprobs(event)):  # type: ignore
                raise ProtocolError("Delta: ids and logprobs must be four bytes for each token")
            if size and self.card.text_only:
                raise ProtocolError("Delta: ids from a model that was announced as text only")
            if not self.started:
                raise ProtocolError("Delta before Started")
            if self._spent - self._repaid >= self._window:
                raise ProtocolError("Delta: more tokens than the stream's credit")
            self._said += EVENT_BYTES + len(event.content) + len(event.reasoning)  # type: ignore[union-attr]
            if event.tool_calls or event.tokens or self._said > MAX_SAID_BYTES:  # type: ignore[union-attr]
                over = self._over(event)  # type: ignore[arg-type]
                if over:
                    self._refuse(f"Delta: {over}")
                    return
            if size or event.tokens:  # type: ignore[union-attr]
                check_delta(event, self.received_tokens, self._expected, self.card)  # type: ignore[arg-type]
            tokens = size >> 2
            self.received_tokens += tokens
            self._spent += tokens or 1  # text that comes without a token (held back until now) takes one
            if event.mixed_kv:  # type: ignore[union-attr]
                self.mixed_kv = True
        elif kind is Started:
            if self.started:
                raise ProtocolError("Started twice")
            self._check_prompt(event)  # type: ignore[arg-type]
            over = self._over_prompt(event)  # type: ignore[arg-type]
            if over:
                self._refuse(f"Started: {over}")
                return
            check_started(event, self._expected, self.card)  # type: ignore[arg-type]
            self.started = True
        elif kind is Failed:
            self.fail(rebuild(event))  # type: ignore[arg-type]
            return
        else:
            if not self.started or not self._is_count(event):  # type: ignore[arg-type]
                raise ProtocolError("Finish before Started, or with another number of tokens than came")
            over = self._over_end(event)  # type: ignore[arg-type]
            if over:
                self._refuse(f"Finish: {over}")
                return
            self._end()
        self._events.append(event)  # type: ignore[arg-type]
        if self._waiter is not None:
            self._wake()

    def fail(self, error: StenoError) -> None:
        """End with an error. `next` returns what has arrived, then raises it."""
        if self.ended:
            return
        self._end()
        self._failure = error
        self._wake()

    def refuse(self, error: StenoError) -> None:
        """What the worker sent can't be true: tell it to stop. `next` returns what came before, then raises this error."""
        if not self.ended:
            self._send(Cancel(self.number, error.code))
        self.fail(error)

    def _may_lack_logprobs(self, event: Delta) -> bool:
        """Whether log-probabilities may be missing (I1): only where the engine is scripted."""
        return self.card.synthetic and not event.logprobs

    def _is_count(self, finish: Finish) -> bool:
        """Whether the number of tokens is right. A text-only engine repeats its upstream's, which nobody can check."""
        return self.card.text_only or finish.completion_tokens == self.received_tokens

    def _check_prompt(self, event: Started) -> None:
        if len(event.new_ids) & 3 or event.prompt_tokens != event.kept_tokens + (len(event.new_ids) >> 2):
            raise ProtocolError("Started: prompt_tokens must be kept_tokens plus the number of ids in new_ids")
        if event.kept_tokens not in (0, self._prefix_tokens):
            raise ProtocolError("Started: keeps a part of the prefix (I2)")

    # -- bounds (what they are over, in words; "": nothing)

    def _over(self, delta: Delta) -> str:
        for piece in delta.tool_calls:
            if not 0 <= piece.index < MAX_CALLS:
                return f"tool_calls: index {piece.index}, 0 to {MAX_CALLS - 1} are allowed"
            self._said += PIECE_BYTES + len(piece.arguments) + len(piece.id) + len(piece.name)
        if delta.tokens:
            most = MAX_TEXT_ONLY_TOKENS if self.card.text_only else len(delta.ids) >> 2
            if len(delta.tokens) > most:
                return f"tokens: {len(delta.tokens)} log-probabilities, {most} are allowed"
            for token in delta.tokens:
                if len(token.top) > MAX_ALTERNATIVES:
                    return f"tokens: {len(token.top)} alternatives of one token, {MAX_ALTERNATIVES} are allowed"
                self._said += len(token.text) + len(token.raw)
                for text, raw, _ in token.top:
                    self._said += len(text) + len(raw)
        if self._said > MAX_SAID_BYTES:
            return f"a completion of {self._said} bytes, at most {MAX_SAID_BYTES} are allowed"
        return ""

    def _over_prompt(self, started: Started) -> str:
        law = started.law
        entries = len(law.stop) + len(law.stop_token_ids) + len(law.logit_bias)
        entries += len(law.allowed_token_ids) + len(law.bad_words)
        if entries > MAX_LAW_ENTRIES:
            return f"law: {entries} stops and biases, {MAX_LAW_ENTRIES} are allowed"
        self._said += len(started.refused) + sum(map(len, [*law.stop, *law.bad_words, *started.dropped]))
        self._said += PIECE_BYTES * len(started.dropped)
        return f"{self._said} bytes of text, {MAX_SAID_BYTES} are allowed" if self._said > MAX_SAID_BYTES else ""

    def _over_end(self, finish: Finish) -> str:
        counts = (finish.completion_tokens, finish.cached_tokens, finish.prompt_tokens, finish.reasoning_tokens)
        if not all(0 <= count < 2**31 for count in counts):
            return f"token counts {counts}, 0 to {2**31 - 1} are allowed"
        if len(finish.stop) > MAX_SAID_BYTES:
            return f"stop: {len(finish.stop)} characters, {MAX_SAID_BYTES} are allowed"
        return ""

    def _refuse(self, what: str) -> None:
        """End this turn alone: the worker sends more for it than is allowed."""
        self._send(Cancel(self.number, "out of bounds"))
        self.fail(EngineFailed(f"the worker's answer is out of bounds: {what}"))

    def _end(self) -> None:
        self.ended = True
        self._forget(self.number)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def rebuild(failed: Failed) -> StenoError:
    """Turn a Failed frame into the error that the worker raised; EngineFailed, if a worker may not use its code."""
    kind = BY_CODE[failed.code] if failed.code in FROM_WORKERS else EngineFailed
    message, field = failed.message[:MAX_MESSAGE_CHARS], failed.field[:MAX_MESSAGE_CHARS] or None
    if issubclass(kind, ContextOverflow):
        numbers = {
            key: value
            for key in ("prompt_tokens", "context_tokens")
            if isinstance(value := failed.detail.get(key), int) and 0 <= value < 2**31
        }
        return kind(message, field=field, **numbers)
    wait_s = failed.detail.get("retry_after_s")
    if not kind.retryable or not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_RETRY_AFTER_S:
        wait_s = None
    return kind(message, field=field, retry_after_s=wait_s)

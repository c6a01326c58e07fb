"""The error tree: everything that Steno refuses or fails at, and what a caller can do about it.

    StenoError                       status  retry   boundary
    ├── BadRequest                   400     no      a request that can't be honoured; names the field
    │   ├── PreviousNotFound         400     no      the response that a request goes on from is not there
    │   └── ContextOverflow          400     no      prompt (+ 1 token) exceeds the model's context
    ├── Unauthorized                 401     no      no key
    ├── Forbidden                    403     no      a key that does not open this, whatever it is
    ├── NotFound                     404     no      no such trial, group, turn or model
    ├── Conflict                     409     no      contradicts what is on record
    │   ├── WeightsRefused           409     no      an update's weights are not what was said, or not this model's
    │   ├── Superseded               409     no      another trainer has taken over the run: this one must end
    │   └── TrainerAlive             409     no      the run's trainer was heard of just now; says when it may be taken over
    ├── Gone                         410     no      the session is completed or deleted
    │   └── ReplayDiverged           410     no      a forked trial asked something else than its origin; ends the session
    ├── BodyTimeout                  408     no      a body that took too long to come
    ├── BodyTooLarge                 413     no      body over the configured bound
    ├── BudgetSpent                  403     no      the trial's own limit; ends the session unless its turns still run
    ├── TooManyRequests              429     later   a rate, or a full queue
    ├── NoWorker                     503     later   nothing can serve this now
    ├── WorkerLost                   503     later   the worker went away and did not come back in time
    ├── EngineFailed                 503     later   the engine died or gave up on this request
    │   └── UnsoundOutput            503     later   what it sampled can't be: a log-probability that is no number, say (I1)
    ├── StoreUnavailable             503     later   the turn could not be made durable
    ├── StoreFull                    503     later   no room for new trials; those that run go on
    ├── ArchiveUnreadable            503     later   what is in the archive can't be read, or written
    ├── ObjectStoreFailed            503     later   an object store of weights can't be read, or written
    │   └── ObjectMissing            503     later   what it is said to have is not there
    ├── ProtocolError                502     later   a peer broke the wire protocol; its socket is closed
    ├── Unreachable                  –       later   raised by clients: no answer from the proxy
    └── ConfigError                  –       –       at start-up; names the offending key
        └── CannotListen             –       no      an address that is taken, or not this machine's

A surprise (any other exception) answers 500 with fixed text and a request id, never the exception's own words.
"""

from __future__ import annotations

import errno
from typing import ClassVar

DEFAULT_RETRY_AFTER_S = 1.0
"""What retryable errors say where whoever raised them knew no better."""


class StenoError(Exception):
    """Base of all expected failures.

    Attributes:
        status: HTTP status that answers it.
        code: stable machine-readable word, part of the API; also what travels in a `Failed` frame.
        retryable: whether the same request may succeed later.
        field: dotted path of the offending field (`tools.0.function.name`), if one is to blame.
        retry_after_s: what to say in `Retry-After`; None where retrying does not help.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        if self.retry_after_s is None and self.retryable:
            self.retry_after_s = DEFAULT_RETRY_AFTER_S


class BadRequest(StenoError):
    """The request can't be done as it is; `field` names what is wrong."""

    status = 400
    code = "invalid_request"


class PreviousNotFound(BadRequest):
    """What a request goes on from is not there. OpenAI's own word for it."""

    code = "previous_response_not_found"


class ContextOverflow(BadRequest):
    """Carries both numbers, since each dialect words its own overflow error from them. 0: not known.

    Attributes: prompt_alone: both are known, and the prompt leaves no room for a token of the answer. If False, only the message
        says what is too long: prompt and answer together, for one.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, prompt_tokens: int = 0, context_tokens: int = 0, field: str | None = None
    ) -> None:
        super().__init__(message, field=field)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        self.prompt_alone = prompt_tokens >= context_tokens > 0


class Unauthorized(StenoError):
    """No key was given, and the proxy asks for one."""

    status = 401
    code = "invalid_api_key"


class Forbidden(StenoError):
    """The key does not open this, whether or not it is there."""

    status = 403
    code = "forbidden"


class BudgetSpent(StenoError):
    """A trial's own limit. 403, since every SDK retries 429 and none retries 403."""

    status = 403
    code = "budget_spent"


class NotFound(StenoError):
    """There is no such trial, group, turn, update, tokenizer or model name."""

    status = 404
    code = "not_found"


class Conflict(StenoError):
    """It contradicts what is on record: a lease that was lost, another reward, other weights under a known version."""

    status = 409
    code = "conflict"


class WeightsRefused(Conflict):
    """The weights are not those that the update names, or not this model's."""

    code = "weights_refused"


class Superseded(Conflict):
    """Another trainer has taken over the run: this one must end."""

    code = "superseded"


class TrainerAlive(Conflict):
    """Carries `retry_after_s`: a trainer that died a moment ago can be taken over then; one that lives refuses again."""

    code = "trainer_alive"


class Gone(StenoError):
    """The session has ended or was deleted."""

    status = 410
    code = "session_closed"


class ReplayDiverged(Gone):
    """A forked trial asked what its origin was not asked, before the turn that it forks at. It has ended, and sampled nothing."""

    code = "replay_diverged"


class BodyTimeout(StenoError):
    """The client took too long to send its body."""

    status = 408
    code = "body_timeout"


class BodyTooLarge(StenoError):
    """The body is larger than the proxy takes."""

    status = 413
    code = "body_too_large"


class TooManyRequests(StenoError):
    """Too many requests at a time, or too often; `retry_after_s` says when to try again."""

    status = 429
    code = "rate_limited"
    retryable = True


class NoWorker(StenoError):
    """No worker can serve this now."""

    status = 503
    code = "no_worker"
    retryable = True


class WorkerLost(StenoError):
    """The worker went away and did not come back in time."""

    status = 503
    code = "worker_lost"
    retryable = True


class EngineFailed(StenoError):
    """The engine failed at this request."""

    status = 503
    code = "engine_failed"
    retryable = True


class UnsoundOutput(EngineFailed):
    """Tokens, log-probabilities or a prompt that can't be recorded (I1). Nothing of it goes on record."""

    code = "unsound_output"


class StoreUnavailable(StenoError):
    """The proxy's store does not answer: nothing new can be put on record."""

    status = 503
    code = "store_unavailable"
    retryable = True


class StoreFull(StenoError):
    """The proxy's store has no room for new trials; those that run go on."""

    status = 503
    code = "store_full"
    retryable = True


class ArchiveUnreadable(StenoError):
    """What is in the archive can't be read, or written, now."""

    status = 503
    code = "archive_unreadable"
    retryable = True


class ObjectStoreFailed(StenoError):
    """An object store of weights can't be read, or written."""

    status = 503
    code = "object_store_failed"
    retryable = True


class ObjectMissing(ObjectStoreFailed):
    """The object store does not have what it is said to have."""

    code = "object_missing"


class ProtocolError(StenoError):
    """A peer sent what the protocol does not allow; of clients: the answer is not one of a Steno proxy."""

    status = 502
    code = "protocol_error"
    retryable = True


class Unreachable(StenoError):
    """No answer from the proxy. Raised by clients."""

    code = "unreachable"
    retryable = True


class ConfigError(StenoError):
    """A setting or an argument that can't be; `field` names it."""

    code = "config_error"


class CannotListen(ConfigError):
    """The program can't listen at the port that the setting `field` names. The setting may be right: the program that holds the
    address may give it up."""

    code = "cannot_listen"

    def __init__(self, field: str, host: str, port: int, error: OSError) -> None:
        why = "the address is in use already" if error.errno == errno.EADDRINUSE else error.strerror
        super().__init__(f"{field}: can't listen on {host}:{port}: {why}", field=field)


def _subclasses(cls: type[StenoError]) -> list[type[StenoError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _subclasses(sub))]


BY_CODE: dict[str, type[StenoError]] = {cls.code: cls for cls in _subclasses(StenoError)}
"""For errors that crossed a wire: `BY_CODE.get(code, StenoError)`."""

"""Bodies of the control plane's REST calls, one definition each, for `proxy/steno_proxy/api/control` and `steno/client/calls.py`.

The records themselves are in `records.py`. Every list is a page: `items` and what to pass to get the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from steno.contracts.errors import ArchiveUnreadable
from steno.contracts.json_limits import JsonObject, storable
from steno.contracts.records import MAX_REWARD, TRIAL_ID, ForkOf, Group, Limits, Sample, SamplingPolicy, Session, Turn

STEPS = "/steps"
"""`GET /runs/{run_id}` of a run whose id ended like this would be read as `GET /runs/{run_id}/steps` of another one."""


def _no_dots(value: str) -> str:
    if value in (".", ".."):
        raise ValueError(f"got {value!r}, must not be '.' or '..': HTTP clients remove these from a URL")
    return value


def _run_id(value: str) -> str:
    if value.endswith(STEPS):
        raise ValueError(
            f"a run id can't end in {STEPS!r}, got {value!r}: that is where the steps of run {value[: -len(STEPS)]!r} are"
        )
    return value


END = "end"
"""The cursor of the event that ends a session: after it there is none."""
NewRunId = Annotated[str, Field(max_length=128), AfterValidator(_run_id), AfterValidator(_no_dots)]
"""Of a run that comes to be with what is registered. It may contain `/`."""
MOST_TRIALS = 4096
"""Of one group."""
RUN_KEY = "rk-steno-"
"""What the key of a run begins with."""


class SessionSpec(BaseModel):
    """`POST /sessions` and `POST /sessions/{trial_id}`. Idempotent by trial_id; without one, a new id is made.

    Of a trial that is on record, run_id, sampling, limits and fork_of that are given must be its own (409); its metadata stays.
    fork_of: an ended trial; sampling is its origin's where it is not given."""

    model_config = ConfigDict(extra="forbid")
    trial_id: str | None = Field(None, pattern=TRIAL_ID)
    run_id: NewRunId | None = None
    metadata: JsonObject = Field(default_factory=dict)
    sampling: SamplingPolicy = Field(default_factory=SamplingPolicy)
    limits: Limits = Field(default_factory=Limits)
    fork_of: ForkOf | None = None


class GroupSpec(BaseModel):
    """`POST /groups`. Idempotent by group_id; without one, a new id is made. Trials are named `<group_id>.<i>`."""

    model_config = ConfigDict(extra="forbid")
    group_id: Annotated[str, AfterValidator(_no_dots)] | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,120}$")
    run_id: NewRunId | None = None
    task: JsonObject = Field(default_factory=dict)
    withheld: JsonObject = Field(
        default_factory=dict,
        description="fields of the task that agents must not see, to score trials again; kept only if the proxy asks for keys",
    )
    size: int = Field(ge=1, le=MOST_TRIALS)
    deadline_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds after creation: then it is served as it is"
    )
    purpose: Literal["train", "eval"] = "train"
    sampling: SamplingPolicy = Field(default_factory=SamplingPolicy)
    limits: Limits = Field(default_factory=Limits)
    fork_of: ForkOf | None = Field(None, description="every trial of the group begins with this recorded turn")
    rescore_of: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]{1,120}$",
        description="an ended group of as many trials: nothing is sampled, each has the turns of one of its trials, and a reward "
        "of its own",
    )


class Trial(BaseModel):
    """A registered trial: what a harness hands to its agent.

    urls: base URL for each kind of client: `openai` (ends in /v1), `anthropic` and `gemini` (without a version).
    api_key: the agent's key; None where the proxy asks for none.
    """

    model_config = ConfigDict(extra="forbid")
    session: Session
    urls: dict[str, str]
    api_key: str | None = None


class GroupTrials(BaseModel):
    """A group and its trials. harness_key completes and reads these trials and nothing else; None where auth is off."""

    model_config = ConfigDict(extra="forbid")
    group: Group
    trials: list[Trial]
    harness_key: str | None = None


class RunKey(BaseModel):
    """`POST /runs/{run_id}/key`. key: reads the run, makes its groups, claims, reads and completes their trials (and gets their
    agents' keys), says that its rollouts are over, and nothing else; always the same until the trial secret changes. None where
    auth is off."""

    model_config = ConfigDict(extra="forbid")
    run_id: str
    key: str | None = None


class Completion(BaseModel):
    """`POST /sessions/{trial_id}/complete`. The same body again changes nothing; another reward or status is 409, unless the
    session awaits its reward (`final`): then metrics are added to those that it has, and it may be given up (`aborted`)."""

    model_config = ConfigDict(extra="forbid")
    reward: float | None = Field(
        None, ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False, description="None: not scored; 0.0 is a measured zero"
    )
    status: Literal["completed", "aborted"] = "completed"
    end_reason: str = Field(
        "completed", max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$", description="one line; it is logged"
    )
    metrics: Annotated[dict[str, FiniteFloat], AfterValidator(storable)] = Field(default_factory=dict)
    final: bool = Field(
        True,
        description="false: the trial has ended, and its reward comes later, by the same call: its group waits for that",
    )
    claim: int | None = Field(
        None,
        ge=0,
        le=999_999_999,
        description="epoch of the claim under which its launcher ends it; another one is 409",
    )

    @model_validator(mode="after")
    def _waits_for_nothing_said(self) -> Self:
        if not self.final and (self.reward is not None or self.status != "completed"):
            raise ValueError("final: got false, must be true with a reward, and where status is 'aborted'")
        return self


class TaskStep(BaseModel):
    """`POST /sessions/{trial_id}/task-step`. The same again changes nothing. name: None: turns belong to no step from now on."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[
        str | None,
        Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$", description="one line"),
        AfterValidator(storable),
    ]


class KeyRotation(BaseModel):
    """`POST /sessions/{trial_id}/rotate-key`, which needs no body."""

    model_config = ConfigDict(extra="forbid")
    generation: int | None = Field(
        None,
        ge=1,
        le=999_999_999,
        description="generation of the new key; the same number again changes nothing; default: the next",
    )


class SessionPage(BaseModel):
    """next_cursor: pass as `cursor`; None on the last page. unreadable: trial ids that belong here, and that the archive can't
    give now: asked for alone, each says why."""

    items: list[Session]
    next_cursor: str | None = None
    unreadable: list[str] = Field(default_factory=list)


_NAMED = 20
"""Sessions that an error names."""


def not_given(unreadable: Sequence[str]) -> ArchiveUnreadable | None:
    """The error for a caller that needs all sessions of a page, of its `unreadable`; None: the page has them all."""
    if not unreadable:
        return None
    more = f" and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
    names = ", ".join(unreadable[:_NAMED]) + more
    return ArchiveUnreadable(f"sessions in the archive can't be read now: {names}; each says why when asked for alone")


class TurnPage(BaseModel):
    """In commit order. next_start: pass as `start`; None on the last page."""

    items: list[Turn]
    next_start: int | None = None


class UnreadableTurn(BaseModel):
    """A turn on record that does not add up, or goes on from one: no sample holds it. completion_tokens: that were sampled."""

    turn_id: str
    reason: str
    completion_tokens: int = 0


class TokenizerList(BaseModel):
    """`GET /workers/tokenizers`: keys of those whose texts are kept (`Turn.tokenizer`)."""

    items: list[str]


TEXTS_SUFFIX = ".tokenizers.jsonl"
"""Ends the name of the file beside exported turns that has a line of TokenTexts for each tokenizer of theirs."""


class TokenTexts(BaseModel):
    """`GET /workers/tokenizers/{key}`. texts: of each id, by its number; "": no token; bytes that are no UTF-8 by themselves are
    written as `<0xE2>`. special: ids of special tokens (ends, headers, marks), ascending."""

    tokenizer: str
    texts: list[str]
    special: list[int]


class SampleList(BaseModel):
    """One per leaf of the conversation tree, in commit order of the leaves.

    unreadable: turns that no sample holds, since they, or what they go on from, do not add up: older proxies recorded whatever
    broken workers said.
    """

    items: list[Sample]
    unreadable: list[UnreadableTurn] = Field(default_factory=list)


class ErrorBody(BaseModel):
    """What went wrong. `code` is a stable word (`errors.BY_CODE`), `field` the dotted path of a field to blame."""

    code: str
    message: str
    field: str | None = None
    retryable: bool = False


class ErrorEnvelope(BaseModel):
    """The one envelope of every control-plane error. The request id also stands in the `x-request-id` header and the log."""

    error: ErrorBody
    request_id: str

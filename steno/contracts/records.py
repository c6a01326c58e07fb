"""What is on record: groups, sessions, turns, samples. One definition each, for the store, the REST API and its clients.

Token arrays are `bytes`: little-endian int32 ids, little-endian float32 log-probabilities. They travel and rest like this in
msgpack; in JSON (`model_dump_json`) they are lists of numbers, under the same keys (`arrays.py`).
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from steno.contracts.arrays import Digest, Halves, Logprobs, Mask, TokenIds, numpy_array
from steno.contracts.arrays import bytes_to_floats as bytes_to_floats
from steno.contracts.arrays import bytes_to_halves as bytes_to_halves
from steno.contracts.arrays import bytes_to_ids as bytes_to_ids
from steno.contracts.arrays import floats_to_bytes as floats_to_bytes
from steno.contracts.arrays import halves_to_bytes as halves_to_bytes
from steno.contracts.arrays import ids_to_bytes as ids_to_bytes
from steno.contracts.notes import Notes

if TYPE_CHECKING:
    from numpy import bool_, float32, int32
    from numpy.typing import NDArray

MAX_REWARD = 1e6
"""Largest absolute value of a reward. Squares of rewards are summed: far larger ones overflow, and end a training run."""
TRIAL_ID = r"^[A-Za-z0-9._-]{1,128}$"
RESERVED_TRIAL_IDS = frozenset(
    (
        "sessions groups leases runs workers policy ui v1 v1beta"
        " healthz readyz metrics docs redoc openapi.json favicon.ico . .."
    ).split()
)
"""First path words of the control plane (and `.`, `..`, which HTTP clients remove from URLs): no trial may have one as its id."""


@lru_cache(maxsize=256)
def tokenizer_key(digest: str) -> bytes:
    """`ModelCard.tokenizer_digest` -> 8 bytes; b"" for a worker that does not say what it has."""
    return blake2b(digest.encode(), digest_size=8).digest() if digest else b""


MOST_LOGPROB = 1e-4
"""A log-probability is at most 0; float32 sums over a vocabulary may round this far above it."""
OPEN = "open"
"""The finish reason of a turn that is on record before it has ended: a block of its answer was closed, and the client may act on
it (I3). The commit of the whole turn takes its place. One that stays open was cut off by the end of its proxy."""


class ForkReason(StrEnum):
    """What was observed when a turn did not simply continue the newest turn of its branch. None (absent): it did.

    The first turn of a session is a root without a reason.
    """

    SIBLING = "sibling"  # same parent and same new messages as a recorded turn: `n`, a re-ask, a retry
    DIVERGED = "diverged"  # same parent as a recorded turn, other new messages
    NEW_CONVERSATION = "new_conversation"  # shares no message with anything recorded (sub-agent, title, compaction)
    TOOLS_CHANGED = "tools_changed"  # messages continue a recorded branch, the tool list is another
    OPTIONS_CHANGED = "options_changed"  # messages continue a recorded branch, template options are others
    SYSTEM_CHANGED = "system_changed"  # the first message differs and is a system message, later ones match
    HISTORY_REWRITTEN = "history_rewritten"  # a recorded message was replaced by another
    HISTORY_DROPPED = "history_dropped"  # a recorded message is missing; what follows it is still there
    ASSISTANT_REWRITTEN = "assistant_rewritten"  # a recorded completion came back as something else
    RENDER_DIFFERS = "render_differs"  # recognised, but the model's template renders the history differently
    RENDER_REFUSED = "render_refused"  # recognised, but the template can't take the new messages alone
    TOKENIZER_CHANGED = "tokenizer_changed"  # recognised, but no worker has the tokenizer that its ids are of


class TokenSpan(BaseModel):
    """Half-open range [start, end) of completion tokens. `version` is the policy version that sampled them."""

    model_config = ConfigDict(extra="forbid")
    version: str
    start: int
    end: int


class WorkerSpan(BaseModel):
    """Half-open range [start, end) of completion tokens, and the worker that sampled them."""

    model_config = ConfigDict(extra="forbid")
    worker_id: str
    start: int
    end: int


class SamplingPolicy(BaseModel):
    """What a trial does to the sampling its agent asks for.

    force: fields of the sampling law that override the agent's, e.g. {"temperature": 1.0, "top_p": 1.0}.
    neutralise: take out what bends the law (truncation, penalties, logit bias, strict tools, forced tool choice), so that
        every token can be trained. None: True for groups with purpose `train`, else False.
    """

    model_config = ConfigDict(extra="forbid")
    force: dict[str, Any] = Field(default_factory=dict)
    neutralise: bool | None = None


class Limits(BaseModel):
    """What a trial may spend; None is unlimited. A spent limit ends the session with `end_reason` `limit:<name>`."""

    model_config = ConfigDict(extra="forbid")
    max_turns: int | None = Field(None, ge=1, le=2**63 - 1)
    max_tokens: int | None = Field(None, ge=1, le=2**63 - 1, description="sampled tokens, over all turns")
    max_wall_s: float | None = Field(None, gt=0, allow_inf_nan=False, description="seconds since the first turn")
    max_idle_s: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="seconds since the last activity, from the first turn on"
    )


class MayDiffer(StrEnum):
    """Parts of requests that may differ between a forked trial and its origin: texts are compared without these parts."""

    DATES = "dates"  # 2026-11-23, 2026-11-23T10:00:00Z, Nov 23, 2026, Monday, 23 November 2026, 10:00, 10:00:00.5
    TEMPORARY_PATHS = "temporary_paths"  # below /tmp, /var/tmp, /private/tmp, /var/folders, /dev/shm
    IDS = "ids"  # UUIDs; hexadecimal words of 7 and more with a digit and a letter; call_…, toolu_…, msg_… and the like
    PATHS = "paths"  # every absolute path
    NUMBERS = "numbers"  # every number


USUALLY_DIFFER = (MayDiffer.DATES, MayDiffer.TEMPORARY_PATHS, MayDiffer.IDS)
"""What no two runs of an agent ask alike."""


class ForkOf(BaseModel):
    """Where a forked trial begins: `turn_id` of an ended trial, its origin. Requests up to this turn are answered from the
    origin's record; requests after it are sampled.

    resample: the turn itself is sampled anew; else it is the last one that is answered from the record.
    may_differ: what of the trial's requests need not be as recorded.
    """

    model_config = ConfigDict(extra="forbid")
    trial_id: str = Field(pattern=TRIAL_ID)
    turn_id: str = Field(min_length=1, max_length=64)
    resample: bool = False
    may_differ: list[MayDiffer] = Field(default_factory=lambda: list(USUALLY_DIFFER), max_length=len(MayDiffer))


SessionStatus = Literal["open", "completed", "aborted", "deleted"]


class Counts(BaseModel):
    """Of a session's turns, in all."""

    turns: int = 0
    prompt_tokens: int = Field(0, description="new prompt tokens, summed over turns")
    completion_tokens: int = 0
    constrained_tokens: int = 0
    forks: int = 0


class Session(BaseModel):
    """The recording of a trial, without its turns. Times are Unix seconds."""

    model_config = ConfigDict(extra="forbid")
    trial_id: str
    group_id: str | None = None
    run_id: str | None = None
    status: SessionStatus = "open"
    end_reason: str | None = None
    reward: float | None = Field(None, description="None until posted; 0.0 is a measured zero")
    awaits_reward: bool = Field(
        False,
        description="it has ended, and will be scored (or given up) later; its group waits for that, until the deadline",
    )
    metrics: dict[str, float] = Field(default_factory=dict)
    marks: list[str] = Field(default_factory=list, description="text_only, synthetic: never leased")
    metadata: dict[str, Any] = Field(default_factory=dict)
    sampling: SamplingPolicy = Field(default_factory=SamplingPolicy)
    limits: Limits = Field(default_factory=Limits)
    fork_of: ForkOf | None = Field(None, description="the recorded turn that this trial begins with")
    rescore_of: str | None = Field(
        None,
        description="the trial whose turns these are; nothing is sampled in this one, which has a reward of its own",
    )
    key_generation: int = Field(1, ge=1, description="generation of the agent's key; keys of earlier ones are refused")
    task_step: str | None = Field(
        None, description="task step of the turns that begin now, if the task has several; None: no step was set"
    )
    counts: Counts = Field(default_factory=Counts)
    created_at: float
    updated_at: float
    first_turn_at: float | None = None
    ended_at: float | None = None
    notes: Notes | None = Field(
        None, description="refused requests, and parts that were left out; only if one session is read, not in lists"
    )


class Group(BaseModel):
    """The trials of one task whose rewards are centred together.

    withheld: fields of the task that its agents must not see, for whoever scores them; kept where the proxy asks for keys.
    rescore_of: the group whose trials these score anew (`Session.rescore_of`), in the same order.
    """

    model_config = ConfigDict(extra="forbid")
    group_id: str
    run_id: str | None = None
    task: dict[str, Any] = Field(default_factory=dict)
    withheld: dict[str, Any] = Field(default_factory=dict)
    size: int = Field(ge=1)
    deadline_s: float | None = Field(None, description="seconds after creation at which the group is served as it is")
    purpose: Literal["train", "eval"] = "train"
    sampling: SamplingPolicy = Field(default_factory=SamplingPolicy)
    limits: Limits = Field(default_factory=Limits)
    fork_of: ForkOf | None = None
    rescore_of: str | None = None
    trial_ids: list[str] = Field(default_factory=list)
    created_at: float


class Timings(BaseModel):
    """Unix seconds, by the clock of the proxy's store (Redis); None where it never came to that."""

    queued: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class TurnArrays(NamedTuple):
    """A turn's token arrays. P new prompt tokens, C completion tokens."""

    new_prompt_ids: NDArray[int32]
    """int32[P]"""
    completion_ids: NDArray[int32]
    """int32[C]"""
    sampling_logprobs: NDArray[float32]
    """float32[C]"""


class TurnAnnotation(BaseModel):
    """What the trainer of a turn's tokens saw in them. The newest that was posted.

    step, version: of the step that trained them: its number, and the weights that it made. advantage: of the trial; None: not
    said. differences: per completion token the trainer's log-probability at the start of the step minus the sampler's, in nats;
    NaN where the step did not train the token. float16: three digits of a difference, of any size.
    """

    model_config = ConfigDict(extra="forbid")
    step: int = Field(ge=0, le=2**53)
    version: str = Field("", max_length=256)
    advantage: float | None = Field(None, allow_inf_nan=False)
    differences: Halves


class Turn(BaseModel):
    """One completion. Once it has ended, only `delivered`, `retry_of`, `superseded_by` and `annotation` may change.

    new_prompt_ids: prompt ids after those of the parent's prompt and completion (all of them when parent_id is None).
    messages: new messages of the request (after those the parent covers); `reply` is the parsed assistant message, with
        the tool-call ids that the *client* sees; `call_ids` maps them to the model's own.
    upstream_tokens: of a text-only turn, which has no ids: completion tokens as its upstream counted them. None: it has ids, or
        nobody counted.
    constrained: [start, end) ranges of completion tokens drawn under a bent law (I1): recorded, never trained.
    mixed_kv: weights changed under it and its cache was kept (`kv: keep`), so that older weights than those in `versions` had a
        part in some of its tokens. Trained: the log-probabilities are those it was sampled at.
    delivered: completion tokens whose events had left for the client when the turn ended; None: not known.
    partial: ended before the model did (cancelled or failed), or not ended yet (finish_reason `open`).
    attempt: of the worker that ended it, from 0: those before were lost (I9). workers: where several sampled it, who did which
        tokens; worker_id is the last.
    answer_id, choice: where `n` turns answer one request, the turn id of the first of them, and which one this is.
    unreadable: what is wrong with its own record, if anything: nobody trains on it, or on what goes on from it. Not stored.
    annotation: what the trainer saw in its tokens, if it was told to say (`TurnAnnotation`).
    retry_of, superseded_by: turn ids. The client marked its request as a retry of one whose answer it did not get: this turn
        takes the place of `retry_of`, and `superseded_by` took the place of this one, which is never trained then.
    replayed: it was answered from the turn of the same id in `Session.fork_of`, and nothing was sampled: the last so many of
        new_prompt_ids are what that turn had sampled. None: it was not.
    tokenizer: key of what its ids are of (`tokenizer_key`), in hex; "": its worker did not say, or an older release archived it.
    task_step: name of the step of its task at which it was asked (`Session.task_step` then). None: nobody said.
    """

    model_config = ConfigDict(extra="forbid")
    turn_id: str
    parent_id: str | None = None
    fork_reason: ForkReason | None = None
    index: int = Field(0, description="order of commit within the session, from 0")
    dialect: str = "chat"
    model: str = Field("", description="name the client asked for")
    served_model: str = ""
    worker_id: str = ""
    attempt: int = 0
    workers: list[WorkerSpan] = Field(default_factory=list)
    answer_id: str | None = None
    choice: int = 0
    retry_of: str | None = None
    superseded_by: str | None = None
    replayed: int | None = None
    tokenizer: str = ""
    task_step: str | None = None
    policy: str = "default"
    new_prompt_ids: TokenIds = b""
    prompt_tokens: int = Field(0, description="whole prompt, ancestors included")
    prompt_digest: Digest = b""
    completion_ids: TokenIds = b""
    upstream_tokens: int | None = None
    sampling_logprobs: Logprobs = b""
    versions: list[TokenSpan] = Field(default_factory=list)
    constrained: list[tuple[int, int]] = Field(default_factory=list)
    mixed_kv: bool = False
    finish_reason: str = "stop"
    stop: str = Field("", description="the stop string that ended it, if one did")
    partial: bool = False
    error: str | None = None
    unreadable: str | None = None
    delivered: int | None = None
    asked: dict[str, Any] = Field(default_factory=dict, description="sampling fields as the client sent them")
    law: dict[str, Any] = Field(default_factory=dict, description="sampling law in effect")
    messages: list[dict[str, Any]] = Field(default_factory=list)
    reply: dict[str, Any] = Field(default_factory=dict)
    call_ids: dict[str, str] = Field(default_factory=dict)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="tool_choice, response_format, template_kwargs as served; kept: for a stored answer",
    )
    thinking_kept: bool = True
    cached_tokens: int = 0
    reasoning_tokens: int = Field(0, description="of the completion, those that became reasoning")
    timings: Timings
    annotation: TurnAnnotation | None = None

    def to_numpy(self) -> TurnArrays:
        """Its token arrays as numpy's, read-only and without a copy. Raises: ImportError: numpy is not installed."""
        return TurnArrays(
            numpy_array(self.new_prompt_ids, "<i4"),
            numpy_array(self.completion_ids, "<i4"),
            numpy_array(self.sampling_logprobs, "<f4"),
        )

    @property
    def completion_tokens(self) -> int:
        return len(self.completion_ids) // 4 or self.upstream_tokens or 0


class IndexRow(msgspec.Struct, array_like=True, frozen=True):
    """What recognition needs to know of a turn, and nothing else: one small row each, appended at commit, so that a replica
    brings its conversation tree up to date by reading the rows it has not seen.

    parent: number of the parent turn in commit order, -1 for a root.
    digests: 16 bytes per message: the turn's new messages in order, then its reply (`sessions.messages.normalise`).
    tools, options: 8-byte digests of the normalised tool list and of the template options.
    own_call_ids: the model's own ids of the reply's tool calls, in order ("" where the format has none). Clients see
        `<prefix>_<turn_id>_<i>`, so an echoed call names its turn.
    completion_tokens: of this turn. A partial turn with 0 can't be gone on from; None: not known.
    tokenizer: key of what its ids are of (`tokenizer_key`): only workers that have the same go on from it.
    """

    turn_id: str
    parent: int
    digests: bytes
    tools: bytes
    options: bytes
    finish: str
    partial: bool
    path_tokens: int
    own_call_ids: list[str] = []
    completion_tokens: int | None = None
    tokenizer: bytes = b""


class SampledRange(BaseModel):
    """Where one turn's completion stands in a sample: positions [start, end) of its token_ids.

    temperature: it was drawn at, the divisor of the logits. policy: that drew it.
    model: name that the client asked for; None: not known, an older proxy or export made the sample.
    shared: an earlier sample of the session has these tokens too; they are trained and accounted for there.
    superseded: another turn took this one's place (`Turn.superseded_by`): not trained.
    mixed_kv: as in `Turn`; trained.
    finish_reason, partial: as in `Turn`, for trainers that leave out what was cut. finish_reason None: not known, an older proxy
        made the sample.
    """

    model_config = ConfigDict(extra="forbid")
    start: int
    end: int
    temperature: float = 1.0
    policy: str = "default"
    model: str | None = None
    shared: bool = False
    superseded: bool = False
    mixed_kv: bool = False
    finish_reason: str | None = None
    partial: bool = False


class SampleArrays(NamedTuple):
    """A sample's token arrays, T tokens each."""

    token_ids: NDArray[int32]
    """int32[T]"""
    loss_mask: NDArray[bool_]
    """bool[T]: sampled by the policy, and to be trained from this sample"""
    sampling_logprobs: NDArray[float32]
    """float32[T], NaN where a token was not sampled"""


class Sample(BaseModel):
    """The token view of one root-to-leaf path: what a trainer sees. T tokens.

    token_ids: int32[T]. loss_mask: one byte per token, 1 = sampled by the policy and to be trained from *this* sample.
    sampling_logprobs: float32[T], NaN where a token was not sampled. spans: versions over positions in token_ids.
    completions: one per turn in turn_ids, in their order, empty where nothing was sampled.
    """

    model_config = ConfigDict(extra="forbid")
    trial_id: str
    group_id: str | None = None
    leaf_id: str
    turn_ids: list[str]
    token_ids: TokenIds
    loss_mask: Mask
    sampling_logprobs: Logprobs
    spans: list[TokenSpan]
    completions: list[SampledRange] = Field(default_factory=list)
    reward: float | None = None

    def to_numpy(self) -> SampleArrays:
        """Its token arrays as numpy's, read-only and without a copy. Raises: ImportError: numpy is not installed."""
        return SampleArrays(
            numpy_array(self.token_ids, "<i4"),
            numpy_array(self.loss_mask, "?"),
            numpy_array(self.sampling_logprobs, "<f4"),
        )


def readable(record: BaseModel) -> dict[str, Any]:
    """The JSON view of a record, as `model_dump_json` writes it: token arrays as lists. Same keys as the record itself."""
    return record.model_dump(mode="json")

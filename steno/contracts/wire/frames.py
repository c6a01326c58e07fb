"""The frames that proxy and worker exchange: msgspec structs, msgpack on the wire, one `Packet` per WebSocket message.

Integers in `bytes` fields are little-endian int32, floats little-endian float32. The order, acknowledgement and
retransmission of frames is `peer.py`; their meaning in prose is docs/wire-protocol.md.

What a worker says of itself is bounded here, by type: a value that is out of bounds is a frame that does not decode. What comes
of a model's or an upstream's words is bounded per stream (`steno_proxy/workers/stream.py`), since only that turn may end for it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from steno.contracts.chat import FinishReason, Job, Sampling, TokenLogprob, ToolCallPiece

PROTOCOL_VERSION = 1
TAKEOVER = "takeover"
"""Capability of a card: the worker can go on with a completion that another one began (`Generate.sampled_ids`)."""
TOKENIZES = "tokenize"
"""Capability of a card: the worker answers `Count.wants`."""
TEXTS = "texts"
"""Capability of a card, and the word for it in `Count.wants`: the worker says what each id of its vocabulary stands for."""
Word = Annotated[str, Meta(max_length=256)]
"""A name, a version, a digest."""
Words = Annotated[list[Word], Meta(max_length=256)]
Number = Annotated[int, Meta(ge=0, lt=2**31)]
"""A count: of tokens or streams."""
Size = Annotated[int, Meta(ge=0, le=2**50)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class ModelCard(msgspec.Struct, omit_defaults=True):
    """What a worker serves. `capabilities`: words such as `tools`, `reasoning`, `logprobs`, `grammar`, `images`, `cancel`,
    `continuation`, `takeover`, `tokenize`, `weight_patches`.

    context_tokens: prompt + completion at most. synthetic: what is said is scripted (never trained, no log-probabilities).
    text_only: no token ids (an upstream that gives text). policy_version: of the weights now loaded, `<lineage>/<step>`.
    vocabulary_size: every id, of prompts and completions, is below it; 0: not known (also of older workers).
    fields: of requests, those that are honoured though not every worker knows them (`chat.needs`).
    """

    name: Annotated[str, Meta(max_length=4096)]
    context_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    policy: Word = "default"
    policy_version: Word = "base/0"
    synthetic: bool = False
    text_only: bool = False
    tokenizer_digest: Word = ""
    capabilities: Words = []
    vocabulary_size: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    fields: Words = []


Cards = Annotated[list[ModelCard], Meta(max_length=256)]


# -- handshake: the first frame each way, unsequenced ---------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """Worker to proxy. `boot_id` is new with each start of the process; `received` is the last sequence number that this
    boot has received on the channel named in `resume` (both empty on a first connection). `max_packet_bytes`: the largest
    packet that the worker takes; 0: it does not say."""

    protocol_min: int
    protocol_max: int
    worker_id: str
    boot_id: str
    models: Cards
    max_streams: Annotated[int, Meta(ge=1, le=65536)]
    capabilities: Words = []
    resume: Word = ""
    received: int = 0
    key: str = ""
    max_packet_bytes: Size = 0


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """Proxy to worker. `boot_id`: of this channel. `resumed`: the channel goes on (the worker resends what is after
    `received`); otherwise both ends start at sequence 1 and the worker cancels whatever it ran on an earlier channel of this
    proxy. `peers`: said by no release; it keeps its place in the array."""

    protocol: int
    proxy_id: str
    boot_id: str
    resumed: bool
    received: int
    heartbeat_s: float
    grace_s: float
    max_packet_bytes: int
    peers: list[str] = []
    capabilities: list[str] = []


class Goodbye(msgspec.Struct, tag="bye", array_like=True):
    """Last frame before an intended close, either way. `final`: do not come back with this channel."""

    code: str
    message: str = ""
    final: bool = False


class Heartbeat(msgspec.Struct, tag="beat", array_like=True):
    """Either way, unsequenced. `waiting` and `running` are counts of streams, `kv_used` a fraction of cache in 0..1."""

    running: Annotated[int, Meta(ge=0, le=2**20)] = 0
    waiting: Annotated[int, Meta(ge=0, le=2**20)] = 0
    kv_used: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0


# -- proxy to worker ------------------------------------------------------------------------------------------------------


class Shown(msgspec.Struct, array_like=True):
    """How much of a completion the proxy was given, in characters: of its reasoning, its content, and each call's arguments."""

    reasoning: int = 0
    content: int = 0
    calls: list[int] = []


class Generate(msgspec.Struct, tag="gen", array_like=True):
    """Start one completion. `stream` numbers it on this channel; (turn_id, attempt) fences it everywhere (I9).

    prefix_ids: recorded prompt + completion ids that this prompt must begin with; empty: nothing to continue.
    prefix_messages: how many of `job.messages` the prefix stands for; the last of them is the recorded assistant message.
    prefix_finish: said by no release; it keeps its place in the array.
    model: name of the worker's card that is meant; "": its first.
    sampled_ids: what earlier attempts sampled (I9), of which `shown` is known already. prefix_ids is the whole prompt then,
        job.sampling the law in effect of the first attempt, and what is asked for is the rest.
    window_tokens: how many tokens may be sent before the first `Credit`.
    """

    stream: int
    turn_id: str
    attempt: int
    trial_id: str
    job: Job
    prefix_ids: bytes = b""
    prefix_messages: int = 0
    prefix_finish: str = ""
    window_tokens: int = 4096
    model: str = ""
    sampled_ids: bytes = b""
    shown: Shown | None = None


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Stop a stream. The worker answers with `Finish(cancelled)` or nothing if it has ended already."""

    stream: int
    reason: str = ""


class Credit(msgspec.Struct, tag="credit", array_like=True):
    """`tokens` more may be sent on `stream`."""

    stream: int
    tokens: int


class Count(msgspec.Struct, tag="count", array_like=True):
    """How many tokens is this job's prompt, rendered whole? Nothing is generated. Only where both ends know `count`.

    `stream` comes from the same ascending numbers as Generate's; the answer is one Counted, or Failed.

    wants: what else the answer is to have, only where the card says TOKENIZES: "ids" of the prompt; "strings": these, and each
        as the vocabulary has it; "text": what `job.prompt_ids` decode to, special tokens included; "": nothing.
        "texts", only where the card says TEXTS: what each of `job.prompt_ids` stands for.
    bare: `job.prompt_text` without the special tokens that the tokenizer adds.
    """

    stream: int
    job: Job
    wants: Word = ""
    bare: bool = False


class Prepare(msgspec.Struct, tag="prep", array_like=True):
    """New weights are coming: get them to where they can be loaded from, generating meanwhile. Idempotent by update_id; only
    where both ends know `policy_updates`. Answered by Progress, as often as something has changed.

    spec: an `UpdateSpec` (contracts/policy.py) as JSON. The worker first reports how much it holds already (`received`).
    """

    update_id: str
    spec: bytes


class Chunk(msgspec.Struct, tag="chunk", array_like=True):
    """Bytes [offset, offset + len(data)) of one shard (`stream`), in order, as far as the worker's credit goes; crc32 of data."""

    update_id: str
    shard: str
    offset: int
    data: bytes
    crc32: int


class Apply(msgspec.Struct, tag="apply", array_like=True):
    """Pause, load what was prepared, verify, resume; then announce the version. Idempotent."""

    update_id: str


class Abandon(msgspec.Struct, tag="abandon", array_like=True):
    """Forget an update that was not applied, and its staged bytes."""

    update_id: str


# -- worker to proxy ------------------------------------------------------------------------------------------------------


class Started(msgspec.Struct, tag="started", array_like=True):
    """The prompt is rendered and given to the engine.

    kept_tokens: how many ids of `prefix_ids` the prompt begins with: all of them, or 0 (a new branch, `refused` says why).
    new_ids: the prompt ids after those. prompt_digest: blake2b-16 of all prompt ids as int32 LE.
    law: the sampling law in effect. constrained: a grammar is active from the first token.
    dropped: fields of the request that an upstream can't take and that were left out.
    """

    stream: int
    kept_tokens: Number
    new_ids: bytes
    prompt_tokens: Number
    prompt_digest: Annotated[bytes, Meta(max_length=64)]
    law: Sampling
    resumable: bool = True
    constrained: bool = False
    refused: str = ""
    cached_tokens: int = 0
    thinking_kept: bool = True
    dropped: list[str] = []


class Delta(msgspec.Struct, tag="d", array_like=True):
    """Some tokens of one stream and what the model's parser made of them.

    logprobs: float32 per id; empty only from synthetic engines. version: of the weights that sampled *all* these ids (a
    delta that spans an update is sent as two). `tokens` only when the client asked for log-probabilities. A text-only
    engine sends neither ids nor logprobs. mixed_kv: some of the cache behind these ids may be of older weights (`kv: keep`).
    """

    stream: int
    ids: bytes
    logprobs: bytes
    version: Word
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallPiece] = []
    tokens: list[TokenLogprob] = []
    constrained: bool = False
    mixed_kv: bool = False


class Finish(msgspec.Struct, tag="fin", array_like=True):
    """The last frame of a stream. `completion_tokens` must equal the ids sent. `stop`: the stop string or id that matched.

    A text-only engine, which sends no ids, says what its upstream counted: completion_tokens, and prompt_tokens and
    reasoning_tokens, which mean nothing from others.
    """

    stream: int
    reason: FinishReason
    completion_tokens: int
    stop: str = ""
    cached_tokens: int = 0
    timings: dict[str, float] = {}
    prompt_tokens: int = 0
    reasoning_tokens: int = 0


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The stream ended in an error; `code` as in `errors.BY_CODE`, `detail` the numbers a dialect words its error from."""

    stream: int
    code: str
    message: str
    field: str = ""
    detail: dict[str, Any] = {}


class Counted(msgspec.Struct, tag="counted", array_like=True):
    """The answer to Count. ids: int32 LE; strings: one for each; text: as `Count.wants` asked. texts: of TEXTS, the bytes of
    each id that was asked about (of some no text by themselves; b"": no token); `ids` are those of them that are special."""

    stream: int
    prompt_tokens: Number
    ids: bytes = b""
    strings: list[str] = []
    text: str = ""
    texts: list[bytes] = []


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """How far this worker is with an update: `state` as in `WorkerUpdate`, except `waiting`, which only a proxy says.

    shard, offset: the next bytes it lacks (`receiving`). credit: how many bytes beyond those it takes before its next Progress.
    received: bytes staged, over all shards. code, message: why it failed.
    """

    update_id: str
    state: str
    received: Size = 0
    shard: str = ""
    offset: int = 0
    credit: int = 0
    pause_s: Seconds = 0.0
    load_s: Seconds = 0.0
    code: Word = ""
    message: str = ""


class Announce(msgspec.Struct, tag="announce", array_like=True):
    """What the worker serves has changed: new weights, draining, or an engine that died (`healthy` False)."""

    models: Cards
    healthy: bool = True
    draining: bool = False
    reason: str = ""


Frame = (
    Hello | Welcome | Goodbye | Heartbeat | Generate | Cancel | Credit | Count | Prepare | Chunk | Apply | Abandon
    | Started | Delta | Finish | Failed | Counted | Progress | Announce
)  # fmt: skip
StreamEvent = Started | Delta | Finish
"""What a consumer of one stream sees, in this order: one Started, Deltas, one Finish (or an exception)."""

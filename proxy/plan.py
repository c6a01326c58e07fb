"""Before a turn: which recorded conversation it goes on with, and what the worker is given for it (I2).

Recognition is `sessions/tree.py` (chats) and `prompts.py` (plain prompts); this fetches the tokens that the prompt must begin
with, and keeps what the turn's record and index row will say. One linear pass over the request (I5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from proxy import prompts
from proxy.contracts.canonical import Job, Message
from proxy.contracts.frames import Started
from proxy.contracts.records import OPEN, ForkReason
from proxy.pace import MANY, Pace
from proxy.recorder import Recorder
from proxy.recording import Recording
from proxy.sessions.call_ids import echoed_ids
from proxy.sessions.calls import answer_reply, restore_calls
from proxy.sessions.echoes import Echo, EchoedAs, echo_of, named_turn
from proxy.sessions.normalise import ASSISTANT, message_digest, options_digest, tools_digest
from proxy.sessions.tree import Recognition

_NO_TOOLS = b"\0" * 8
MOST_CANDIDATES = 16
"""Turns asked at one place whose replies a message is compared with, so that 3,000 siblings cost no more than these."""


@dataclass(slots=True)
class Plan:
    """What one request continues.

    job: for the worker; tool-call ids are the model's own, and the parent's reply stands as it was recorded.
    parent: number of the turn that it goes on from, -1 for none; parent_id, prefix_finish: its turn id and finish.
    tokenizer: what prefix_ids are ids of.
    prefix_ids: int32 LE, what the prompt begins with. prefix_messages: how many messages of the job that covers.
    messages: of the request, as the client sent them. digests: 16 bytes for each of them; one that stands for a reply which it
        does not say (`echoes`, by place) has that reply's.
    seen_turns: how many turns the tree had by then. refused: the worker could not continue. settled: the turn is on record,
        still open, and with it the fork reason.
    """

    job: Job
    messages: list[Message]
    digests: list[bytes]
    tools: bytes
    options: bytes
    parent: int = -1
    parent_id: str | None = None
    prefix_ids: bytes = b""
    prefix_messages: int = 0
    prefix_finish: str = ""
    fork_reason: ForkReason | None = None
    seen_turns: int = 0
    tokenizer: bytes = b""
    refused: bool = False
    settled: bool = False
    echoes: dict[int, Echo] = field(default_factory=dict)

    @property
    def is_prompt(self) -> bool:
        return self.options in (prompts.IDS, prompts.TEXT)

    @property
    def new_messages(self) -> list[Message]:
        return self.messages[self.prefix_messages :]

    @property
    def echoed_as(self) -> EchoedAs | None:
        """How the reply that this goes on from was recognised, where its client wrote it otherwise; None: it did not."""
        echo = self.echoes.get(self.prefix_messages - 1) if self.parent >= 0 else None
        return echo.how if echo is not None else None

    @property
    def new_digests(self) -> bytes:
        return b"".join(self.digests[self.prefix_messages :])

    def refused_by(self, started: Started) -> Plan:
        """This plan when the worker could not continue: a root of its own, and the reason that it gave."""
        differs = started.refused.startswith(ForkReason.RENDER_DIFFERS.value)
        return self.rerooted(ForkReason.RENDER_DIFFERS if differs else ForkReason.RENDER_REFUSED)

    def rerooted(self, reason: ForkReason) -> Plan:
        """This plan as a root of its own, since what it goes on from can't be given to a worker."""
        return Plan(self.job, self.messages, self.digests, self.tools, self.options, fork_reason=reason, refused=True)


async def plan(recorder: Recorder, recording: Recording, job: Job, pace: Pace) -> Plan:
    """Recognise the request and fetch what it continues.

    Raises: StoreUnavailable, Gone.
    """
    if not job.messages:
        return await _plan_prompt(recorder, recording, job)
    messages = job.messages
    long = len(messages) + len(job.tools) > MANY
    digests: list[bytes] = []
    if long:
        await pace.steps(_digests(messages, digests))
        await pace.turn()
    else:
        digests = [message_digest(message) for message in messages]
    found = Plan(
        job=job,
        messages=messages,
        digests=digests,
        tools=tools_digest(job.tools),
        options=options_digest(job.template_kwargs),
    )
    if long:
        await pace.turn()
    echoed = [echoed_ids(message) for message in messages]
    seen = await _recognise(recorder, recording, found, echoed)
    while seen.parent >= 0 and recording.tree.finishes[seen.parent] == OPEN:
        await recorder.seal(recording, seen.parent)
        seen = await _recognise(recorder, recording, found, echoed)
    tree = recording.tree
    found.fork_reason = seen.fork_reason
    found.seen_turns = len(tree)
    if long:
        await pace.turn()
    for_worker = restore_calls(messages, tree)
    if seen.parent >= 0:
        path = await recorder.path(recording, seen.parent, tree)
        found.parent = seen.parent
        found.parent_id = tree.ids[seen.parent]
        found.prefix_ids = path.ids
        found.tokenizer = tree.tokenizers[seen.parent]
        found.prefix_messages = seen.prefix_messages
        found.prefix_finish = tree.finishes[seen.parent]
        for_worker = list(for_worker)
        echo, new = messages[seen.prefix_messages - 1], messages[seen.prefix_messages :]
        after = restore_calls([path.reply, *answer_reply(echo, path.reply, new)], tree)
        for_worker[seen.prefix_messages - 1 :] = after
        for place, known in found.echoes.items():
            if place < seen.prefix_messages - 1:
                [for_worker[place]] = restore_calls([known.reply], tree)
    found.job = msgspec.structs.replace(job, messages=for_worker)
    return found


def _digests(messages: Sequence[Message], into: list[bytes]) -> Iterator[None]:
    for message in messages:
        into.append(message_digest(message))
        yield


async def _recognise(
    recorder: Recorder, recording: Recording, found: Plan, echoed: Sequence[Sequence[str]]
) -> Recognition:
    """Where the request leaves what is recorded with its client's own writing of a reply (`sessions/echoes.py`), that reply
    stands there from now on, and the request is looked at from there."""
    tree = recording.tree
    if recording.echoes:
        _stand_in(found, tree.echoed(found.digests, recording.echoes))
    place, node = tree.shared(found.digests)
    while place < len(found.digests) and found.digests[place][0] == ASSISTANT and tree.replied(node):
        echo = await _echo(recorder, recording, found, place, node)
        if echo is None:
            break
        said = found.digests[place]
        _stand_in(found, {place: echo})
        if tree is not recording.tree:  # it was read again meanwhile
            tree = recording.tree
            place, node = tree.shared(found.digests)
            continue
        further, after = tree.shared(found.digests, place, node)
        if (
            further == place
        ):  # the reply on record is newer than its row here: the tree does not have it, so nothing stands in
            found.digests[place] = said
            del found.echoes[place]
            break
        recording.keep_echo(node, said, echo)
        place, node = further, after
    return recording.tree.recognise(found.digests, found.tools, found.options, echoed)


async def _echo(recorder: Recorder, recording: Recording, found: Plan, place: int, node: int) -> Echo | None:
    """The reply that a message stands for, though it says something else: that of the turn which its call ids name, else the
    newest whole one, else the newest. `node`: after which the message stands.

    Costs a read of the store for each turn that may be meant, MOST_CANDIDATES at most, once."""
    tree, said = recording.tree, found.messages[place]
    running = set(recording.running.values())
    newest = (n for n in tree.asked_at(node, found.tools, found.options) if n not in running)
    candidates = list(islice(newest, MOST_CANDIDATES))
    named = tree.number(named_turn(said))
    if named >= 0 and named not in (*candidates, *running) and tree.was_asked(named, node, found.tools, found.options):
        candidates = [named, *candidates[: MOST_CANDIDATES - 1]]
    candidates.sort(key=lambda n: (n != named, tree.partial(n)))
    for number in candidates:
        turn_id, partial = tree.ids[number], tree.partial(number)
        reply = recording.replies.get(number) if tree is recording.tree else None
        if reply is None:
            reply = await recorder.reply(recording, number)
            if tree is recording.tree:
                recording.keep_reply(number, reply)
        if (echo := echo_of(said, reply, turn_id, partial=partial)) is not None:
            return echo
    return None


def _stand_in(found: Plan, echoes: dict[int, Echo]) -> None:
    for place, echo in echoes.items():
        found.digests[place] = echo.digest
    found.echoes |= echoes


def fork_reason_now(recording: Recording, plan: Plan) -> ForkReason | None:
    """The fork reason as observed at commit: turns of requests that ran at the same time may have come first."""
    if plan.settled or plan.refused or plan.is_prompt or recording.turns == plan.seen_turns:
        return plan.fork_reason
    seen = recording.tree.recognise(
        plan.digests, plan.tools, plan.options, [echoed_ids(message) for message in plan.messages]
    )
    return seen.fork_reason if seen.parent == plan.parent else plan.fork_reason


async def _plan_prompt(recorder: Recorder, recording: Recording, job: Job) -> Plan:
    """A plain prompt: goes on from the turn whose whole path it begins with.

    A text prompt is tokenised whole by the worker, which says whether it still begins with the recorded ids."""
    tree = recording.tree
    if job.prompt_ids is not None:
        seen = recording.prompts.find(prompts.IDS, job.prompt_ids)
        found = Plan(job, [], [], _NO_TOOLS, prompts.IDS, prefix_ids=job.prompt_ids[: seen.length])
    else:
        text = job.prompt_text or ""
        seen = recording.prompts.find(prompts.TEXT, text.encode())
        found = Plan(job, [{"role": "prompt", "content": text}], [], _NO_TOOLS, prompts.TEXT)
        if seen.parent >= 0:
            found.prefix_ids = (await recorder.path(recording, seen.parent)).ids
    if seen.parent >= 0:
        found.parent = seen.parent
        found.parent_id = tree.ids[seen.parent]
        found.prefix_finish = tree.finishes[seen.parent]
        found.tokenizer = tree.tokenizers[seen.parent]
        found.fork_reason = ForkReason.DIVERGED if seen.has_children else None
    elif recording.turns:
        found.fork_reason = ForkReason.NEW_CONVERSATION
    return found

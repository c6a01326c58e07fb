"""Plans a turn: which recorded conversation it continues, and what the worker is given (I2).

Recognition is `sessions/tree.py` (chats) and `prompt_index.py` (plain prompts); this fetches the tokens that the prompt must
begin with, and keeps what the turn's record and index row will say. One linear pass over the request (I5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import msgspec

from steno.contracts.chat import Job, Message
from steno.contracts.errors import BadRequest, StoreUnavailable
from steno.contracts.records import OPEN, ForkReason
from steno.contracts.wire.frames import Started
from steno_proxy.pace import MANY, Pace
from steno_proxy.session_cache.cache import Recorder
from steno_proxy.session_cache.session_state import Recording
from steno_proxy.sessions import prompt_index
from steno_proxy.sessions.calls import answer_reply, restore_calls
from steno_proxy.sessions.gathered import gathered
from steno_proxy.sessions.messages.echoes import EchoedAs, echo_of
from steno_proxy.sessions.messages.normalise import ASSISTANT, options_digest, tools_digest
from steno_proxy.sessions.reading import (
    MessageUnit,
    ReadPosition,
    RecognisedMessages,
    RequestMessages,
    best,
    echoed_as,
    follow,
    furthest,
    read,
    settled,
    take,
)
from steno_proxy.sessions.tree import Recognition, Tree
from steno_proxy.workers.placement import NO_PREFIX, PromptPrefix

_NO_TOOLS = b"\0" * 8
_CUT_OFF = ("length", "cancelled", "error", OPEN)
MOST_CANDIDATES = 16
"""How many turns asked at one place have their replies compared with a message, so that 3,000 siblings cost no more."""
MOST_SEALS = 8
"""So often a request tries to close the open turn that it goes on from: each time it may have grown, or have been replaced."""


@dataclass(slots=True)
class Plan:
    """What one request continues.

    job: for the worker; tool-call ids are the model's own, and the parent's reply stands as it was recorded.
    parent: number of the turn that it goes on from, -1 for none; parent_id: its turn id.
    prefix: what the prompt begins with.
    messages: of the request, as the client sent them, but for neighbours that are read as one (`sessions/reading.py`), and
        calls of one reply that came back apart (`sessions/gathered.py`).
    digests: 16 bytes for each message; an echo that is gone on from has the digest of its recorded reply.
    digests_observed: whether these are the digests that the fork reason was observed with; False: more of the messages is known
        than what is gone on from (their tools have changed, say).
    echoed_as: how the reply that this goes on from was recognised, where its client wrote it otherwise; None: it did not.
    known_turns: how many turns the tree had by then. fork_is_final: nothing changes the fork reason any more: the worker could
        not continue, or the turn is on record, still open.
    resamples: it samples the turn of the trial's fork anew (`forked.py`).
    """

    job: Job
    messages: list[Message]
    digests: list[bytes]
    tools: bytes
    options: bytes
    parent: int = -1
    parent_id: str | None = None
    prefix: PromptPrefix = NO_PREFIX
    fork_reason: ForkReason | None = None
    known_turns: int = 0
    fork_is_final: bool = False
    digests_observed: bool = True
    echoed_as: EchoedAs | None = None
    resamples: bool = False

    @property
    def is_prompt(self) -> bool:
        return self.options in (prompt_index.IDS, prompt_index.TEXT)

    @property
    def new_messages(self) -> list[Message]:
        return self.messages[self.prefix.messages :]

    @property
    def new_digests(self) -> bytes:
        return b"".join(self.digests[self.prefix.messages :])

    def refused_by(self, started: Started) -> Plan:
        """This plan when the worker could not continue: a root of its own, and the reason that it gave."""
        differs = started.refused.startswith(ForkReason.RENDER_DIFFERS.value)
        return self.rerooted(ForkReason.RENDER_DIFFERS if differs else ForkReason.RENDER_REFUSED)

    def rerooted(self, reason: ForkReason) -> Plan:
        """This plan as a root of its own, since what it goes on from can't be given to a worker."""
        return Plan(
            self.job, self.messages, self.digests, self.tools, self.options, fork_reason=reason, fork_is_final=True
        )


async def plan(recorder: Recorder, recording: Recording, job: Job, pace: Pace, *, merges: bool = False) -> Plan:
    """Recognise the request and fetch what it continues.

    Args: merges: as in `CanonicalRequest`.
    Raises: StoreUnavailable, Gone.
    """
    if not job.messages:
        return await _plan_prompt(recorder, recording, job)
    keys = tools_digest(job.tools), options_digest(job.template_kwargs)
    said = apart = RequestMessages(job.messages, merges, *keys, offered=job.tools)
    long = len(job.messages) + len(job.tools) > MANY
    await _digest(said, pace, long)
    if gathered(job.messages, recording.tree)[1]:
        # Replies that an older version recorded in parts, as their client sent them, stay in parts. The request is recognised
        # first to find them, so that echoes before them are known.
        await _recognise(recorder, recording, said)
        on_record = furthest(follow(recording.tree, said, recording.echoes))[0].place
        messages, together = gathered(job.messages, recording.tree, on_record)
        said = RequestMessages(messages, merges, *keys, offered=job.tools, gathered=together)
        await _digest(said, pace, long)
    seen, form = await _recognise(recorder, recording, said)
    # None of the replies that were put together is on record: they stay as they were sent.
    if seen.parent < 0 and said is not apart:
        said = apart
        seen, form = await _recognise(recorder, recording, said)
    seals = 0
    while seen.parent >= 0 and recording.tree.finishes[seen.parent] == OPEN:
        if seals == MOST_SEALS:
            turn_id = recording.tree.ids[seen.parent]
            raise StoreUnavailable(f"turn {turn_id}, which this request continues, is still being recorded")
        seals += 1
        await recorder.seal(recording, seen.parent)
        seen, form = await _recognise(recorder, recording, said)
    tree, whole = recording.tree, form
    form = settled(said, form, seen.prefix_messages)
    found = Plan(job, form.messages, form.digests, said.tools, said.options, digests_observed=form is whole)
    found.fork_reason = seen.fork_reason
    found.known_turns = len(tree)
    if long:
        await pace.turn()
    for_worker = restore_calls(form.messages, tree)
    if seen.parent >= 0:
        path = await recorder.path(recording, seen.parent, tree)
        found.parent = seen.parent
        found.parent_id = tree.ids[seen.parent]
        found.prefix = _prefix(tree, seen.parent, path.ids, seen.prefix_messages)
        last = seen.prefix_messages - 1
        found.echoed_as = echoed_as(said, form, last)
        after = restore_calls([path.reply, *answer_reply(form.messages[last], path.reply, found.new_messages)], tree)
        for_worker[last:] = after
        for place, unit in form.units.items():
            if place < last and unit.echo is not None:
                [for_worker[place]] = restore_calls([unit.echo.reply], tree)
    found.job = msgspec.structs.replace(job, messages=for_worker)
    return found


def check_cut_off(tree: Tree, found: Plan, running: Iterable[Plan]) -> None:
    """Check that the answer whose beginning ends a request was cut off.

    Args: running: plans of the trial's requests that are being answered: a client whose connection broke may ask again before
        the proxy hears of it.
    Raises: BadRequest: no answer to the messages before was cut off or is running. The words are Anthropic's, which agents know.
    """
    before = found.digests[:-1]
    asked = tree.turns_asked(before, found.tools, found.options)
    runs = any((one.digests, one.tools, one.options) == (before, found.tools, found.options) for one in running)
    if not runs and not any(tree.finishes[turn] in _CUT_OFF for turn in asked):
        raise BadRequest(
            "messages: does not support assistant message prefill, unless an answer was cut off there. "
            "The conversation must end with a user message",
            field="messages",
        )


async def _digest(said: RequestMessages, pace: Pace, long: bool) -> None:
    if long:
        await pace.steps(said.digest())
        await pace.turn()
        return
    for _ in said.digest():
        pass


def _prefix(tree: Tree, parent: int, ids: bytes, messages: int = 0) -> PromptPrefix:
    return PromptPrefix(ids, messages, tree.finishes[parent], tree.tokenizers[parent] if ids else None)


async def _recognise(
    recorder: Recorder, recording: Recording, said: RequestMessages
) -> tuple[Recognition, RecognisedMessages]:
    """Find the request's place in the tree, and how it is read. If its first message that is not on record is an echo
    (`sessions/messages/echoes.py`), the recorded reply takes its place from now on, and the search goes on from there."""
    tree = recording.tree
    ends = follow(tree, said, recording.echoes)
    found, open_ = best(ends), furthest(ends)
    while open_ and open_[0].place >= found.covered:
        at = open_.pop(0)
        unit = await _echo(recorder, recording, said, at)
        if tree is not recording.tree:  # it was read again meanwhile
            tree = recording.tree
            ends = follow(tree, said, recording.echoes)
            found, open_ = best(ends), furthest(ends)
            continue
        if unit is None or unit.echo is None or (after := take(tree, said, at, unit)) is None:
            continue  # no echo; or the recorded reply is newer than its row here, so that the tree does not have it
        recording.keep_echo(at.node, said.digest_of(unit), said.named(at.place, tree), unit.echo)
        ends = follow(tree, said, recording.echoes, after)
        found, open_ = best([found, *ends]), furthest([*open_, *ends])
    form = read(said, found)
    return tree.recognise(form.digests, said.tools, said.options, form.call_ids()), form


async def _echo(
    recorder: Recorder, recording: Recording, said: RequestMessages, at: ReadPosition
) -> MessageUnit | None:
    """The recorded reply of which the next message, or the run that begins with it, is an echo. Compared are the turn that its
    call ids name, then whole turns, then partial ones, the newest first. None: it is no echo.

    Costs a read of the store for each turn that may be meant, MOST_CANDIDATES at most, once."""
    tree = recording.tree
    if at.place == len(said.digests) or said.digests[at.place][0] != ASSISTANT or not tree.replied(at.node):
        return None
    forms = said.forms(at.place)
    running = set(recording.open_here.values())
    newest = (n for n in tree.asked_at(at.node, said.tools, said.options) if n not in running)
    candidates = list(islice(newest, MOST_CANDIDATES))
    named = tree.number(said.named(at.place, tree))
    if (
        named >= 0
        and named not in (*candidates, *running)
        and tree.has_prompt(named, at.node, said.tools, said.options)
    ):
        candidates = [named, *candidates[: MOST_CANDIDATES - 1]]
    candidates.sort(key=lambda n: (n != named, tree.partial(n)))
    for number in candidates:
        turn_id, partial = tree.ids[number], tree.partial(number)
        reply = recording.replies.get(number) if tree is recording.tree else None
        if reply is None:
            reply = await recorder.reply(recording, number, tree)
            if tree is recording.tree:
                recording.keep_reply(number, reply)
        for end, message in forms:
            if (echo := echo_of(message, reply, turn_id, partial=partial, tools=said.offered)) is not None:
                return MessageUnit(at.place, end, echo.digest, echo)
    return None


def fork_reason_now(recording: Recording, plan: Plan) -> ForkReason | None:
    """The fork reason as observed at commit: turns of requests that ran at the same time may have come first. If the
    tree has no more turns than the plan knew, nothing is new, or the tree is being read again: the plan's reason stands."""
    if plan.fork_is_final or plan.is_prompt or recording.turns <= plan.known_turns:
        return plan.fork_reason
    form = RecognisedMessages(plan.messages, plan.digests, {})
    seen = recording.tree.recognise(plan.digests, plan.tools, plan.options, form.call_ids())
    known = seen.parent == plan.parent and (plan.digests_observed or seen.fork_reason is ForkReason.SIBLING)
    return seen.fork_reason if known else plan.fork_reason


async def _plan_prompt(recorder: Recorder, recording: Recording, job: Job) -> Plan:
    """A plain prompt: goes on from the turn whose whole path it begins with.

    A text prompt is tokenised whole by the worker, which says whether it still begins with the recorded ids."""
    tree = recording.tree
    if job.prompt_ids is not None:
        seen = recording.prompt_index.find(prompt_index.IDS, job.prompt_ids)
        found = Plan(job, [], [], _NO_TOOLS, prompt_index.IDS)
        prefix_ids = job.prompt_ids[: seen.length]
    else:
        text = job.prompt_text or ""
        seen = recording.prompt_index.find(prompt_index.TEXT, text.encode())
        found = Plan(job, [{"role": "prompt", "content": text}], [], _NO_TOOLS, prompt_index.TEXT)
        prefix_ids = (await recorder.path(recording, seen.parent, tree)).ids if seen.parent >= 0 else b""
    if seen.parent >= 0:
        found.parent = seen.parent
        found.parent_id = tree.ids[seen.parent]
        found.prefix = _prefix(tree, seen.parent, prefix_ids)
        found.fork_reason = ForkReason.DIVERGED if seen.has_children else None
    elif recording.turns:
        found.fork_reason = ForkReason.NEW_CONVERSATION
    return found

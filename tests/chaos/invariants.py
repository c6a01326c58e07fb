"""What must hold after a seed, by the numbers of docs/architecture.md. Pure: records and what agents saw in, sentences out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from steno.contracts.records import ForkReason, Session, Turn, bytes_to_floats, bytes_to_ids
from steno.contracts.runs.leases import RunView
from tests.chaos.clients.agents import Seen, Trial
from tests.chaos.clients.trainer import Taken
from tests.chaos.predict import answer, logprob, message_of, prompt_digest, render, resumable
from tests.chaos.schedule import ANY, MODELS, Fault

Versions = Sequence[str]
"""All versions that there were, in the order in which they were posted."""


def check_turns(turns: Sequence[Turn], versions: Versions) -> list[str]:
    """I1, I2, I10: every id, log-probability and version of a session's turns is what the engine samples there."""
    wrong: list[str] = []
    whole: dict[str, bytes] = {}  # turn id -> prompt and completion
    models: dict[str, str] = {}
    for turn in turns:
        name = f"{turn.turn_id} (number {turn.index})"
        if turn.turn_id in whole:
            wrong.append(f"I3: turn {name} is on record twice")
        if turn.parent_id is not None and turn.parent_id not in whole:
            wrong.append(f"I2: turn {name} goes on from {turn.parent_id}, which does not stand before it")
            continue
        models[turn.turn_id] = turn.served_model
        if turn.parent_id is not None and models[turn.parent_id] != turn.served_model:
            wrong.append(f"I2: turn {name} of {turn.served_model} goes on after tokens of {models[turn.parent_id]}")
        prompt = (whole[turn.parent_id] if turn.parent_id else b"") + turn.new_prompt_ids
        whole[turn.turn_id] = prompt + turn.completion_ids
        if turn.new_prompt_ids and not _is_rendered(turn):
            wrong.append(f"I1: the new prompt ids of turn {name} are not those of its messages")
        wrong += [f"{problem} (turn {name})" for problem in _check_completion(turn, prompt, versions)]
    return wrong


def _is_rendered(turn: Turn) -> bool:
    """Whether the turn's new prompt ids are those of its messages. After a fork by TOKENIZER_CHANGED, the replies were rendered
    as they are on record, not as the client wrote them: then only the first and the last message are compared."""
    ids, messages = bytes_to_ids(turn.new_prompt_ids).tolist(), turn.messages
    if turn.fork_reason != ForkReason.TOKENIZER_CHANGED:
        return ids == render(messages, turn.served_model)
    first, last = render(messages[:1], turn.served_model), render(messages[-1:], turn.served_model)[2:]
    return ids[: len(first)] == first and ids[-len(last) :] == last


def _check_completion(turn: Turn, prompt: bytes, versions: Versions) -> Iterable[str]:
    if not turn.prompt_digest:
        if turn.completion_ids:
            yield "I1: sampled tokens without a prompt"
        return
    digest = prompt_digest(prompt)
    if digest != turn.prompt_digest:
        yield "I2: its prompt is not its path's tokens and its new ones"
        return
    expected = answer(digest)
    ids = bytes_to_ids(turn.completion_ids).tolist()
    if ids != [token.id for token in expected[: len(ids)]]:
        yield f"I1: its {len(ids)} completion ids are not what was sampled"
        return
    if not turn.partial and len(ids) != len(expected):
        yield f"I9: it counts as whole with {len(ids)} tokens of {len(expected)}"
    if not turn.partial:
        content, calls = message_of(expected)
        said = [
            (call["function"]["name"], call["function"]["arguments"]) for call in turn.reply.get("tool_calls") or ()
        ]
        if ((turn.reply.get("content") or ""), said) != (content, calls):
            yield f"I1: its reply is not what its tokens say: {turn.reply}"
    yield from _check_versions(turn, digest, len(ids), versions)
    if len(turn.workers) > 1 and not resumable(digest):
        yield f"I9: several workers sampled what can't be gone on with: {turn.workers}"
    if turn.workers and [(span.start, span.end) for span in turn.workers] != _joined(turn.workers, len(ids)):
        yield f"I9: its workers' spans have gaps: {turn.workers}"


def _check_versions(turn: Turn, digest: bytes, count: int, versions: Versions) -> Iterable[str]:
    if [(span.start, span.end) for span in turn.versions] != _joined(turn.versions, count):
        yield f"I10: its version spans have gaps: {turn.versions}"
        return
    lineage = "other/" if turn.policy == "other" else "chaos/"
    if not all(span.version.startswith(("base/", lineage)) for span in turn.versions):
        yield f"I10: versions of another policy than {turn.policy}: {turn.versions}"
    order = [versions.index(span.version) if span.version in versions else -1 for span in turn.versions]
    if -1 in order or order != sorted(order):
        yield f"I10: versions that there were not, or not in this order: {turn.versions}"
        return
    logprobs = bytes_to_floats(turn.sampling_logprobs).tolist()
    wanted = [logprob(digest, at, span.version) for span in turn.versions for at in range(span.start, span.end)]
    if logprobs != wanted:
        yield "I1, I10: its log-probabilities are not those of its tokens under their versions"


def _joined(spans: Sequence[object], count: int) -> list[tuple[int, int]]:
    """Bounds as they are if they join from 0 to count, else []."""
    bounds = [(span.start, span.end) for span in spans]  # type: ignore[attr-defined]
    edges = [0, *(end for _, end in bounds)]
    fits = all(start == edge for (start, _), edge in zip(bounds, edges, strict=False)) and edges[-1] == count
    return bounds if fits else [(-1, -1)]


def check_seen(trial: Trial, turns: Sequence[Turn]) -> tuple[list[str], int]:
    """I3: what an agent saw finished is on record, as it saw it, and once.

    Returns: (what is wrong, number of whole turns beyond the first of one request: a retry at another replica while the first
    attempt was finishing, see Retries in docs/recording-format.md).
    """
    wrong: list[str] = []
    known = {turn.turn_id: turn for turn in turns}
    for seen in trial.seen:
        turn = known.get(seen.turn_id)
        if turn is None:
            wrong.append(f"I3: {trial.trial_id} saw {seen.turn_id} finished ({seen.asked!r}), and it is not on record")
            continue
        if seen.model and turn.served_model != (MODELS[0] if seen.model == ANY else seen.model):
            wrong.append(f"{trial.trial_id} asked for {seen.model}, and {turn.served_model} answered {seen.turn_id}")
        if turn.partial or turn.superseded_by:
            wrong.append(
                f"I3: {trial.trial_id} saw {seen.turn_id} finished, and on record it is {turn.finish_reason}, superseded by "
                f"{turn.superseded_by}"
            )
        else:
            wrong += [f"{words} (finished)" for words in _differs(trial, seen, turn, whole=True)]
    for seen in trial.acted_on:
        turn = known.get(seen.turn_id)
        if turn is None:
            wrong.append(
                f"I3: {trial.trial_id} saw blocks of {seen.turn_id} closed ({seen.asked!r}), and it is not on record"
            )
        else:
            wrong += [f"{words} (closed blocks)" for words in _differs(trial, seen, turn, whole=False)]
    twice = 0
    last = Counter((turn.parent_id, str(turn.messages[-1].get("content"))) for turn in turns if _counts(turn))
    for (_, asked), count in last.items():
        if count > 1:
            twice += count - 1
            if asked not in trial.retried:
                wrong.append(f"I3: {trial.trial_id} asked {asked!r} once, and {count} whole turns answer it")
    return wrong, twice


def check_heard(trial: Trial, turns: Sequence[Turn], faults: Sequence[Fault], view: RunView) -> list[str]:
    """I4: text that an agent had of an answer that broke is on record, unless its replica was killed with it, the store failed,
    or it came after its trial had been accounted for."""
    known = {turn.turn_id: turn for turn in turns}
    failing = {fault.target for fault in faults if fault.kind == "replica-kill" or fault.kind.startswith("store-")}
    if any(fault.kind.startswith(("redis-", "failover-")) for fault in faults) or view.not_trained.get("late"):
        return []
    return [
        f"I4: {trial.trial_id} had {heard.content!r} of {heard.turn_id}, and on record is {known.get(heard.turn_id)}"
        for heard in trial.heard
        if heard.replica not in failing
        and (
            heard.turn_id not in known
            or not (known[heard.turn_id].reply.get("content") or "").startswith(heard.content)
        )
    ]


def _differs(trial: Trial, seen: Seen, turn: Turn, *, whole: bool) -> Iterable[str]:
    """How the turn on record differs from what the agent saw. whole: False: the agent saw the beginning, and the answer broke."""
    content, calls = turn.reply.get("content") or "", turn.reply.get("tool_calls") or ()
    recorded = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls[: len(seen.calls)]
    ]
    if (content != seen.content) if whole else not content.startswith(seen.content):
        yield f"I3: {trial.trial_id} saw {seen.content!r} of {seen.turn_id}, on record: {content!r}"
    if recorded != [call.said for call in seen.calls] or (whole and len(calls) != len(seen.calls)):
        yield f"I3: {trial.trial_id} saw {seen.calls} of {seen.turn_id}, on record: {calls}"
    elif [call["id"] for call in calls[: len(seen.calls)]] != [call.id for call in seen.calls]:
        yield f"I3: the tool calls of {seen.turn_id} have other ids on record than {seen.calls}"


def _counts(turn: Turn) -> bool:
    return not turn.partial and turn.superseded_by is None and bool(turn.messages)


def check_session(trial: Trial, session: Session, turns: Sequence[Turn]) -> list[str]:
    """The session is completed and has a reward, and its counts agree with its turns."""
    wrong: list[str] = []
    if session.status != "completed" or session.reward is None:
        wrong.append(f"{trial.trial_id} is {session.status} with reward {session.reward}, and was completed")
    tokens = sum(turn.completion_tokens for turn in turns)
    if (session.counts.turns, session.counts.completion_tokens) != (len(turns), tokens):
        wrong.append(f"I4: {trial.trial_id} counts {session.counts}, and has {len(turns)} turns of {tokens} tokens")
    return wrong


def tokens_by_version(turns: Iterable[Turn]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for turn in turns:
        for span in turn.versions:
            counted[span.version] += span.end - span.start
    return counted


def check_ledger(
    view: RunView, taken: Taken, recorded: Mapping[str, Counter[str]], groups: Mapping[str, bool]
) -> list[str]:
    """I4: sampled = recorded + what was refused as late + what was deleted; and the same = trained + not trained, per version.

    Args: recorded: tokens of all trials that are left. groups: of the run, and whether each has a deadline.
    """
    wrong: list[str] = []
    for group_id, leases in taken.acknowledged.items():
        if len(leases) > 1:
            wrong.append(f"I4: group {group_id} was acknowledged {len(leases)} times")
    where = view.groups
    open_ones = (where.running, where.ready, where.leased, where.used)
    if open_ones != (0, 0, 0, 0) or where.acknowledged + where.empty != len(groups):
        wrong.append(f"I4: of {len(groups)} groups: {where}")
    leased = {
        trial: Counter(tokens) for [lease, *_] in taken.acknowledged.values() for trial, tokens in lease.tokens.items()
    }
    for trial, tokens in leased.items():
        if trial in recorded and tokens != recorded[trial]:
            wrong.append(f"I4: the lease of {trial} brought {dict(tokens)}, on record are {dict(recorded[trial])}")
    trained = sum(leased.values(), Counter[str]())
    sampled, not_trained = Counter(view.sampled), Counter[str]()
    for counted in view.not_trained.values():
        not_trained.update(counted)
    if +sampled != trained + not_trained:
        wrong.append(f"I4: sampled {view.sampled}, trained {dict(trained)}, not trained {view.not_trained}")
    # What did not end in time for its group's deadline is on record, and was booked as late.
    missed = [trial for trial in recorded if groups[trial.rpartition(".")[0]] and trial not in leased]
    gone = Counter(view.not_trained.get("late", {})) + Counter(view.not_trained.get("deleted", {}))
    gone.subtract(sum((recorded[trial] for trial in missed), Counter[str]()))
    whole = sum(recorded.values(), Counter[str]())
    whole.update(gone)
    if +sampled != +whole or any(count < 0 for count in gone.values()):
        wrong.append(
            f"I4: sampled {view.sampled}, recorded {recorded}, missed {missed}, not trained {view.not_trained}"
        )
    return wrong


def check_received(counted: Mapping[str, int]) -> list[str]:
    """I4: a replica counts each token that it received since its start as recorded, unrecorded or late.

    Args: counted: the replica's counters, by name.
    """
    kinds = ("received", "completion", "unrecorded", "late")
    received, recorded, unrecorded, late = (counted.get(f"steno_proxy_{kind}_tokens_total", 0) for kind in kinds)
    if received == recorded + unrecorded + late:
        return []
    return [f"of {received} tokens received, {recorded} are on record, {unrecorded} unrecorded, {late} late"]

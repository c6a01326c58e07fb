"""Mutants of what records a turn: transcript, choice, recorder, the conversation tree, echoes, samples."""

from __future__ import annotations

from tests.mutants.base import Mutant

_TRANSCRIPT, _CHOICE = "proxy/steno_proxy/turns/transcript.py", "proxy/steno_proxy/turns/choice.py"
_RECORDER, _RECORDING, _RECORD = (
    "proxy/steno_proxy/session_cache/cache.py",
    "proxy/steno_proxy/session_cache/session_state.py",
    "proxy/steno_proxy/turns/turn_record.py",
)
_LOG = "proxy/steno_proxy/turns/answer_log.py"
_STREAMS, _FAILOVER = "proxy/steno_proxy/workers/stream.py", "proxy/steno_proxy/turns/failover.py"
_TREE, _ECHOES, _CUTS, _SAMPLES = (
    f"proxy/steno_proxy/sessions/{name}.py" for name in ("tree", "messages/echoes", "messages/cuts", "samples")
)

_PADS = ("tests/unit/proxy/turns/test_transcript.py",)
_MAILBOXES = ("tests/unit/proxy/workers/test_streams.py",)
_CHOICES = ("tests/unit/proxy/turns/test_choice.py",)
_JOINED = ("tests/unit/proxy/turns/test_joined.py",)
_TURNS = ("tests/integration/http/turns/test_turns.py",)
_FAILOVERS = ("tests/integration/http/faults/test_failover.py",)
_RECORDERS = ("tests/unit/proxy/session_cache/test_recorder.py",)
_TREES = (
    "tests/unit/proxy/sessions/test_tree.py",
    "tests/unit/proxy/sessions/test_tree_open.py",
    "tests/unit/proxy/sessions/test_tree_properties.py",
)
_ECHOED = ("tests/unit/proxy/sessions/messages/test_echoes.py", "tests/unit/proxy/sessions/messages/test_cuts.py")
_SAMPLED = ("tests/unit/proxy/sessions/test_samples.py",)

MUTANTS = (
    Mutant(
        "past-before-record", "who joins is told of a closed block before that is on record (I3)", _LOG,
        "                await choice.saved()\n\n        return", "                pass\n\n        return", _JOINED,
    ),
    Mutant(
        "block-before-record", "a piece that closes a block is told before the turn so far is on record (I3)", _LOG,
        "        await choice.saved()\n        for reader in readers:", "        for reader in readers:",
        ("tests/integration/http/faults/test_anthropic_durable.py",),
    ),
    Mutant(
        "end-before-record", "the end of a choice is told before its turn is on record (I3)", _LOG,
        "        await choice.committed(None, in_one_piece=self.has_whole())\n        finished = choice.finish(now)\n"
        "        for reader in self._readers:\n            reader.finish(finished)\n",
        "        finished = choice.finish(now)\n        for reader in self._readers:\n            reader.finish(finished)\n"
        "        await self.flush()\n        await choice.committed(None, in_one_piece=self.has_whole())\n",
        ("tests/integration/http/faults/test_failing.py",),
    ),
    Mutant(
        "logprobs-of-before", "a delta is recorded with the log-probabilities of the delta before", _TRANSCRIPT,
        "self.logprobs += event.logprobs",
        "self.logprobs += self.logprobs[-len(event.logprobs) :] or event.logprobs",
        _TURNS,
    ),
    Mutant(
        "logprobs-of-before-takeover", "the same, only after another worker took the turn over", _TRANSCRIPT,
        "self.logprobs += event.logprobs",
        "self.logprobs += self.logprobs[-len(event.logprobs) :] if self._before else event.logprobs",
        _FAILOVERS,
    ),
    Mutant(
        "logprobs-backwards", "the log-probabilities of a delta are recorded in the wrong order", _TRANSCRIPT,
        "self.logprobs += event.logprobs",
        "self.logprobs += b''.join(event.logprobs[i : i + 4] for i in reversed(range(0, len(event.logprobs), 4)))",
        _PADS,
    ),
    Mutant(
        "constrained-joined", "tokens between two constrained ranges count as constrained", _TRANSCRIPT,
        "if self._constrained and self._constrained[-1][1] == start:", "if self._constrained:", _PADS,
    ),
    Mutant(
        "workers-from-the-start", "the second of three workers is said to have sampled what the first did", _TRANSCRIPT,
        "self.workers.append((worker_id, self._before, self.tokens))", "self.workers.append((worker_id, 0, self.tokens))", _PADS,
    ),
    Mutant(
        "more-sampled-than-sent", "a worker that sampled more tokens than it sent is believed", _TRANSCRIPT,
        "if event.completion_tokens + self._before != self.tokens:", "if event.completion_tokens + self._before < self.tokens:",
        _PADS,
    ),
    Mutant(
        "other-prompt-taken-over", "another prompt of the same length is taken for the same", _TRANSCRIPT,
        "if (after.prompt_digest, after.prompt_tokens) != (before.prompt_digest, before.prompt_tokens):",
        "if after.prompt_tokens != before.prompt_tokens:", _PADS,
    ),
    Mutant(
        "block-begins-elsewhere", "where the text block began is counted in pieces of the reasoning", _TRANSCRIPT,
        "self._block, self._at = _CONTENT, len(self._content)", "self._block, self._at = _CONTENT, len(self._reasoning)", _PADS,
    ),
    Mutant(
        "shown-in-pieces", "what a client has of the text is counted in pieces, not in characters", _TRANSCRIPT,
        "return Shown(sum(map(len, self._reasoning)), sum(map(len, self._content)), calls)",
        "return Shown(sum(map(len, self._reasoning)), len(self._content), calls)", _PADS,
    ),
    Mutant(
        "reasoning-tokens-of-content", "tokens that became text are counted with the reasoning after them", _TRANSCRIPT,
        "        if event.content or event.tool_calls:\n            self._said_tokens = self.tokens\n", "",
        ("tests/unit/proxy/turns/test_reasoning_tokens.py",),
    ),
    Mutant(
        "open-block-recorded", "a turn that broke has a block on record that was never closed for its client", _RECORD,
        "reply = transcript.message(closed=partial and choice.closed)",
        "reply = transcript.message(closed=still_open and choice.closed)",
        _CHOICES,
    ),
    Mutant(
        "path-without-completion", "a conversation's length is counted without what was sampled last", _RECORD,
        "path_tokens=transcript.prompt_tokens + transcript.tokens,", "path_tokens=transcript.prompt_tokens,",
        _CHOICES,
    ),
    Mutant(
        "last-worker-from-the-start", "the last of several workers is said to have sampled the whole turn", _RECORD,
        "spans = [*transcript.workers, (stream.worker_id, transcript.workers[-1][2], transcript.tokens)]",
        "spans = [*transcript.workers, (stream.worker_id, 0, transcript.tokens)]", _FAILOVERS,
    ),
    Mutant(
        "leftover-dropped", "what had arrived of a cancelled turn, unread, is not recorded", _CHOICE,
        "            if type(event) is Delta:\n                self.transcript.take(event)\n", "            pass\n", _CHOICES,
    ),
    Mutant(
        "restart-forgets-retry", "the first attempt of a retry that is begun again loses which turn it repeats", _CHOICE,
        "replace(self.facts, answer_id=None, request=None)",
        "replace(self.facts, retry_of=None, answer_id=None, request=None)", _CHOICES,
    ),
    Mutant(
        "restart-of-what-is-lost", "a turn that is begun again is in place of one that could not be recorded", _CHOICE,
        "transcript.turn_id if lost.recorded else self.facts.retry_of", "transcript.turn_id", _CHOICES,
    ),
    Mutant(
        "unrecorded-by-delivery", "tokens that could not be recorded are counted as far as they were delivered", _CHOICE,
        "metrics.UNRECORDED_TOKENS.labels(failure.code).inc(transcript.tokens)",
        "metrics.UNRECORDED_TOKENS.labels(failure.code).inc(transcript.delivered)", _CHOICES,
    ),
    Mutant(
        "commit-overtakes-save", "the commit of a turn does not wait for the write of its open state", _CHOICE,
        "        if self.saving is not None and not self.saving.done():\n            await asyncio.wait({self.saving})\n", "",
        _CHOICES,
    ),
    Mutant(
        "late-uncounted", "tokens of a cancelled stream that nobody takes are counted nowhere", _STREAMS,
        "        metrics.LATE_TOKENS.inc(sum(len(event.ids) >> 2 for event in self.leftover() if type(event) is Delta))\n",
        "        self.leftover()\n",
        ("tests/unit/proxy/turns/test_choice.py",),
    ),
    Mutant(
        "credit-for-tokens-only", "text without a token takes credit and never gives it back", _STREAMS,
        "owed = self._spent - self._repaid", "owed = self.received_tokens - self._repaid", _MAILBOXES,
    ),
    Mutant(
        "failure-before-events", "a stream that failed hides what had arrived before", _STREAMS,
        "        if not self._events:\n            if self._failure is not None:\n                raise self._failure\n",
        "        if self._failure is not None:\n            raise self._failure\n        if not self._events:\n",
        _MAILBOXES,
    ),
    Mutant(
        "takeover-without-prefix", "a turn goes on elsewhere after the new part of its prompt only", _FAILOVER,
        'prompt_ids = b"".join((choice.plan.prefix.ids, transcript.started.new_ids))',
        "prompt_ids = transcript.started.new_ids", _FAILOVERS,
    ),
    Mutant(
        "takeover-under-what-was-asked", "a turn goes on under the law that was asked for, not the one in effect", _FAILOVER,
        "        order.job = msgspec.structs.replace(order.job, sampling=transcript.started.law)\n", "", _FAILOVERS,
    ),
    Mutant(
        "seal-what-has-grown", "a turn is sealed as it was read, though it has grown since", _RECORDER,
        "if row.finish == OPEN and _are_of_one_commit(row, turn):", "if row.finish == OPEN:", _RECORDERS,
    ),
    Mutant(
        "rows-added-twice", "rows that another request has read meanwhile are added once more", _RECORDER,
        "for row in rows[recording.turns - start :]:", "for row in rows:", _RECORDERS,
    ),
    Mutant(
        "id-in-use-again", "the tree of a deleted session is kept for the next one of its name", _RECORDER,
        "recording.session.created_at != session.created_at:", "recording.session.trial_id != session.trial_id:", _RECORDERS,
    ),
    Mutant(
        "gap-in-the-tree", "a turn is added under the next number, though rows before it are missing", _RECORDER,
        "elif number == recording.turns:", "elif number >= recording.turns:", _RECORDERS,
    ),
    Mutant(
        "saved-tokens-twice", "tokens that were saved while the turn was open count again when it ends", _RECORDING,
        "self.sampled_tokens += (row.completion_tokens or 0) - self.open_tokens.pop(row.turn_id, 0)",
        "self.sampled_tokens += row.completion_tokens or 0 * self.open_tokens.pop(row.turn_id, 0)",
        _RECORDERS,
    ),
    Mutant(
        "prefer-newest", "of equal turns the newest is gone on from, though it is partial", _TREE,
        "if held < 0 or (not self._flags[number] & PARTIAL, number) > (not self._flags[held] & PARTIAL, held):",
        "if held < 0 or number > held:", _TREES,
    ),
    Mutant(
        "settled-tokens-kept", "a running turn that ends keeps the length that it was saved with", _TREE,
        "        self.tokens[number] = row.path_tokens\n", "", _TREES,
    ),
    Mutant(
        "partial-is-barren", "a turn that was cut off after some tokens can't be gone on from", _TREE,
        "barren = row.partial and row.completion_tokens == 0", "barren = row.partial", _TREES,
    ),
    Mutant(
        "other-tools-unseen", "a conversation goes on though its tools have changed", _TREE,
        "elif self._context_of[here] == context:", "elif context >= 0:", _TREES,
    ),
    Mutant(
        "any-call-id", "one call id of a turn is enough to take a message for its reply", _ECHOES,
        'return all(parse_call_id(call.get("id") or "") == (turn_id, i) for i, call in enumerate(calls))',
        'return any(parse_call_id(call.get("id") or "") == (turn_id, i) for i, call in enumerate(calls))', _ECHOED,
    ),
    Mutant(
        "empty-beginning", "an empty message counts as the beginning of a reply that was cut off", _CUTS,
        "return bool(said) and whole.startswith(said)", "return whole.startswith(said)", _ECHOED,
    ),
    Mutant(
        "calls-after-some-text", "calls count as a beginning though the text before them is not whole", _CUTS,
        "return said == whole and len(calls)", "return whole.startswith(said) and len(calls)", _ECHOED,
    ),
    Mutant(
        "shared-unmarked", "a turn that two samples have is not marked as shared in the second", _SAMPLES,
        "shared=turn.turn_id in earlier,", "shared=False,", _SAMPLED,
    ),
    Mutant(
        "spans-across-prompts", "two spans of one version are joined across the prompt between them", _SAMPLES,
        "if spans and spans[-1].end == start and spans[-1].version == span.version:",
        "if spans and spans[-1].version == span.version:", _SAMPLED,
    ),
    Mutant(
        "prompt-logprobs-zero", "tokens of the prompt have log-probability 0", _SAMPLES,
        "logprobs += (_NAN * n_new,", "logprobs += (bytes(4 * n_new),", _SAMPLED,
    ),
    Mutant(
        "superseded-is-a-leaf", "a superseded turn at the end of a path makes a sample", _SAMPLES,
        "or (turn.completion_ids and turn.superseded_by is None):", "or turn.completion_ids:", _SAMPLED,
    ),
)  # fmt: skip

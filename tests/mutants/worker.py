"""Mutants of the worker: from sampled ids to frames."""

from __future__ import annotations

from tests.mutants.base import Mutant

_JOB, _STREAMS, _GATE = (
    "inference_worker/steno_worker/chat/chat_engine.py",
    "inference_worker/steno_worker/relay/generations.py",
    "inference_worker/steno_worker/weights/gate.py",
)
_READER, _REPLAY, _STOPS, _EXTEND = (
    f"inference_worker/steno_worker/chat/{name}.py" for name in ("reader", "replay", "stops", "extend")
)

_JOBS = ("tests/unit/worker/chat/test_job.py",)
_REPLAYS = ("tests/unit/worker/chat/test_replay.py",)
_STOPPED = ("tests/unit/worker/chat/test_stops.py",)
_STREAMED = ("tests/unit/worker/test_streams.py",)
_EXTENDED = ("tests/unit/worker/chat/test_extend.py",)
_GATES = ("tests/unit/worker/weights/test_gate.py",)

MUTANTS = (
    Mutant(
        "cut-step-keeps-last", "a step that is cut keeps its last log-probabilities, not its first", _JOB,
        "floats_to_bytes(step.logprobs[: len(read.ids)])",
        "floats_to_bytes(step.logprobs[len(step.logprobs) - len(read.ids) :])", _JOBS,
    ),
    Mutant(
        "cut-step-keeps-all", "a step that is cut keeps the log-probabilities of what was cut off", _JOB,
        "floats_to_bytes(step.logprobs[: len(read.ids)])", "floats_to_bytes(step.logprobs)", _JOBS,
    ),
    Mutant(
        "mixed-cache-untold", "what a step says of its cache is not told", _JOB,
        "            mixed_kv=step.mixed_kv,\n", "", _JOBS,
    ),
    Mutant(
        "bent-law-unmarked", "tokens under a bent law are marked only where a grammar bent it", _JOB,
        "constrained=step.constrained or not law.is_plain(),", "constrained=step.constrained,", _JOBS,
    ),
    Mutant(
        "takeover-begins-anew", "a turn that goes on here may sample as much as a new one", _JOB,
        "ids, rest = [*ids, *sampled], law_of_the_rest(law, before, request.attempt)", "ids = [*ids, *sampled]", _REPLAYS + _JOBS,
    ),
    Mutant(
        "taken-over-shown-again", "what a client has is only taken off the replay, not off what comes later", _JOB,
        "                    if unshown is not None:\n                        last.parsed = unshown.of(last.parsed)\n", "",
        _REPLAYS + _JOBS,
    ),
    Mutant(
        "failed-step-uncounted", "tokens of a step that fails are counted as sent", _JOB,
        "        finally:\n            self.tally.unsent[why] += count\n", "        finally:\n            pass\n", _JOBS,
    ),
    Mutant(
        "same-seed-again", "another worker goes on with the same seed, and draws the same tokens again", _REPLAY,
        'f"{seed} {attempt}".encode()', 'f"{seed}".encode()', _REPLAYS,
    ),
    Mutant(
        "replay-stops-early", "a stop id counts as the end although `min_tokens` had not been reached", _REPLAY,
        "if token_id in stops and len(ids) > law.min_tokens:", "if token_id in stops:", _REPLAYS,
    ),
    Mutant(
        "min-tokens-short-by-one", "a stop string is looked for one token too early", _READER,
        "if self._matcher is not None and self.sampled + index + 1 > self._min_tokens:",
        "if self._matcher is not None and self.sampled + index + 1 >= self._min_tokens:", _JOBS + _STOPPED,
    ),
    Mutant(
        "held-text-lost", "text that might have begun a stop string is lost at the end", _READER,
        "                if final and stop is None:\n                    text += self._matcher.flush()\n", "", _JOBS + _STOPPED,
    ),
    Mutant(
        "tokens-after-one-call", "what the model said after its only call is recorded with it", _READER,
        "                return StepText(step.ids[: index + 1], whole, \"stop\", ONE_CALL)\n",
        "                return StepText(step.ids, whole, \"stop\", ONE_CALL)\n",
        (*_JOBS, "tests/unit/worker/chat/test_hermes.py"),
    ),
    Mutant(
        "stop-shown-in-part", "all of a stop string but its last characters may leave before it is whole", _STOPS,
        "range(min(len(stop) - 1, len(text)), longest, -1)", "range(min(len(stop) - 2, len(text)), longest, -1)", _STOPPED,
    ),
    Mutant(
        "stop-that-begins-first", "of two stop strings the one wins that begins first, though the other was whole before", _STOPS,
        "min(found, key=lambda match: match[:2])", "min(found, key=lambda match: match[1])", _STOPPED,
    ),
    Mutant(
        "text-costs-no-credit", "a delta without a token costs no credit", _STREAMS,
        "self._credit -= tokens or 1", "self._credit -= tokens", _STREAMED,
    ),
    Mutant(
        "overdrawn-credit-goes-on", "a grant wakes a stream that has still overdrawn its credit", _STREAMS,
        "        if self._credit > 0:\n            self._credited.set()\n", "        self._credited.set()\n", _STREAMED,
    ),
    Mutant(
        "cancelled-before-it-began", "a generation that is cancelled before its first step says nothing", _STREAMS,
        "            self._say_stopped()\n            return\n        self._begun = True\n",
        "            return\n        self._begun = True\n", _STREAMED,
    ),
    Mutant(
        "withheld-uncounted", "tokens that never pass the gate are not counted", _STREAMS,
        'self._engine.tally.unsent["withheld"] += len(delta.ids) >> 2', 'self._engine.tally.unsent["withheld"] += 0',
        _STREAMED + _GATES,
    ),
    Mutant(
        "condemned-forgiven", "a stream that ran on weights that must not be used goes on once others are proved", _GATE,
        "            self._condemned, self.era = False, self.era + 1\n", "            self._condemned = False\n", _GATES,
    ),
    Mutant(
        "old-weights-wait", "tokens of the old weights wait for the probe of the new ones", _GATE,
        "            if version != self._version:\n                return\n", "", _GATES,
    ),
    Mutant(
        "header-dropped", "the header of the next message is dropped with the stop id before it", _EXTEND,
        "    if keeps_own and (\n        whole[cut] == last_id or not _is_header(format, whole[cut], "
        "lambda: rendered(old, field, []), old.reply)\n    ):\n",
        "    if keeps_own:\n", _EXTENDED,
    ),
    Mutant(
        "marks-before-the-cut", "new messages may stand before the recorded reply", _EXTEND,
        "if cut is None or any(text.find(mark, ends[cut]) < 0 for mark in marks):",
        "if cut is None or any(text.find(mark) < 0 for mark in marks):", _EXTENDED,
    ),
    Mutant(
        "old-rendered-again", "a template that renders old things after the reply goes unnoticed", _EXTEND,
        "if rendered(reworded, field, short)[-len(tail) :] != tail:", "if rendered(old, field, short)[-len(tail) :] != tail:",
        _EXTENDED,
    ),
)  # fmt: skip

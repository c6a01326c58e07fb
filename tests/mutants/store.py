"""Mutants of what is remembered: the Lua scripts in Redis, the encoding of turns, the account of a run."""

from __future__ import annotations

from tests.mutants.base import Mutant

_COMMIT, _WRITE, _COMPLETE = (
    f"proxy/steno_proxy/store/redis/lua/{name}.lua" for name in ("commit", "run_write", "complete")
)
_PARTS, _CHANGES = (f"proxy/steno_proxy/store/redis/run/{name}.py" for name in ("parts", "changes"))
_DECISIONS, _LEASING = (f"proxy/steno_proxy/store/runs/{name}.py" for name in ("decisions", "leasing"))
_CODEC, _TALLY = "proxy/steno_proxy/store/encoding/codec.py", "proxy/steno_proxy/store/runs/settlement.py"

_CONTRACT = ("tests/integration/store/test_redis_contract.py",)
_RACES = ("tests/integration/store/consistency/test_redis_run_races.py",)
_DECIDED = ("tests/unit/proxy/store/test_run_decisions.py",)
_MEMORY = ("tests/unit/proxy/store/test_memory.py",)
_CRASHES = ("tests/integration/store/consistency/test_redis_lease_crashes.py",)
_ENCODED = ("tests/unit/proxy/store/test_codec.py",)

MUTANTS = (
    Mutant(
        "open-tokens-twice", "tokens of a turn that was saved open are counted again when it is whole", _COMMIT,
        "redis.call('HINCRBY', KEYS[1], 'completion', ARGV[8] - before[1])",
        "redis.call('HINCRBY', KEYS[1], 'completion', ARGV[8])", _CONTRACT,
    ),
    Mutant(
        "open-logprobs-kept", "a turn that is whole keeps the log-probabilities that it was saved with", _COMMIT,
        "  redis.call('LSET', KEYS[5], number, ARGV[6])\n", "", _CONTRACT,
    ),
    Mutant(
        "sealed-takes-turns", "a record whose tokens have been counted takes turns yet", _COMMIT,
        "if sealed then return {-6} end\n", "", _CONTRACT,
    ),
    Mutant(
        "reply-shared", "the reply of an open turn stays in its place when the turn is whole", _COMMIT,
        "  redis.call('LSET', KEYS[6], reply_at, ARGV[#ARGV])\n", "", _CONTRACT,
    ),
    Mutant(
        "superseded-unmarked", "the turn whose place another one takes is not told so", _COMMIT,
        "if ARGV[13] ~= '' then redis.call('HSET', KEYS[8], ARGV[13] .. '<', ARGV[1]) end\n", "", _CONTRACT,
    ),
    Mutant(
        "ended-counts-again", "a trial's tokens are booked each time that its end is told", _DECISIONS,
        "first = not trial.booked and life not in run.taken", "first = not trial.booked", _CRASHES,
    ),
    Mutant(
        "late-counts-again", "late tokens are booked each time that they are told", _DECISIONS,
        "    if turn not in run.taken:\n", "    if turn:\n", _DECIDED,
    ),
    Mutant(
        "late-not-sampled", "late tokens are booked as not trained, and not as sampled", _DECISIONS,
        "        run.book(tokens)\n", "", _MEMORY,
    ),
    Mutant(
        "extend-forgets-to-hold", "an extended lease runs out when it would have without", _PARTS,
        "                if leased:\n", "                if again:\n", _CONTRACT,
    ),
    Mutant(
        "deleted-after-lease", "tokens that a lease has brought are booked as deleted too", _DECISIONS,
        "before.outcome == TRAIN and not status.grants:", "before.outcome == TRAIN:", _MEMORY,
    ),
    Mutant(
        "takeover-takes-all", "a trainer that takes its run over ends leases of trainers that never register", _LEASING,
        "status.state is GroupState.LEASED and LeaseName(run_id, name, status.granted).epoch is not None:",
        "status.state is GroupState.LEASED:", _MEMORY,
    ),
    Mutant(
        "used-for-ever", "a group that is leased again is still said to be used", _LEASING,
        "grants=status.grants + 1, used=False", "grants=status.grants + 1", _MEMORY,
    ),
    Mutant(
        "run-not-compared", "what was decided of a run is written whatever has changed since", _WRITE,
        "    if value ~= before[i] then return 0 end\n", "", _RACES,
    ),
    Mutant(
        "trials-not-compared", "a group is leased with a trial that was deleted meanwhile", _PARTS,
        "((key, part) for key, (part, _) in hashes.items())",
        "((key, part) for key, (part, _) in hashes.items() if key != 'trials')",
        _RACES,
    ),
    Mutant(
        "later-fields-lost", "fields that only a later release knows are lost when a record is written", _PARTS,
        "for name, value in kept.items()} | other)", "for name, value in kept.items()})", _DECIDED,
    ),
    Mutant(
        "done-not-on-replicas", "what a call finds done already is told before replicas have it", _CHANGES,
        "or reads > 1 or self._link.waits)", "or reads > 1)", _RACES,
    ),
    Mutant(
        "reward-replaced", "another reward takes the place of the first", _COMPLETE,
        "  if reward and reward ~= ARGV[2] then return {-4, status, reward or ''} end\n", "", _CONTRACT,
    ),
    Mutant(
        "one-version-for-all", "a span that does not cover the turn is kept as if it did", _CODEC,
        "if len(spans) == 1 and spans[0].start == 0 and spans[0].end == completion_tokens:", "if len(spans) == 1:", _ENCODED,
    ),
    Mutant(
        "asked-as-served", "what was asked for is read back as what was served", _CODEC,
        "asked=None if volatile_asked == volatile_law else volatile_asked,", "asked=None,", _ENCODED,
    ),
    Mutant(
        "calls-by-prefix", "call ids that have another form are made again as if they had ours", _CODEC,
        "return prefix if _unpack_calls(prefix, row) == turn.call_ids else turn.call_ids", "return prefix", _ENCODED,
    ),
    Mutant(
        "ticks-rounded", "a time is kept as ticks though that changes it", _CODEC,
        "yield ticks if ticks is not None and queued + ticks * TICK_S == time else time", "yield ticks", _ENCODED,
    ),
    Mutant(
        "late-with-what-was-counted", "late tokens of a turn that was counted while it was open are counted whole", _TALLY,
        "(more := count - counted.get(version, 0)) > 0}", "(more := count) > 0}",
        _MEMORY,
    ),
    Mutant(
        "unscored-for-good", "a trial without a reward is final before its reward may come", _TALLY,
        "return NotTrained.UNSCORED, bool(head.final)", "return NotTrained.UNSCORED, True",
        ("tests/unit/proxy/store/test_memory.py", "tests/unit/proxy/store/test_lease_histories.py"),
    ),
)  # fmt: skip

"""Mutants of which model answers for a name, while workers come and go."""

from __future__ import annotations

from tests.mutants.base import Mutant

_ROUTING, _PLACING = "proxy/steno_proxy/workers/routing.py", "proxy/steno_proxy/workers/placement.py"
_PLACED = ("tests/unit/proxy/workers/test_routing.py", "tests/unit/proxy/workers/test_placing.py")
_NAMES, _HEARD = "proxy/steno_proxy/policies/model_names.py", ("tests/unit/proxy/policies/test_names.py",)
_RETIRE = "proxy/steno_proxy/store/redis/lua/policy_retire.lua"

MUTANTS = (
    Mutant(
        "another-policy-answers", "an unknown name is any policy's while the default one's workers are away", _ROUTING,
        "return usual if usual or has_default else every", "return usual or every", _PLACED,
    ),
    Mutant(
        "default-not-waited-for", "an unknown name is refused at once while the default policy's workers are away", _PLACING,
        "    elif has_default and not offered:\n        raise WorkersAway(no_default(order.model))\n", "", _PLACED,
    ),
    Mutant(
        "leaving-is-there", "a worker that takes no new turns counts as one of its model", _PLACING,
        "has_default=has_default) if not offer[0].draining]", "has_default=has_default)]", _PLACED,
    ),
    Mutant(
        "another-model-answers", "a model whose workers are away is any other model", _PLACING,
        "    if is_model:\n        offered = ", "    if False:\n        offered = ", _PLACED,
    ),
    Mutant(
        "suspects-alike", "a worker that said what can't be gets turns as any other", _PLACING,
        "choose(order.trial_id, trusted or list(able), ", "choose(order.trial_id, list(able), ", _PLACED,
    ),
    Mutant(
        "unread-is-none", "until names have been read, none is of the default policy", _NAMES,
        "return self._kept is None or DEFAULT_POLICY in", "return self._kept is not None and DEFAULT_POLICY in", _HEARD,
    ),
    Mutant(
        "policy-for-good", "a name keeps the policy that it was told with first", _NAMES,
        "name in kept and kept[name] != policy]", "name in kept and kept[name] != policy and False]", _HEARD,
    ),
    Mutant(
        "last-card-counts", "a name that is served under two policies is of the one that comes last", _NAMES,
        "        if found.get(card.name) != DEFAULT_POLICY:\n            found", "        if True:\n            found", _HEARD,
    ),
    Mutant(
        "heard-forgotten", "names that are heard while the store is asked are forgotten", _NAMES,
        "in (kept | news | heard).items()", "in (kept | news).items()", _HEARD,
    ),
    Mutant(
        "policy-outlives-name", "what policy a name had stays when the name is retired", _RETIRE,
        "redis.call('HDEL', KEYS[2], ARGV[1])\n", "", ("tests/integration/store/test_redis_policies.py",),
    ),
)  # fmt: skip

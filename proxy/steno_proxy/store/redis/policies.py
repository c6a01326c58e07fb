"""Policies and their updates in Redis: the `PolicyStore` protocol for any number of replicas. The schema: `schema.py`.

All of it lies on one slot: an update is posted, served and ended a few times in its life, and nobody asks per turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steno.contracts.policy import UpdateSpec
from steno_proxy.store.policies import (
    LATER_S,
    SUPERSEDED_TTL_S,
    PolicyHead,
    UpdateRow,
    not_newest,
    other_digest,
    unknown,
)
from steno_proxy.store.redis.link.redis_link import RedisLink, Script
from steno_proxy.store.redis.recordings import pairs
from steno_proxy.store.redis.schema import (
    MODEL_NAMES,
    MODEL_POLICIES,
    POLICY_HEADS,
    UPDATE_PREFIX,
    policy_versions_key,
    update_key,
)

OTHER_DIGEST, NOT_NEWEST = -1, -2
"""Outcomes of policy_post.lua."""


class RedisPolicies:
    """Keeps the `PolicyStore` protocol. Every call is one round trip and may be repeated."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._scripts = {name: Script(f"policy_{name}") for name in ("post", "serve", "end", "keep", "retire")}

    async def post(self, spec: UpdateSpec, *, now: float) -> UpdateRow:
        update_id = spec.update_id
        reply = await self._run(
            "post", [POLICY_HEADS, policy_versions_key(spec.policy), update_key(update_id)],
            [spec.policy, spec.version, spec.manifest.digest, update_id, spec.model_dump_json(), repr(now), UPDATE_PREFIX,
             SUPERSEDED_TTL_S, LATER_S],
        )  # fmt: skip
        if reply[0] == OTHER_DIGEST:
            raise other_digest(spec)
        if reply[0] == NOT_NEWEST:
            raise not_newest(spec)
        return _row(update_id, reply[1])

    async def heads(self) -> list[PolicyHead]:
        [fields] = await self._link.ask(("HGETALL", POLICY_HEADS))
        values = {key.decode(): value.decode() for key, value in _pairs(fields).items()}
        heads = []
        for key, posted in values.items():
            if key.startswith("posted:"):
                policy = key.removeprefix("posted:")
                update_id, _, since = posted.partition(" ")
                heads.append(PolicyHead(policy, update_id, float(since), values.get(f"served:{policy}", "")))
        return heads

    async def update(self, update_id: str) -> UpdateRow:
        # As a write, which waits for replicas: workers are told of it, and a failover must not know less than they do.
        fields = await self._link.write("HGETALL", update_key(update_id))
        if not fields:
            raise unknown(update_id)
        return _row(update_id, fields)

    async def serve(self, update_id: str) -> None:
        keys = [POLICY_HEADS, update_key(update_id)]
        await self._run("serve", keys, [update_id, UPDATE_PREFIX, SUPERSEDED_TTL_S])

    async def end(self, update_id: str, state: str, *, now: float) -> None:
        await self._run("end", [update_key(update_id)], [state, repr(now)])

    async def names(self) -> dict[str, str]:
        # The set decides: older proxies know it alone, and leave the policy of a name that they retire in the hash.
        names, fields = await self._link.ask(("SMEMBERS", MODEL_NAMES), ("HGETALL", MODEL_POLICIES))
        policies = _pairs(fields)
        return {name.decode(): policies.get(name, b"").decode() for name in names}

    async def keep_names(self, names: Mapping[str, str]) -> None:
        args = [word for pair in names.items() for word in pair]
        await self._run("keep", [MODEL_NAMES, MODEL_POLICIES], args)

    async def retire_name(self, name: str) -> bool:
        return bool(await self._run("retire", [MODEL_NAMES, MODEL_POLICIES], [name]))

    async def _run(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self._link.run(self._scripts[name], keys, args)


def _pairs(fields: Any) -> dict[bytes, bytes]:
    """A hash as a command or a script answers it: some clients make a dict of it."""
    return fields if isinstance(fields, dict) else pairs(fields)


def _row(update_id: str, fields: Any) -> UpdateRow:
    found = _pairs(fields)
    ended = found.get(b"ended")
    return UpdateRow(
        update_id,
        found[b"policy"].decode(),
        found[b"version"].decode(),
        int(found[b"number"]),
        found[b"spec"],
        float(found[b"created"]),
        float(found[b"since"]),
        found[b"state"].decode(),
        None if ended is None else float(ended),
    )

"""A store's groups and trials as the tests of leases need them: made, spoken in, ended, leased."""

from __future__ import annotations

from typing import Any

from steno.contracts.records import Group, TokenSpan, ids_to_bytes
from steno.contracts.runs.leases import Lease, LeaseRequest, RunView
from steno_proxy.store.interface import SessionStore
from tests.support.records.recordings import row, session, turn

RUN = "run {1}/π"
"""Any text is a run id: also one that would end a hash tag."""


async def group(store: SessionStore, group_id: str, size: int = 2, *, run_id: str | None = RUN, **fields: Any) -> Group:
    names = [f"{group_id}.{number}" for number in range(size)]
    values = {"created_at": 7.0} | fields
    made = Group(group_id=group_id, run_id=run_id, size=size, trial_ids=names, **values)
    sessions = [session(name, created_at=values["created_at"], group_id=group_id, run_id=run_id) for name in names]
    return await store.create_group(made, sessions)


async def speak(
    store: SessionStore, trial_id: str, tokens: int, *, version: str = "l/1", number: int = 0, **fields: Any
) -> Any:
    """One turn of so many sampled tokens. Returns the turn."""
    values: dict[str, Any] = {
        "completion_ids": ids_to_bytes(list(range(tokens))), "sampling_logprobs": bytes(4 * tokens),
        "versions": [TokenSpan(version=version, start=0, end=tokens)] if tokens else [], "call_ids": {},
    }  # fmt: skip
    one = turn(number, seed=sum(trial_id.encode()), text_bytes=20, **(values | fields))
    await store.commit(trial_id, one, row(one), now=8.0)
    return one


async def end(
    store: SessionStore, trial_id: str, reward: float | None = 1.0, *, status: str = "completed", now: float = 10.0,
    final: bool = True,
) -> None:  # fmt: skip
    await store.complete(trial_id, status=status, reward=reward, end_reason="harness", metrics={}, now=now, final=final)
    await store.settle(trial_id, now=now)


async def finished(
    store: SessionStore, group_id: str, size: int = 2, *, tokens: int = 5, now: float = 10.0, **fields: Any
) -> Group:
    """A group of which every trial said something and got a reward."""
    made = await group(store, group_id, size, **fields)
    for trial_id in made.trial_ids:
        await speak(store, trial_id, tokens)
        await end(store, trial_id, now=now)
    return made


async def lease(
    store: SessionStore, now: float = 20.0, *, most: int = 1, ttl_s: float = 100.0, consumer: str = "trainer",
    run_id: str | None = RUN, request_id: str | None = None, at_least: int = 1,
    epoch: int | None = None,
) -> list[Lease]:  # fmt: skip
    asked = LeaseRequest(run_id=run_id, consumer=consumer, max_groups=most, ttl_s=ttl_s, request_id=request_id)
    return (await store.runs.lease(asked, at_least=at_least, epoch=epoch, now=now)).leases


async def again(store: SessionStore, group_id: str, origin: str, size: int, *, run_id: str) -> list[str]:
    """A group that scores another's trials anew. Returns its trials."""
    names = [f"{group_id}.{number}" for number in range(size)]
    made = Group(group_id=group_id, run_id=run_id, size=size, trial_ids=names, created_at=20.0, rescore_of=origin)
    fields = {"created_at": 1_800_000_000.0, "group_id": group_id, "run_id": run_id}
    sessions = [session(name, rescore_of=f"{origin}.{number}", **fields) for number, name in enumerate(names)]
    await store.create_group(made, sessions)
    return names


def unaccounted(view: RunView, *leases: Lease) -> dict[str, int]:
    """Sampled and borrowed tokens that are neither given up nor brought by these leases, by version: {} is balance (I4)."""
    left = dict(view.to_account_for)
    for tokens in [*view.not_trained.values(), *(found for one in leases for found in one.tokens.values())]:
        for version, count in tokens.items():
            left[version] = left.get(version, 0) - count
    return {version: count for version, count in left.items() if count}

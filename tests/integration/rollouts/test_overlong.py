"""What a limit cut is on record as such, from the proxy to a trainer's step, and left out of it if that is asked for."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

import openai
import pytest

from steno.client.client import AsyncClient
from steno.contracts.records import Limits, SamplingPolicy, Turn
from steno.contracts.rest import Completion, GroupSpec
from steno.contracts.runs.leases import Lease, LeaseRequest
from steno_trainer.data.advantages import Estimator
from steno_trainer.data.lease_feed import LeasedGroup, LeaseFeed
from steno_trainer.data.ledger import Reason
from steno_trainer.data.overlong import Overlong, OverlongFiltering
from steno_trainer.data.rows import TrainingTerms
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.step.assemble import AssembledStep, assemble
from tests.support.programs.stack import running

ASKED = {"g.0": (300, 300, 300), "g.1": (1, 300), "g.2": (300, 300, 300, 300)}
"""`max_tokens` of each trial's requests: the second trial's first answer is cut, the third trial asks once more than it may."""

LIMIT = 3


@pytest.mark.usefixtures("clean_environment")
async def test_what_a_limit_cut_reaches_the_trainer_as_that(tmp_path: Path) -> None:
    with running(tmp_path / "stack", []) as stack:
        async with AsyncClient(stack.url) as client, asyncio.timeout(300):
            law = SamplingPolicy(force={"temperature": 1.0})
            spec = GroupSpec(group_id="g", run_id="r", size=len(ASKED), sampling=law, limits=Limits(max_turns=LIMIT))
            await client.create_group(spec)
            for trial_id, asked in ASKED.items():
                await asyncio.to_thread(speak, stack.base_url(trial_id), asked)
                await client.complete(trial_id, Completion(reward=float(trial_id == "g.0")))
            [group] = await taken(client)
            turns = {trial_id: [turn async for turn in client.turns(trial_id)] for trial_id in ASKED}
            await client.acknowledge(group.lease.lease_id)
    assert turns["g.1"][0].finish_reason == "length"
    ends = {trial.trial_id: trial.end_reason for trial in group.lease.trials}
    assert ends == {"g.0": "completed", "g.1": "completed", "g.2": "limit:max_turns"}
    every = list(chain.from_iterable(turns.values()))
    cut = tokens([turn for turn in every if turn.finish_reason == "length"])
    whole = {trial_id: of for trial_id, of in turns.items() if trial_id != "g.2" and of[-1].finish_reason != "length"}

    off = step_of(group, OverlongFiltering.OFF)
    assert off.trained_tokens == tokens(every) and off.books.total().untrained == {}
    completion = step_of(group, OverlongFiltering.COMPLETION)
    assert completion.books.total().untrained == {Reason.OVERLONG: cut}
    trial = step_of(group, OverlongFiltering.TRIAL)
    kept = tokens([turn for of in whole.values() for turn in of if turn.finish_reason != "length"])
    assert trial.trained_tokens == kept == tokens(every) - trial.books.total().untrained[Reason.OVERLONG]
    assert "g.1" in whole, "a trial that goes on from a cut answer is not cut"
    assert {row.trial_id for row in trial.batch.rows} == whole.keys()


def speak(base_url: str, asked: tuple[int, ...]) -> None:
    api = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    said: list[Any] = [{"role": "user", "content": "Hello"}]
    for number, max_tokens in enumerate(asked):
        try:
            answer = api.chat.completions.create(model="tiny", messages=said, max_tokens=max_tokens, seed=number)
        except openai.APIStatusError:
            assert number == LIMIT
            return
        said += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And then?"}]


async def taken(client: AsyncClient) -> list[LeasedGroup]:
    """As a trainer takes it; the lease stays."""
    leases: list[Lease] = []
    while not leases:
        leases = await client.lease(LeaseRequest(run_id="r", consumer="t", wait_s=20))
    feed = LeaseFeed(client, run_id="r", consumer="t", ahead=1, trained=set())
    return [await feed._read(lease) for lease in leases]


def tokens(turns: list[Turn]) -> int:
    return sum(turn.completion_tokens for turn in turns)


def step_of(group: LeasedGroup, filtering: OverlongFiltering) -> AssembledStep:
    [version] = {span.version for sample in group.samples for span in sample.spans}
    terms = TrainingTerms(
        VersionHistory((PolicyVersion.parse(version),)), max_staleness_steps=0, max_tokens=4096, vocabulary=10**6
    )
    return assemble([group], terms, Estimator.GRPO, Overlong(filtering))

"""Rollouts in this process, and what runs a command: the test's own, so that it can say when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from steno_rollouts.build import Prepared
from steno_rollouts.config import RolloutSettings
from steno_rollouts.groups.plan import epochs
from steno_rollouts.trials.executor import Executor, Exit, TrialJob
from tests.integration.rollouts.conftest import ADMIN
from tests.support.programs.stack import Stack


@dataclass
class Stand(Executor):
    """An `Executor` that does what the test says. `says`: trial id, attempt -> its exit; a reward goes to the file."""

    turns: int = 1
    reward: str | None = "1.0"
    exits: Callable[[str, int], Exit] = lambda trial, attempt: Exit(0)
    gate: asyncio.Event | asyncio.Barrier | None = None
    started: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0
    cleared: list[str] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def run(self, job: TrialJob) -> Exit:
        self.started.append(job.trial_id)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            ended = self.exits(job.trial_id, self.started.count(job.trial_id))
            if ended.code == 0:
                for _ in range(self.turns):
                    await self.ask(job)
                if self.gate is not None:
                    await self.gate.wait()
            if self.reward is not None and ended.code == 0:
                (job.workdir / "reward.txt").write_text(self.reward)
            return ended
        finally:
            self.running -= 1

    async def ask(self, job: TrialJob) -> None:
        headers = {"authorization": f"Bearer {job.environment['OPENAI_API_KEY']}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            answer = await http.post(f"{job.environment['OPENAI_BASE_URL']}/chat/completions", json=body)
            assert answer.is_success, answer.text

    async def clear(self, folder: Path) -> None:
        self.cleared.append(folder.name)


def prepared(stack: Stack, folder: Path, run: str, tasks: int = 1, **settings: Any) -> Prepared:
    path = folder / "tasks.jsonl"
    path.write_text("".join(f'{{"id": "t{n}"}}\n' for n in range(tasks)))
    given = {"group_size": 2, "command": ["agent"], "work_dir": folder / "work", "run": run, "retries": 0, "key": ADMIN}
    return Prepared.of(RolloutSettings(tasks=path, proxy=stack.url, **given | settings), run)  # type: ignore[arg-type]


async def rolled(found: Prepared, stand: Stand, count: int = 1, **more: Any) -> list[Any]:
    async with found.client() as client:
        return await found.rollouts(client, executor=stand, **more).run(epochs(found.tasks, count))

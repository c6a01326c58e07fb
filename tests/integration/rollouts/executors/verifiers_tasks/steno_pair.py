"""An environment of verifiers with two agents: one solves, the other looks at the same task. Its tasks have no names."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from steno_words import WordData


class PairTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    pass


class Pair(vf.Taskset[PairTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[PairTask]:
        while True:
            yield PairTask(WordData(prompt="Say amber backwards.", answer="rebma"), self.config.task)


class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    async def run(self, task: PairTask, agents: vf.Agents) -> None:
        await agents.solver.run(task)
        await agents.critic.run(task)

    async def finalize(self, task: PairTask, episode: vf.Episode) -> None:
        for trace in episode.traces:
            right = task.data.answer in str(trace.messages[-1].content)
            trace.record_reward("right", float(right) if trace.agent.name == "solver" else 0.25)


__all__ = ["Pair", "PairEnv"]

"""An agent of Harbor's that runs the null trial in the sandbox: for benchmarks/rollouts.py. Runs where Harbor does."""

from __future__ import annotations

from typing import Any

from harbor.agents.base import BaseAgent  # type: ignore[import-not-found, unused-ignore]


class Null(BaseAgent):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def name() -> str:
        return "null"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None: ...

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        done = await environment.exec(command="bash /opt/null_trial.sh", env=self._extra_env)
        if done.return_code:
            raise RuntimeError(f"exit code {done.return_code}: {(done.stdout or '')[-300:]}")

"""An agent of Harbor's for these tests: its instruction is a script, which it runs in the sandbox. Runs where Harbor does."""

from __future__ import annotations

from typing import Any

from harbor.agents.base import BaseAgent  # type: ignore[import-not-found, unused-ignore]


class Shell(BaseAgent):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def name() -> str:
        return "shell"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None: ...

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        done = await environment.exec(command=instruction)
        (self.logs_dir / "said.txt").write_text(done.stdout or "")
        if done.return_code:
            raise RuntimeError(f"exit code {done.return_code}: {(done.stdout or '')[-300:]}")

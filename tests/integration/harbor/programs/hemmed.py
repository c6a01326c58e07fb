"""An agent of Harbor's for tests of a sandbox's network: `/opt/task/setup.sh` is its installation. Runs where Harbor does.

The image in which Harbor asks the kernel for nftables is of a public registry, named by its digest: here it is another one.
"""

from __future__ import annotations

from typing import Any

from harbor.agents.base import BaseAgent  # type: ignore[import-not-found, unused-ignore]
from harbor.environments.docker.docker import DockerEnvironment  # type: ignore[import-not-found, unused-ignore]

DockerEnvironment._EGRESS_CONTROL_KERNEL_PROBE_IMAGE = "localhost/steno-gost:latest"


class Hemmed(BaseAgent):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def name() -> str:
        return "hemmed"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        done = await environment.exec(command="sh /opt/task/setup.sh")
        (self.logs_dir / "setup.txt").write_text(done.stdout or "")

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        done = await environment.exec(command=instruction)
        (self.logs_dir / "said.txt").write_text(done.stdout or "")
        if done.return_code:
            raise RuntimeError(f"exit code {done.return_code}: {(done.stdout or '')[-300:]}")

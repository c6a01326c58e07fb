"""An agent made with the OpenAI Agents SDK as its documentation shows it: one tool, a task, streamed."""

from __future__ import annotations

import asyncio
import os
import subprocess

from agents import Agent, Runner, function_tool, set_tracing_disabled  # type: ignore[import-not-found]


@function_tool  # type: ignore[untyped-decorator]
def bash(command: str) -> str:
    """Run a command in a shell.

    Args:
        command: The command.
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


async def main() -> None:
    agent = Agent(name="fixer", instructions="You fix bugs.", tools=[bash], model="policy")
    result = Runner.run_streamed(agent, os.environ["TASK"], max_turns=30)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


if __name__ == "__main__":
    set_tracing_disabled(True)
    asyncio.run(main())

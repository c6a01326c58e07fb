"""A task of Inspect with a tool, for `inspect eval`: the model follows notes to a word."""

from __future__ import annotations

import asyncio

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes, match
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import Tool, tool

NOTES = {"notes/one.txt": "go on at notes/two.txt", "notes/two.txt": "the word is amber"}


@tool
def read_note() -> Tool:
    async def execute(path: str) -> str:
        """Read a note.

        Args:
            path: of the note.
        """
        if path not in NOTES:
            raise RuntimeError(f"{path}: the note is burned")
        return NOTES[path]

    return execute


@task
def notes() -> Task:
    begin = "Begin at notes/one.txt"
    samples = [Sample(id="found", input=begin, target="amber"), Sample(id="missed", input=begin, target="blue")]
    samples.append(Sample(id="burned", input="Begin at notes/none.txt", target="amber"))
    return Task(dataset=samples, solver=[use_tools(read_note()), generate()], scorer=[includes(), match()])


@solver
def waits() -> Solver:
    """Until it is ended."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await asyncio.sleep(3600)
        return state

    return solve


@task
def endless() -> Task:
    return Task(dataset=[Sample(input="Begin at notes/one.txt")], solver=[generate(), waits()], scorer=[includes()])

"""A taskset of verifiers, as its users write one: words to be said backwards."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class WordData(vf.TaskData):
    answer: str


class WordsConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("amber", "cedar")


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.name == "burned":
            raise RuntimeError("the word is burned")

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in str(trace.messages[-1].content))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.calls))


class Words(vf.Taskset[WordTask, WordsConfig]):
    def load(self) -> Iterator[WordTask]:
        for word in self.config.words:
            if not word.isalpha():
                raise SystemExit(f"no such word: {word}")
            yield WordTask(WordData(name=word, prompt=f"Say {word} backwards.", answer=word[::-1]), self.config.task)


__all__ = ["Words"]

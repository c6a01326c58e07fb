"""The demo's task: follow a chain of notes, each naming the next, to a code word.

Owns the wording that the tiny model is trained on (`scripts/make_tiny.py`) and that the agent says
(`steno_cli/demo/toy_agent.py`): one definition, so that the two can't drift apart. Each world is drawn anew, and nothing but the
tool's results says where to go: the model has to copy from what it reads. Standard library only.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from typing import Any

WORDS = (
    "amber anchor apple arrow autumn badger bamboo basil beacon berry birch bishop bottle branch breeze bridge "
    "bronze button cabin candle canyon cedar cherry circle clover cobalt copper coral cotton crater cricket crystal "
    "dagger daisy desert dragon eagle ember fable falcon feather fennel ferry forest garden ginger granite harbor "
    "hazel heron honey indigo iris island ivory jasper jungle kettle lantern lemon lilac linen lotus magnet maple "
    "marble meadow melon mirror monkey nectar needle nickel ocean olive onyx orchid otter oyster paddle palace "
    "pepper pigeon planet plum poppy quartz rabbit raven ribbon river saddle saffron sailor shadow silver spruce "
    "summer temple thistle tiger timber tulip turtle valley velvet violet walnut willow winter"
).split()
"""Every name in the task. The tokenizer has each as one token, with and without a space before it."""

SYSTEM = "You find things by reading notes."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_note",
        "description": "Read a note and return its text.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "Path of the note."}},
            "required": ["path"],
        },
    },
}
MIN_HOPS, MAX_HOPS = 3, 4
"""Notes read before the code word is known, and so the tool-call turns of a run."""


@dataclass(frozen=True)
class NotesWorld:
    """One instance of the task. `notes`: path -> text. Reading `start` and following the chain leads to `code_word`."""

    start: str
    notes: dict[str, str]
    code_word: str

    def question(self) -> str:
        return f"Find the code word. Start with {self.start}."

    def read_note(self, path: str) -> str:
        """The tool: the note's text, or a sentence saying that there is none."""
        return self.notes.get(path, f"There is no note at {path}.")

    def solved_by(self, answer: str) -> bool:
        return self.code_word in answer.lower()


def path_of(word: str) -> str:
    return f"notes/{word}.txt"


def make_world(seed: int | str, hops: int | None = None) -> NotesWorld:
    """The world of a seed; the same seed gives the same world. `hops`: tool calls needed, drawn from 3..4 by default."""
    rng = random.Random(f"steno-demo:{seed}")
    hops = hops or rng.randint(MIN_HOPS, MAX_HOPS)
    *names, code_word = rng.sample(WORDS, hops + 1)
    notes = {path_of(here): f"Go on to {path_of(there)}." for here, there in itertools.pairwise(names)}
    notes[path_of(names[-1])] = f"The code word is {code_word}."
    return NotesWorld(path_of(names[0]), notes, code_word)


def make_misleading_world(seed: int | str, hops: int = 2) -> NotesWorld:
    """A world whose notes also name where *not* to go: "Go on to notes/amber.txt, not to tulip."

    The tiny model was never trained on these words. It often follows what was named last, and solves about two worlds in five:
    something to learn from rewards alone.
    """
    rng = random.Random(f"steno-demo-misleading:{seed}")
    *names, code_word = rng.sample(WORDS, hops + 1)
    elsewhere = [word for word in WORDS if word not in (*names, code_word)]
    notes = {
        path_of(here): f"Go on to {path_of(there)}, not to {rng.choice(elsewhere)}."
        for here, there in itertools.pairwise(names)
    }
    notes[path_of(names[-1])] = f"The code word is {code_word}."
    return NotesWorld(path_of(names[0]), notes, code_word)


def call_tool(world: NotesWorld, name: str, arguments: str) -> str:
    """What the agent answers to one tool call: the note, or an error sentence that the model can read."""
    if name != TOOL["function"]["name"]:
        return f"There is no tool named {name}."
    try:
        return world.read_note(json.loads(arguments)["path"])
    except (ValueError, KeyError, TypeError) as error:
        return f"The arguments can't be read: {error!r}"

"""The tiny model, taught to follow the demo's notes by shell commands: what mini-swe-agent offers it.

mini-swe-agent is itself; what it says to the model is its user's to choose, and is short here (`mini.yaml`): the tiny model was
trained on a few hundred tokens. The task is the demo's: notes that name each other.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from steno.models import TINY
from steno_cli.demo.task import SYSTEM, NotesWorld, make_world

CONFIG = Path(__file__).with_name("mini.yaml")
BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""As mini-swe-agent has it."""
STEPS, BATCH = 50, 4


def write_notes(world: NotesWorld, folder: Path) -> None:
    for path, text in world.notes.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)


def notes_read(world: NotesWorld, trajectory: Path) -> float:
    """The fraction of the notes that the agent read: mini-swe-agent writes down what it was told."""
    told = trajectory.read_text() if trajectory.exists() else ""
    return sum(note in told for note in world.notes.values()) / len(world.notes)


def taught(folder: Path) -> Path:
    """A checkpoint, made in a few seconds. The same each time on one machine."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    rng = random.Random(1)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    for _ in range(STEPS):
        ids, weights = _batch(tokenizer, rng)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].reshape(-1), reduction="none")
        loss = (losses * weights[:, 1:].reshape(-1)).sum() / weights[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _batch(tokenizer: Any, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """ids, and weights: 1 where the model speaks. [BATCH, longest]"""
    rows = [_conversation(tokenizer, make_world(rng.getrandbits(60), rng.randint(2, 3))) for _ in range(BATCH)]
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        torch.tensor([said + [0.0] * (longest - len(said)) for _, said in rows]),
    )


def _conversation(tokenizer: Any, world: NotesWorld) -> tuple[list[int], list[float]]:
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": world.question()}]
    text = tokenizer.apply_chat_template(asked, tools=[BASH], tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    weights = [0.0] * len(ids)
    for path, note in world.notes.items():
        call = json.dumps({"name": "bash", "arguments": {"command": f"cat {path}"}})
        read = f"\n<|im_start|>user\n<tool_response>\n{note}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        for piece, weight in ((f"<tool_call>\n{call}\n</tool_call><|im_end|>", 1.0), (read, 0.0)):
            more = tokenizer.encode(piece, add_special_tokens=False)
            ids += more
            weights += [weight] * len(more)
    return ids, weights

"""Recorded sessions for tests of the trainer: turns as the proxy records them, made into samples by the proxy's own code."""

from __future__ import annotations

import random
from typing import Any

from steno.contracts.records import Sample, Session, Timings, TokenSpan, Turn, floats_to_bytes, ids_to_bytes
from steno_proxy.sessions.samples import samples

VOCABULARY = 50


def session(trial_id: str = "g.0", group_id: str | None = "g", reward: float | None = 1.0, **fields: Any) -> Session:
    known = {"status": "completed", "created_at": 0.0, "updated_at": 0.0}
    return Session(trial_id=trial_id, group_id=group_id, reward=reward, **{**known, **fields})


class Recording:
    """Turns of one session; `turn` appends one and returns its id."""

    def __init__(self, seed: int = 0) -> None:
        self.turns: list[Turn] = []
        self._rng = random.Random(seed)
        self._ends: dict[str | None, int] = {None: 0}

    def turn(self, parent: str | None, prompt: int, sampled: int, version: str = "a/1", **fields: Any) -> str:
        """prompt, sampled: how many new prompt ids and completion ids; versions default to one span of `version`."""
        number = len(self.turns)
        before = self._ends[parent]
        made = Turn(**{
            "turn_id": f"{number:012x}",
            "parent_id": parent,
            "index": number,
            "new_prompt_ids": self._ids(prompt),
            "prompt_tokens": before + prompt,
            "completion_ids": self._ids(sampled),
            "sampling_logprobs": floats_to_bytes([-self._rng.random() for _ in range(sampled)]),
            "versions": [TokenSpan(version=version, start=0, end=sampled)] if sampled else [],
            "timings": Timings(queued=0.0),
            **fields,
        })  # fmt: skip
        self.turns.append(made)
        self._ends[made.turn_id] = before + prompt + sampled
        return made.turn_id

    def samples(self, recorded: Session | None = None) -> list[Sample]:
        return samples(recorded or session(), self.turns).items

    def _ids(self, n: int) -> bytes:
        return ids_to_bytes([self._rng.randrange(VOCABULARY) for _ in range(n)])

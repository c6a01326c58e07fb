"""A trainer and an agent around a running product: weights are pushed while answers are on their way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedModel

from steno.client.client import Client
from steno.contracts.errors import StenoError
from steno.contracts.policy import Update, UpdateSpec
from tests.support.programs.processes import until
from tests.support.programs.stack import Stack
from tests.support.weights.trained import logprobs_of


def upload(client: Client, update: Update, folder: Path, piece: int) -> None:
    """What is wanted now, `piece` bytes of each."""
    for want in update.wants:
        with (folder / want.shard).open("rb") as file:
            file.seek(want.offset)
            client.upload_shard(update.update_id, want.shard, want.offset, file.read(piece))


def publish(client: Client, spec: UpdateSpec, folder: Path, *, piece: int = 1 << 20, within_s: float = 300) -> Update:
    """Post, upload what is wanted, until it has ended."""
    until = time.monotonic() + within_s
    update = client.post_update(spec)
    while update.state == "running" or update.wants:
        assert time.monotonic() < until, update
        upload(client, update, folder, piece)
        update = client.update(update.update_id, wait_s=2)
    return update


def version_in_force(client: Client) -> str | None:
    """None also while the proxy is not there."""
    with contextlib.suppress(StenoError):
        for policy in client.policies():
            return policy.version
    return None


class Answer:
    """One streamed chat completion, read in a thread. chunks: how many data lines have come; failure: why it broke.
    enough: set it, and the client goes away; what was sampled until then is the turn."""

    def __init__(self, stack: Stack, trial_id: str, tokens: int, **fields: object) -> None:
        self.chunks = 0
        self.enough = False
        self.failure: Exception | None = None
        self._url = stack.base_url(trial_id) + "/chat/completions"
        self._body = {
            "model": "any", "messages": [{"role": "user", "content": "Say something long."}], "stream": True,
            "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, **fields,
        }  # fmt: skip
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=300) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    self.chunks += line.startswith("data: ")
                    if self.enough:
                        return
        except httpx.HTTPError as error:
            self.failure = error

    def wait(self, within_s: float = 300) -> None:
        self._thread.join(within_s)
        assert not self._thread.is_alive()
        assert self.failure is None, self.failure


@contextlib.contextmanager
def control(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as client:
        yield client


def committed(stack: Stack, trial_id: str) -> dict[str, Any]:
    """The only turn of a trial, once it is on record."""
    until(lambda: stack.turns(trial_id))
    (turn,) = stack.turns(trial_id)
    return turn


def check_turn(turn: dict[str, Any], models: dict[str, PreTrainedModel], versions: list[str]) -> None:
    """Every token of it was sampled by the version that it bears, at that model's log-probability (I1, I10)."""
    spans = turn["versions"]
    assert [span["version"] for span in spans] == versions
    assert spans[0]["start"] == 0 and spans[-1]["end"] == len(turn["completion_ids"])
    ids, prompt = turn["completion_ids"], len(turn["new_prompt_ids"])
    for span in spans:
        of = logprobs_of(models[span["version"]], turn["new_prompt_ids"] + ids)[prompt - 1 :]
        got = turn["sampling_logprobs"][span["start"] : span["end"]]
        wanted = of[span["start"] : span["end"]]
        assert max(abs(a - b) for a, b in zip(got, wanted, strict=True)) < 1e-3, span

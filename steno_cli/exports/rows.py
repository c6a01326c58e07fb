"""What is written of a session, by format: rows of plain values. One session is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from steno.client.client import Client
from steno.contracts.records import Sample, bytes_to_ids, readable
from steno_cli.exports.atif import trajectories
from steno_cli.exports.chat import conversations
from steno_cli.terminal.output import console

SESSION_COLUMNS = {"trial_id": str, "group_id": str, "run_id": str, "reward": float, "status": str, "marks": list[str]}
"""What rows of turns have of their session."""
UNTRAINED_LABEL = -100
"""What losses of PyTorch and Hugging Face leave out."""


class Records(StrEnum):
    TURNS = "turns"
    SAMPLES = "samples"
    SESSIONS = "sessions"


def record_rows(client: Client, trial_id: str, records: Records) -> Iterator[dict[str, Any]]:
    """The records as REST gives them (`steno/contracts/records.py`); turns with what SESSION_COLUMNS names."""
    if records is Records.SAMPLES:
        yield from (readable(sample) for sample in _samples(client, trial_id))
        return
    session = client.session(trial_id)
    if records is Records.SESSIONS:
        yield readable(session)
        return
    beside = {name: getattr(session, name) for name in SESSION_COLUMNS}
    for turn in client.turns(trial_id):
        yield beside | readable(turn)


def atif_rows(client: Client, trial_id: str, *, whole_prompts: bool) -> Iterator[dict[str, Any]]:
    session = client.session(trial_id)
    samples = [] if "text_only" in session.marks else _samples(client, trial_id)
    yield from trajectories(session, list(client.turns(trial_id)), samples, whole_prompts=whole_prompts)


def chat_rows(client: Client, trial_id: str) -> Iterator[dict[str, Any]]:
    yield from conversations(list(client.turns(trial_id)))


def sft_rows(client: Client, trial_id: str) -> Iterator[dict[str, Any]]:
    """Of each sample with a token to train, T tokens: `input_ids` int32[T] and `labels` int32[T], -100 where the mask is 0."""
    for sample in _samples(client, trial_id):
        if not any(sample.loss_mask):
            continue
        ids = bytes_to_ids(sample.token_ids).tolist()
        labels = [one if kept else UNTRAINED_LABEL for one, kept in zip(ids, sample.loss_mask, strict=True)]
        yield {
            "input_ids": ids,
            "labels": labels,
            "trial_id": sample.trial_id,
            "group_id": sample.group_id,
            "leaf_id": sample.leaf_id,
            "reward": sample.reward,
        }


def _samples(client: Client, trial_id: str) -> list[Sample]:
    found = client.sample_list(trial_id)
    for bad in found.unreadable:
        words = f"trial {trial_id}, turn {bad.turn_id}: in no sample, {bad.completion_tokens} tokens: {bad.reason}"
        console(stderr=True).print(words, markup=False, soft_wrap=True)
    return found.items

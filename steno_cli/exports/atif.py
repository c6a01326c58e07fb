"""Sessions as ATIF, the Agent Trajectory Interchange Format of Harbor: a document for each branch of a conversation.

https://harborframework.com/docs/trajectory-format, version 1.7. What the format has no field for stands in `extra`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from steno.contracts.json_limits import storable
from steno.contracts.records import Sample, Session, Turn, bytes_to_floats, bytes_to_ids
from steno_cli.exports.branches import Branch, branches_of, delegations, has_reply

VERSION = "ATIF-v1.7"
_MEDIA = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}
_COPIED = (
    "Steps with is_copied_context are in an earlier trajectory too, were in the request, or were sampled in the trial that this "
    "one forks; final_metrics leaves them out."
)
_DELEGATED = "Sub-agents are found by the order of turns: the record does not say who started a conversation."


def trajectories(
    session: Session, turns: Sequence[Turn], samples: Sequence[Sample], *, whole_prompts: bool = False
) -> list[dict[str, Any]]:
    """A session's documents, in commit order of their leaves. Conversations that took place while a step's tools ran are
    embedded in that step's document, as sub-agents; they are in no other place.

    Args:
        turns: all of the session's. samples: all of the session's, for the masks; none for a session without token ids.
        whole_prompts: give each step's `prompt_token_ids`, ancestors included; else only `extra.new_prompt_token_ids`.
    """
    branches = branches_of(turns)
    callers = delegations(turns, branches)
    masks = _masks(samples)
    documents = [_Document(session, branch, masks, whole_prompts).build() for branch in branches]
    top = []
    for branch, document in zip(branches, documents, strict=True):
        caller = callers.get(branch.root.turn_id)
        if caller is None:
            top.append(document)
            continue
        # The first branch that goes on after the calling turn: in later ones that turn's step is a copy.
        at = next(i for i, other in enumerate(branches) if caller in {turn.turn_id for turn in other.turns[:-1]})
        _embed(documents[at], caller, document)
    if top:
        exported = {turn.turn_id for branch in branches for turn in branch.turns}
        if left_out := [turn for turn in turns if turn.turn_id not in exported]:
            top[0]["extra"]["left_out"] = [
                {"turn_id": turn.turn_id, "error": turn.error, "superseded_by": turn.superseded_by} for turn in left_out
            ]
    return top


def _masks(samples: Iterable[Sample]) -> dict[str, list[int]]:
    """Turn -> the mask of its completion in the first sample that has it: in later ones it is 0 throughout."""
    return {
        turn_id: list(sample.loss_mask[span.start : span.end])
        for sample in samples
        for turn_id, span in zip(sample.turn_ids, sample.completions, strict=True)
        if not span.shared
    }


def _embed(parent: dict[str, Any], caller: str, child: dict[str, Any]) -> None:
    step = next(step for step in parent["steps"] if step.get("extra", {}).get("turn_id") == caller)
    results = step.setdefault("observation", {"results": []})["results"]
    ref = {"trajectory_id": child["trajectory_id"], "session_id": child["session_id"]}
    results.append({"subagent_trajectory_ref": [ref], "extra": {"inferred_from": "order of turns"}})
    parent.setdefault("subagent_trajectories", []).append(child)
    if _DELEGATED not in parent["notes"]:
        parent["notes"] += " " + _DELEGATED


@dataclass
class _Document:
    """One document while it is written."""

    session: Session
    branch: Branch
    masks: dict[str, list[int]]
    whole_prompts: bool
    steps: list[dict[str, Any]] = field(default_factory=list)
    _prompt: list[int] = field(default_factory=list)  # ids of the path so far
    _tools: list[dict[str, Any]] = field(default_factory=list)

    def build(self) -> dict[str, Any]:
        session, turns = self.session, self.branch.turns
        self._tools = turns[0].tools
        for position, turn in enumerate(turns):
            self._turn(turn, copied=position < self.branch.shared or turn.replayed is not None)
        agent = session.metadata.get("agent")
        # A name is required; only a harness knows it.
        described: dict[str, Any] = {
            "name": agent if isinstance(agent, str) and agent else "unknown",
            "version": "unknown",
        }
        if model := _model(turns[0]):
            described["model_name"] = model
        if self._tools:
            described["tool_definitions"] = self._tools
        return {
            "schema_version": VERSION,
            "session_id": session.trial_id,
            "trajectory_id": self.branch.leaf.turn_id,
            "agent": described,
            "steps": self.steps,
            "notes": _COPIED,
            "final_metrics": self._totals(),
            "extra": _known(
                trial_id=session.trial_id, group_id=session.group_id, run_id=session.run_id, status=session.status,
                end_reason=session.end_reason, reward=session.reward, metrics=session.metrics or None,
                marks=session.marks or None, fork_reason=turns[0].fork_reason,
            ),
        }  # fmt: skip

    def _totals(self) -> dict[str, Any]:
        own = [step["metrics"] for step in self.steps if "metrics" in step and not step.get("is_copied_context")]
        return {
            "total_prompt_tokens": sum(one["prompt_tokens"] for one in own),
            "total_completion_tokens": sum(one.get("completion_tokens", 0) for one in own),
            "total_cached_tokens": sum(one["cached_tokens"] for one in own),
            "total_steps": sum(not step.get("is_copied_context") for step in self.steps),
        }

    def _add(self, step: dict[str, Any], *, copied: bool) -> None:
        self.steps.append({"step_id": len(self.steps) + 1} | step | ({"is_copied_context": True} if copied else {}))

    def _turn(self, turn: Turn, *, copied: bool) -> None:
        asked_at = _time(turn.timings.queued)
        for message in turn.messages:
            self._message(message, asked_at, copied=copied)
        if turn.tools != self._tools:
            self._tools = turn.tools
            changed = {"tool_definitions": turn.tools}
        else:
            changed = {}
        timings = turn.timings
        step: dict[str, Any] = {
            "timestamp": _time(timings.last_token or timings.started or timings.queued),
            "source": "agent",
        }
        if model := _model(turn):
            step["model_name"] = model
        step |= _message_step(turn.reply) | {"metrics": self._metrics(turn, copied=copied), "llm_call_count": 1}
        step["extra"] = changed | _known(
            turn_id=turn.turn_id, finish_reason=turn.finish_reason, fork_reason=turn.fork_reason,
            task_step=turn.task_step, partial=turn.partial or None, error=turn.error, unreadable=turn.unreadable,
            delivered=turn.delivered, replayed=turn.replayed,
            retry_of=turn.retry_of, superseded_by=turn.superseded_by, dialect=turn.dialect, worker_id=turn.worker_id or None,
            said_nothing=None if has_reply(turn) else True,
        )  # fmt: skip
        self._add(step, copied=copied)

    def _metrics(self, turn: Turn, *, copied: bool) -> dict[str, Any]:
        new, sampled = bytes_to_ids(turn.new_prompt_ids).tolist(), bytes_to_ids(turn.completion_ids).tolist()
        self._prompt += new
        metrics: dict[str, Any] = {"prompt_tokens": turn.prompt_tokens, "cached_tokens": turn.cached_tokens}
        counted = len(sampled) if turn.upstream_tokens is None else turn.upstream_tokens
        metrics["completion_tokens"] = counted
        if sampled:
            metrics["completion_token_ids"] = sampled
        logprobs = bytes_to_floats(turn.sampling_logprobs).tolist()
        if logprobs and all(map(math.isfinite, logprobs)):
            metrics["logprobs"] = logprobs
        if self.whole_prompts and self._prompt:
            metrics["prompt_token_ids"] = list(self._prompt)
        self._prompt += sampled
        mask = self.masks.get(turn.turn_id)
        metrics["extra"] = _known(
            new_prompt_token_ids=new or None,
            loss_mask=[0] * len(mask) if copied and mask is not None else mask,
            versions=[span.model_dump() for span in turn.versions] or None,
            constrained=turn.constrained or None,
            sampling_law=turn.law if turn.law and turn.unreadable is None else None,
            reasoning_tokens=turn.reasoning_tokens or None,
        )
        return metrics

    def _message(self, message: dict[str, Any], at: str, *, copied: bool) -> None:
        """A message of the request. An assistant's that no turn has recorded is context, whichever branch it is in."""
        role = message["role"]
        if role == "tool":
            self._result(message, at, copied=copied)
        elif role == "assistant":
            self._add({"timestamp": at, "source": "agent"} | _message_step(message), copied=True)
        else:
            source = "system" if role == "system" else "user"
            self._add({"timestamp": at, "source": source, "message": _content(message["content"])}, copied=copied)

    def _result(self, message: dict[str, Any], at: str, *, copied: bool) -> None:
        """A tool's result stands at the step that called it."""
        result: dict[str, Any] = {"content": _content(message["content"])}
        for step in reversed(self.steps):
            if any(call["tool_call_id"] == message.get("tool_call_id") for call in step.get("tool_calls", ())):
                result = {"source_call_id": message["tool_call_id"]} | result
                step.setdefault("observation", {"results": []})["results"].append(result)
                return
        self._add(
            {"timestamp": at, "source": "system", "message": "", "observation": {"results": [result]}}, copied=copied
        )


def _message_step(message: dict[str, Any]) -> dict[str, Any]:
    step: dict[str, Any] = {"message": _content(message.get("content") or "")}
    if reasoning := message.get("reasoning_content"):
        step["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        step["tool_calls"] = [_call(call) for call in calls]
    return step


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """The model may have written no object, or one that no file can hold: half a surrogate pair, NaN, a thousand levels."""
    function = call["function"]
    out = {"tool_call_id": call["id"], "function_name": function["name"]}
    try:
        arguments = storable(json.loads(function["arguments"] or "{}"))
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return out | {"arguments": arguments}
    return out | {"arguments": {}, "extra": {"arguments_as_sent": function["arguments"]}}


def _content(content: Any) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """ATIF names images by path or URL: one that came inline is only described."""
    if part.get("type") == "text":
        return {"type": "text", "text": part["text"]}
    shown = part.get("image_url") or {}
    url = shown.get("url", "") if isinstance(shown, dict) else ""
    media = _MEDIA.get(url.split("?")[0].rpartition(".")[2].lower())
    if "://" in url and media:
        return {"type": "image", "source": {"media_type": media, "path": url}}
    kind = url.removeprefix("data:").split(";")[0] if url.startswith("data:") else part.get("type", "part")
    return {"type": "text", "text": f"[{kind}, {len(url)} characters, not exported]"}


def _model(turn: Turn) -> str:
    return turn.served_model or turn.model


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}

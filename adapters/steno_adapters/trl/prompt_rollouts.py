"""`rollout_func` of TRL's `GRPOTrainer`: `PromptRollouts`. On-policy, one row per trial.

TRL gives prompts without the rows that they stand in, so that tasks are found by their prompt; it takes one completion per
prompt, so that of a trial that forked the branch with the most sampled tokens is trained, and the rest is counted. It computes
log-probabilities anew and does not use the recorded ones. `AsyncRollouts` has none of these limits.
"""

from __future__ import annotations

import json
import logging
import uuid
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from steno.contracts.errors import BadRequest
from steno_adapters.collected_group import CollectedGroup
from steno_adapters.collector import Collector
from steno_adapters.rows import TrainableRow
from steno_adapters.trl.failed_groups import STOP_AFTER, FailedGroups
from steno_adapters.trl.unused_settings import UNUSED_BY_PROMPTS, check_unused
from steno_adapters.trl.whole_weights import check_adapter, whole_weights

log = logging.getLogger(__name__)


class PromptRollouts:
    """counts: since it began: `trials`, `empty_trials` (failed, or nothing of them can be trained), `other_branches` and
    `other_branch_tokens` (not trained), `earlier_groups` (of an earlier start: not trained)."""

    def __init__(
        self,
        collector: Collector,
        tasks: Iterable[Mapping[str, Any]],
        *,
        prompt: str = "prompt",
        stop_after_failed_groups: int = STOP_AFTER,
        push_timeout_s: float = 600.0,
        push_folder: Path | None = None,
    ) -> None:
        """
        Args:
            tasks: fields, each with a `task_id`. prompt: the field that TRL's dataset has as `prompt`: text, or messages.
            stop_after_failed_groups: training ends with `NothingToTrain` after so many groups in a row of which nothing can be
                trained. 0: it steps on without them.
            push_timeout_s, push_folder: `timeout_s` and `folder` of `push`.
        Raises: BadRequest: a task without a prompt, or two with the same.
        """
        self._collector = collector
        self._tasks: dict[str, Mapping[str, Any]] = {}
        for task in tasks:
            if prompt not in task:
                raise BadRequest(f"tasks: {task.get('task_id')!r} has no field {prompt!r}", field="tasks")
            key = _key(task[prompt])
            if key in self._tasks:
                names = f"{self._tasks[key].get('task_id')!r} and {task.get('task_id')!r}"
                raise BadRequest(
                    f"tasks: {names} have the same {prompt}, and TRL names tasks by nothing else: make them differ",
                    field="tasks",
                )
            self._tasks[key] = task
        self._prompt = prompt
        self._push_options = {"timeout_s": push_timeout_s, "folder": push_folder}
        self._without_rows = FailedGroups(stop_after_failed_groups)
        self.counts = Counter[str]()
        self._lineage = f"trl-{uuid.uuid4().hex[:8]}"

    def trainer(self, model: Any, args: GRPOConfig, **options: Any) -> GRPOTrainer:
        """The trainer, with this in its place; `options` are its other arguments. reward_funcs: default: the recorded rewards.
        Of several ranks each runs the agents of its own prompts, and collects in a run of its own (`Collector.of_rank`).

        Raises: BadRequest: what the config says can't hold here."""
        if args.use_vllm:
            raise BadRequest("use_vllm: got True, must be False: Steno's workers generate", field="use_vllm")
        check_unused(UNUSED_BY_PROMPTS, args, options)
        warnings.warn(
            "GRPOTrainer computes log-probabilities anew and does not use the recorded ones: AsyncRollouts does",
            stacklevel=2,
        )
        dataset = Dataset.from_dict({"prompt": [task[self._prompt] for task in self._tasks.values()]})
        given = {"reward_funcs": [recorded_reward], "train_dataset": dataset} | options
        pushes = _PushAfterEachStep(self._collector, self._lineage, self._push_options)
        callbacks = [pushes, *given.pop("callbacks", [])]
        trainer = GRPOTrainer(model, args=args, rollout_func=self, callbacks=callbacks, **given)
        check_adapter(trainer)
        self._collector.of_rank(trainer.accelerator.process_index)
        pushes.trainer = trainer
        return trainer

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """One trial per prompt; equal prompts make one group. Raises: NothingToTrain: too many groups in a row have failed."""
        keys = [_key(prompt) for prompt in prompts]
        unknown = [prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self._tasks]
        if unknown:
            raise BadRequest(f"prompts: no task has {str(unknown[0])[:200]!r}", field="prompts")
        sizes = Counter(keys)
        by_size: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for key, size in sizes.items():
            by_size[size].append(self._tasks[key])
        found: dict[str, CollectedGroup] = {}
        for size, tasks in by_size.items():
            found |= self._collected(tasks, size)
        places = Counter[str]()
        rows: list[TrainableRow | None] = []
        for key in keys:
            group = found.get(str(self._tasks[key]["task_id"]))
            trial = f"{group.group_id}.{places[key]}" if group else ""
            rows.append(self._main(group, trial, trainer.temperature) if group else None)
            places[key] += 1
        self._count_failed(keys, rows)
        return self._answer(rows, trainer)

    def _count_failed(self, keys: Sequence[str], rows: Sequence[TrainableRow | None]) -> None:
        for key in dict.fromkeys(keys):
            if any(row for each, row in zip(keys, rows, strict=True) if each == key):
                self._without_rows.trainable()
            else:
                self._without_rows.failed(1, self._collector.failures)

    def _collected(self, tasks: list[Mapping[str, Any]], size: int) -> dict[str, CollectedGroup]:
        """By task. On-policy: what was rolled out once is used now, or never."""
        groups = self._collector.collect(tasks, size, branches="main")
        self._collector.acknowledge(groups)
        self.counts["earlier_groups"] += sum(group.earlier for group in groups)
        own = [group for group in groups if not group.earlier]
        self.counts["other_branches"] += sum(group.other_branches for group in own)
        self.counts["other_branch_tokens"] += sum(group.untrained["other_branch"] for group in own)
        return {str(group.task["task_id"]): group for group in own}

    def _main(self, group: CollectedGroup, trial_id: str, temperature: float) -> TrainableRow | None:
        main = next((row for row in group.rows if row.trial_id == trial_id), None)  # a trial has one at most
        if main is None:
            return None
        if not np.allclose(main.temperatures[main.response_mask], temperature):
            raise BadRequest(
                f"temperature: trial {trial_id} sampled at {sorted(set(main.temperatures[main.response_mask].tolist()))}, the "
                f"trainer divides by {temperature}: must be the same (Collector(temperature=…))",
                field="temperature",
            )
        return main

    def _answer(self, rows: Sequence[TrainableRow | None], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL wants a token in each completion: of a trial without one it is the end of text, which is not trained and has no
        reward."""
        end = trainer.eos_token_ids[0]
        self.counts.update({"trials": len(rows), "empty_trials": sum(row is None for row in rows)})
        answer: dict[str, Any] = {
            "prompt_ids": [row.prompt_ids.tolist() if row else [end] for row in rows],
            "completion_ids": [row.response_ids.tolist() if row else [end] for row in rows],
            "env_mask": [row.response_mask.astype(int).tolist() if row else [0] for row in rows],
            "logprobs": [np.nan_to_num(row.logprobs).tolist() if row else [0.0] for row in rows],
            "steno_reward": [row.reward if row else None for row in rows],
            "steno_trial": [row.trial_id if row else None for row in rows],
        }
        return answer


def recorded_reward(completions: Sequence[Any], steno_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """A reward function for TRL: what each trial was worth on record."""
    return list(steno_reward)


class _PushAfterEachStep(TrainerCallback):
    """Before the first trial and after each step, the weights go to the workers. Every rank gathers, the first one sends."""

    def __init__(self, collector: Collector, lineage: str, options: Mapping[str, Any]) -> None:
        self._collector, self._lineage, self._options = collector, lineage, options
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._push(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._push(state.global_step)

    def _push(self, step: int) -> None:
        accelerator = self.trainer.accelerator
        with whole_weights(self.trainer) as weights:
            if accelerator.is_main_process:
                self._collector.push(weights, f"{self._lineage}/{step}", **self._options)
        accelerator.wait_for_everyone()


def _key(prompt: Any) -> str:
    """TRL's dataset gives each message the keys of all, with None for those that it lacks."""
    return json.dumps(_without_none(prompt), sort_keys=True)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value

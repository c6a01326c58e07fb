"""`steno/NAME` as a model of Inspect: a sample in an epoch is a trial, a sample's epochs are its group, its score is the reward.

`inspect eval TASK --model steno/policy --epochs 8 -M run=my-run -M purpose=train -M score=SCORER[/KEY]`, with STENO_PROXY (or
--model-base-url) and STENO_ADMIN_KEY or `-M key_file=PATH`. Pinned to what it was run with: inspect_ai 0.3.285.
"""

from __future__ import annotations

import logging
import os
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

from inspect_ai.hooks import Hooks, RunEnd, SampleAttemptStart, SampleEnd, SampleScoring, TaskEnd, TaskStart, hooks
from inspect_ai.model import GenerateConfig, ModelAPI, get_model, modelapi

from steno import AsyncClient, Completion, GroupSpec
from steno.contracts.errors import StenoError
from steno_adapters.inspect.outcome import outcome
from steno_adapters.inspect.running import EVALS, RUNNING, SAMPLES, InspectEval, InspectSample

log = logging.getLogger(__name__)

RETRIES = 8
_ODD = re.compile(r"[^A-Za-z0-9_-]+")


class StenoAPI(ModelAPI):
    """Args: run: default: one named after the eval. purpose: `eval` (never trained) or `train`. score: which of several is the
    reward. key_file: file with the key of the run, or an admin key. Others: as of Inspect's `openai-api`."""

    def __init__(
        self, model_name: str, base_url: str | None = None, api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(), run: str | None = None, purpose: str = "eval", score: str | None = None,  # noqa: B008
        key_file: str | None = None, **model_args: Any,
    ) -> None:  # fmt: skip
        super().__init__(model_name, base_url, api_key, [], config)
        if purpose not in ("eval", "train"):
            raise ValueError(f"purpose: got {purpose!r}, must be eval or train")
        self.run, self.purpose, self.score, self._more = run, purpose, score, model_args
        self._proxy = base_url or os.environ.get("STENO_PROXY") or "http://127.0.0.1:8000"
        self._key = Path(key_file).read_text().strip() if key_file else api_key or os.environ.get("STENO_ADMIN_KEY")
        self._like = self._at(self._proxy, None)

    def client(self) -> AsyncClient:
        return AsyncClient(self._proxy, self._key, retries=RETRIES)

    def _at(self, url: str, key: str | None) -> ModelAPI:
        name = f"openai-api/steno/{self.model_name}"
        return get_model(name, base_url=url, api_key=key or "none", memoize=False, **self._more).api

    async def generate(self, input: Any, tools: Any, tool_choice: Any, config: GenerateConfig) -> Any:
        sample = SAMPLES.get(RUNNING.get() or "")
        if sample is None:
            raise RuntimeError(
                "steno: this model can be called inside a sample only, since each call belongs to a trial"
            )
        if sample.scored:
            raise RuntimeError(
                "steno: the scorer called this model, and scoring is no part of a trial: give the scorer another model"
            )
        if sample.attempt > 1:
            raise RuntimeError("steno: a trial holds one attempt: --retry-on-error must be 0")
        if sample.api is None or sample.model is not self:
            await self._register(sample)
        assert sample.api is not None
        return await sample.api.generate(input, tools, tool_choice, config)

    async def _register(self, sample: InspectSample) -> None:
        """Idempotent: all epochs of a sample ask for the same group, and each takes its own trial of it."""
        if sample.model is not None:
            raise RuntimeError("steno: two models of this kind in one sample: a trial records one")
        run, name = self.run or f"inspect-{sample.eval_id}", str(sample.summary.id)
        digest = blake2b("\0".join((run, sample.eval_id, name)).encode(), digest_size=8).hexdigest()
        group = f"{_ODD.sub('-', sample.task)[:40]}.{_ODD.sub('-', name)[:40]}.{digest}"
        task = {"task_id": name, "task": sample.task}
        if isinstance(sample.summary.input, str):
            task["input"] = sample.summary.input
        spec = GroupSpec(group_id=group, run_id=run, task=task, size=sample.epochs, purpose=self.purpose)
        async with self.client() as client:
            found = await client.create_group(spec)
        for each in found.trials:
            EVALS[sample.eval_id].trials.setdefault(each.session.trial_id, self)
        sample.trial, sample.model = found.trials[sample.summary.epoch - 1], self
        sample.api = self._at(sample.trial.urls["openai"], sample.trial.api_key)

    def should_retry(self, ex: Exception) -> Any:
        return self._like.should_retry(ex)

    def max_tokens(self) -> Any:
        return self._like.max_tokens()


class InspectTrials(Hooks):
    async def on_task_start(self, data: TaskStart) -> None:
        EVALS[data.eval_id] = InspectEval(data.run_id, data.spec.task, data.spec.config.epochs or 1)

    async def on_sample_attempt_start(self, data: SampleAttemptStart) -> None:
        found = EVALS[data.eval_id]
        new = InspectSample(data.eval_id, found.task, found.epochs, data.summary)
        SAMPLES.setdefault(data.sample_id, new).attempt = data.attempt
        RUNNING.set(data.sample_id)

    async def on_sample_scoring(self, data: SampleScoring) -> None:
        SAMPLES[data.sample_id].scored = True

    async def on_sample_end(self, data: SampleEnd) -> None:
        sample = SAMPLES.pop(data.sample_id)
        if sample.trial is not None and sample.model is not None and sample.api is not None:
            await sample.api.aclose()
            error = data.sample.error.message if data.sample.error else None
            worth = outcome(error, data.sample.scores or {}, sample.model.score)
            async with sample.model.client() as client:
                await client.complete(sample.trial.session.trial_id, worth)
            EVALS[data.eval_id].trials[sample.trial.session.trial_id] = None

    async def on_task_end(self, data: TaskEnd) -> None:
        await _end_rest(data.eval_id)

    async def on_run_end(self, data: RunEnd) -> None:
        """End the rest of the run's tasks: Inspect reports no end of a task that failed or was cancelled."""
        for eval_id in [each for each, found in EVALS.items() if found.run_id == data.run_id]:
            await _end_rest(eval_id)


async def _end_rest(eval_id: str) -> None:
    """End the trials that were not played, or whose samples were cancelled: a trainer would wait for them. At Ctrl-C this call is
    cancelled too, and made again."""
    trials = EVALS[eval_id].trials
    for trial_id, model in trials.items():
        if model is None:
            continue
        try:
            async with model.client() as client:
                await client.complete(trial_id, Completion(status="aborted", end_reason="not_played"))
        except StenoError as error:
            if error.retryable:
                raise  # the proxy is away, for the others too
            log.warning("trial %s was not ended: %s", trial_id, error)
        trials[trial_id] = None
    del EVALS[eval_id]


@modelapi(name="steno")
def steno() -> type[ModelAPI]:
    return StenoAPI


@hooks(name="steno_trials", description="Posts each sample's score as its trial's reward")
def steno_trials() -> type[Hooks]:
    return InspectTrials

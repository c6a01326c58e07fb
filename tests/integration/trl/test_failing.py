"""TRL's trainers where nothing can be trained: they end with the reason, and neither wait nor step on.

`AsyncGRPOTrainer` waits for rows as long as its worker is well, and `GRPOTrainer` steps on with empty completions.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from steno import Client
from steno.models import TINY
from steno_adapters import AgentCall, Collector
from steno_adapters.trl import AsyncRollouts, NothingToTrain, PromptRollouts
from steno_adapters.trl.fresh_rows import FreshRows
from tests.integration.trl import cpu_attention
from tests.support.programs.stack import Stack, running
from tests.support.programs.variables import without_settings

pytestmark = pytest.mark.trl

TASKS = [{"task_id": f"task-{number}", "prompt": f"Tell me about {number}."} for number in range(4)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    worker = ["--engine", "transformers", "--model", str(TINY)]
    with without_settings(), running(tmp_path_factory.mktemp("stack"), worker) as found:
        yield found


def ask(call: AgentCall) -> None:
    with openai.OpenAI(base_url=call.openai_url, api_key=call.api_key, max_retries=5) as client:
        asked: list[Any] = [{"role": "user", "content": call.task["prompt"]}]
        client.chat.completions.create(model="tiny", messages=asked, max_tokens=4)


def breaks(call: AgentCall) -> float:
    """After its turn: before it, `stop_after_failures` of `steno rollout` would tell."""
    ask(call)
    raise RuntimeError("no disk is mounted")


def talks(call: AgentCall) -> float:
    ask(call)
    return float(call.trial_id.rsplit(".", 1)[1])


def asynchronous(rollouts: AsyncRollouts, folder: Path, temperature: float) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    torch.set_num_threads(1)
    cpu_attention.prepare()
    args = AsyncGRPOConfig(
        str(folder / "out"), max_steps=2, per_device_train_batch_size=4, temperature=temperature, report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = rollouts.trainer(str(TINY), args)
    cpu_attention.register()
    return trainer


def ended(url: str, run: str) -> None:
    """Nothing runs on, and nothing is held: what trains next is given it."""
    with Client(url) as client:
        begun = [session for session in client.sessions(run_id=run) if session.counts.turns]
        assert client.run(run).groups.leased == 0 and "open" not in {session.status for session in begun}


def test_groups_that_all_fail_end_the_asynchronous_trainer_with_the_reason(stack: Stack, tmp_path: Path) -> None:
    with Collector(stack.url, "fails", agent=breaks) as collector:
        rollouts = AsyncRollouts(collector, TASKS, n=2, stop_after_failed_groups=6)
        with pytest.raises(RuntimeError, match=r"run fails .*\d groups in a row .*exit_code: .*no disk is mounted"):
            asynchronous(rollouts, tmp_path, 1.0).train()
        assert collector.client.run("fails").groups.empty >= 6 and rollouts.counts["rows"] == 0
    ended(stack.url, "fails")


def test_groups_that_others_roll_out_and_that_all_fail_end_it_too(stack: Stack, tmp_path: Path) -> None:
    """Their reasons are theirs to say."""
    with Collector(stack.url, "theirs") as collector, Collector(stack.url, "theirs", agent=breaks) as others:
        rollouts = AsyncRollouts(collector, n=2, stop_after_failed_groups=3)
        trainer = asynchronous(rollouts, tmp_path, 1.0)
        others.collect(TASKS[:1], 2)
        rolling = others.start(itertools.cycle(TASKS), 2, groups_per_step=1, max_staleness_steps=8)
        with pytest.raises(
            RuntimeError, match=r"run theirs .*\d groups in a row .*the log of the program that runs the trials"
        ):
            trainer.train()
        rolling.cancel()


class ThenOthersBegin(AsyncRollouts):
    """Rollouts elsewhere begin once the first weights are served: what was sampled before is not trained."""

    begin: Callable[[], None] | None = None

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        super().send_weights(iterator)
        if self.begin is not None:
            self.begin()
            self.begin = None


def test_rollouts_elsewhere_that_are_over_end_it_once_their_rows_are_trained(stack: Stack, tmp_path: Path) -> None:
    with Collector(stack.url, "over", agent=talks) as others:

        def begin() -> None:
            rolling = others.start(TASKS, 2, groups_per_step=2, max_staleness_steps=8)
            rolling.add_done_callback(lambda _: others.client.rollouts_over("over"))

        with Collector(stack.url, "over") as collector:
            rollouts = ThenOthersBegin(collector, n=2)
            rollouts.begin = begin
            trainer = asynchronous(rollouts, tmp_path, 1.0)
            trainer.args.max_steps = 8
            with pytest.raises(RuntimeError, match=r"run over .*no groups are left before max_steps 8; roll out more"):
                trainer.train()
        assert rollouts.counts["rows"] == 8 and trainer.state.global_step >= 1, "four groups, of two rows each"
        assert others.client.run("over").groups.ready == 4, "no checkpoint has them: they are served again"


def test_rows_that_are_all_dropped_end_the_asynchronous_trainer_with_the_reason(stack: Stack, tmp_path: Path) -> None:
    with Collector(stack.url, "dropped", agent=talks, temperature=0.5) as collector:
        rollouts = AsyncRollouts(collector, TASKS, n=2, stop_after_failed_groups=3)
        with pytest.raises(RuntimeError, match=r"3 groups in a row .*sampled at \[0\.5\], temperature is 1\.0"):
            asynchronous(rollouts, tmp_path, 1.0).train()
        assert rollouts.counts["untrained/temperature"] > 0
    ended(stack.url, "dropped")


def test_a_trainer_whose_rows_are_dropped_one_after_the_other_looks_whether_its_worker_is_well() -> None:
    """TRL asks only where its queue has been empty for some seconds."""
    taken: list[Any] = []
    rows = FreshRows(lambda row: taken.append(row))
    for row in ("a", "b"):
        rows.put(row)
    with pytest.raises(queue.Empty):
        rows.get(timeout=0.0)
    assert taken == ["a"]


def test_prompts_whose_trials_all_fail_end_the_trainer_with_the_reason(stack: Stack, tmp_path: Path) -> None:
    from trl import GRPOConfig

    torch.set_num_threads(1)
    args = GRPOConfig(
        str(tmp_path / "out"), max_steps=8, per_device_train_batch_size=4, num_generations=2, max_completion_length=8,
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with Collector(stack.url, "empty", agent=breaks) as collector:
        rollouts = PromptRollouts(collector, TASKS, stop_after_failed_groups=3)
        with pytest.warns(UserWarning, match="does not use the recorded ones"):
            trainer = rollouts.trainer(model, args, processing_class=AutoTokenizer.from_pretrained(TINY))
        with pytest.raises(NothingToTrain, match=r"3 groups in a row .*exit_code: .*no disk is mounted"):
            trainer.train()
        assert rollouts.counts["trials"] == 4 and trainer.state.global_step == 1, (
            "in its second step, of two groups each"
        )

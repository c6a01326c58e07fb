"""verl's model servers on a CPU: an actor that answers as theirs do, with the project's tiny model.

What the agent needs to be told is forced after some tokens that are drawn; the log-probabilities are the model's own at the
temperature that was asked for, of forced tokens too. Every `abort_every`-th answer that is begun is broken off in its middle, and
new weights come: their number, for the weights stay the same. Every second of those is broken off before its first token, and
then has no log-probabilities, as vLLM's server answers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.rollout.replica import TokenOutput

from steno.models import TINY

DRAWN = 4
COMMANDS = ["echo steno > note.txt", "cat note.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
DRAWN_BELOW = 500
"""Ids of plain bytes and pieces of text: drawn tokens must not close the answer or open a call."""


@ray.remote(num_cpus=0, max_concurrency=64)
class ModelServer:
    def __init__(self, abort_every: int = 0, slow_s: float = 0.0) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(7)
        self._tokenizer = AutoTokenizer.from_pretrained(TINY)
        self._model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
        self._abort_every, self._slow_s = abort_every, slow_s
        self._answers, self.step, self.empty = 0, 1, 0
        self._rest: dict[tuple[int, ...], list[int]] = {}
        self._asked: list[dict[str, Any]] = []
        self._may_answer = asyncio.Event()
        self._may_answer.set()
        self._waiting = 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        self._asked.append(dict(sampling_params))
        await asyncio.sleep(self._slow_s)
        if self._results(self._tokenizer.decode(prompt_ids)):
            self._waiting += 1
            await self._may_answer.wait()
            self._waiting -= 1
        step, rest = self.step, self._rest.pop(tuple(prompt_ids), None)
        self._answers += rest is None
        due = rest is None and bool(self._abort_every) and self._answers % self._abort_every == 0
        if due and self._answers // self._abort_every % 2 == 0:
            self.step, self.empty = step + 1, self.empty + 1
            return TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields={"global_steps": step})
        hung_up_on = "Never mind." in self._tokenizer.decode(prompt_ids)
        if hung_up_on and rest is not None:
            await asyncio.sleep(3600)
        ids, logprobs = self._answer(list(prompt_ids), sampling_params, rest)
        reason = "completed"
        if rest is None and len(ids) > 2 and (due or hung_up_on):
            kept = len(ids) // 2
            self._rest[(*prompt_ids, *ids[:kept])] = ids[kept:]
            ids, logprobs, reason = ids[:kept], logprobs[:kept], "aborted"
            self.step += 1
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason=reason, extra_fields={"global_steps": step})

    def asked(self) -> list[dict[str, Any]]:
        """The sampling parameters of each attempt."""
        return self._asked

    def broken_off_empty(self) -> int:
        """Answers that were broken off before their first token."""
        return self.empty

    async def hold(self) -> None:
        """From now on an agent gets its first answer, and waits for the second one until `let_go`."""
        self._may_answer.clear()

    async def let_go(self) -> None:
        self._may_answer.set()

    def held(self) -> int:
        """Requests that wait."""
        return self._waiting

    def set_weights(self, weights: dict[str, NDArray[np.float32]]) -> int:
        """Returns: the step that they are known by."""
        self._model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
        self.step += 1
        return self.step

    def _answer(
        self, prompt: list[int], sampling: dict[str, Any], rest: list[int] | None
    ) -> tuple[list[int], list[float]]:
        most = int(sampling["max_tokens"])
        temperature = float(sampling["temperature"]) or 1.0
        with torch.inference_mode():
            said = self._model(torch.tensor([prompt]), use_cache=True)
            row, cache = said.logits[0, -1], said.past_key_values
            ids: list[int] = []
            logprobs: list[float] = []
            forced = list(rest) if rest is not None else self._forced(prompt)
            while len(ids) < most:
                law = torch.log_softmax(row / temperature, -1)
                if rest is None and len(ids) < DRAWN:
                    token = int(torch.multinomial(law[:DRAWN_BELOW].exp(), 1))
                elif forced:
                    token = forced.pop(0)
                else:
                    break
                ids.append(token)
                logprobs.append(float(law[token]))
                said = self._model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                row, cache = said.logits[0, -1], said.past_key_values
        return ids, logprobs

    def _forced(self, prompt: list[int]) -> list[int]:
        text = self._tokenizer.decode(prompt)
        last = text.rpartition("<|im_start|>user")[2] if "<tools>" not in text else text
        if "<tools>" in text:
            call = {"name": "bash", "arguments": {"command": COMMANDS[min(self._results(text), len(COMMANDS) - 1)]}}
            words = f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
        else:
            words = f"{len(last)}<|im_end|>"
        ids: list[int] = self._tokenizer.encode(words, add_special_tokens=False)
        return ids

    @staticmethod
    def _results(text: str) -> int:
        """How many results of tools this prompt has."""
        return text.count("<tool_response>") - text.partition("<tools>")[0].count("<tool_response>")

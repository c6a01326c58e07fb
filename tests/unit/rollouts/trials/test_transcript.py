"""What a reward function is given of a trial's record, while the proxy answers, is away, or can't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from steno.contracts.errors import NotFound
from steno.contracts.records import Counts
from steno.contracts.rest import Trial
from steno_rollouts.calls.patience import PatientClient
from steno_rollouts.outcome import CommandOutcome, EndReason
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.executor import Executor, Exit, TrialJob
from steno_rollouts.trials.play import Assignment, ExecutorPlayer, RunnerOptions
from steno_rollouts.trials.reward import RewardFunction
from tests.support.records.recordings import session, turn

SESSION = session("g.0", group_id="g", counts=Counts(turns=2))
TURNS = [turn(number, reply={"role": "assistant", "content": f"answer {number}"}) for number in (0, 1)]
WITH = """
def score(transcript):
    assert transcript.session.trial_id == "g.0"
    return {"reward": transcript.last_reply == "answer 1", "turns": len(transcript.turns)}
"""
WITHOUT = "def score(exit_code): return exit_code == 0"


class Ends(Executor):
    async def run(self, job: TrialJob) -> Exit:
        return Exit(0)

    async def clear(self, folder: Path) -> None:
        pass


class Proxy:
    """A proxy that answers so to the first `times` requests. now: by a played clock, at which only pauses take time."""

    def __init__(self, times: int, answer: Callable[[], httpx.Response], patience_s: float = float("inf")) -> None:
        self.asked: list[str] = []
        self.now = 0.0
        self._times, self._answer = times, answer
        self.client = PatientClient(
            "http://proxy", transport=httpx.MockTransport(self._handle), clock=lambda: self.now, sleep=self._sleep,
            patience_s=patience_s,
        )  # fmt: skip

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if len(self.asked) <= self._times:
            return self._answer()
        if request.url.path == "/sessions/g.0":
            return httpx.Response(200, content=SESSION.model_dump_json())
        start = int(request.url.params["start"])
        page: dict[str, Any] = {
            "items": [TURNS[start].model_dump(mode="json")],
            "next_start": start + 1 if not start else None,
        }
        return httpx.Response(200, json=page)

    async def scored(self, folder: Path, code: str) -> CommandOutcome:
        (folder / "score.py").write_text(code)
        trial = Trial(session=SESSION, urls=dict.fromkeys(("openai", "anthropic", "gemini"), "http://proxy/g.0"))
        function = RewardFunction(f"{folder / 'score.py'}:score", timeout_s=30.0)
        player = ExecutorPlayer(self.client, Ends(), RunnerOptions(("agent",), folder), function)
        _, outcome = await player.play(Assignment(trial, Task("t", {}), "epoch-0"), folder / "g.0")
        return outcome


def away() -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def refused(status: int, code: str) -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(status, json={"error": {"code": code, "message": "no"}})


@pytest.mark.parametrize("answer", [away, refused(503, "store_unavailable"), refused(429, "rate_limited")])
async def test_a_proxy_that_is_away_is_waited_for_and_the_functions_time_does_not_run(
    tmp_path: Path, answer: Callable[[], httpx.Response]
) -> None:
    proxy = Proxy(100, answer)
    assert await proxy.scored(tmp_path, WITH) == CommandOutcome(EndReason.COMPLETED, 1.0, {"turns": 2.0})
    assert proxy.now > 60, "longer than the function has"
    assert proxy.asked[100:] == ["/sessions/g.0", "/sessions/g.0/turns", "/sessions/g.0/turns"]


async def test_a_function_that_takes_no_transcript_asks_nobody(tmp_path: Path) -> None:
    proxy = Proxy(100, away)
    assert await proxy.scored(tmp_path, WITHOUT) == CommandOutcome(EndReason.COMPLETED, 1.0)
    assert not proxy.asked


@pytest.mark.parametrize("code", ["def score(**rest): return len(rest['transcript'].turns)", WITH])
@pytest.mark.parametrize(("answer", "said"), [(refused(400, "bad_request"), "no"), (away, "no answer from the proxy")])
async def test_a_transcript_that_can_not_be_read_leaves_its_trial_unscored(
    tmp_path: Path, code: str, answer: Callable[[], httpx.Response], said: str
) -> None:
    """As of a node that does not reach the proxy for long."""
    outcome = await Proxy(100, answer, patience_s=20.0).scored(tmp_path, code)
    assert (outcome.reason, outcome.reward) == (EndReason.REWARD_ERROR, None)
    assert outcome.detail.startswith("transcript of g.0: ") and said in outcome.detail


async def test_that_a_trial_was_deleted_is_no_error_of_the_functions(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await Proxy(100, refused(404, "not_found")).scored(tmp_path, WITH)

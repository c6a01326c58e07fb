"""Rewards: files that trials write, functions that users write, and everything that is wrong with either."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno.contracts.rest import Completion
from steno_rollouts.outcome import CommandOutcome, EndReason, RewardError
from steno_rollouts.tasks.task import Task
from steno_rollouts.trials.reward import (
    MAX_METRICS_BYTES,
    FinishedTrial,
    RewardFunction,
    read_reward,
)

TENSOR = """
class Tensor:
    def __float__(self): raise RuntimeError("no scalar")
    __repr__ = __float__

"""
"""As torch's, of more than one number."""


def scored(folder: Path, exit_code: int | None = 0) -> FinishedTrial:
    task = Task("t", {"seed": 1}, {"_answer": "42"})
    return FinishedTrial(task, folder, exit_code, folder / "out", folder / "err", "g.0", None)


def function(folder: Path, code: str, timeout_s: float = 60.0) -> RewardFunction:
    path = folder / "score.py"
    path.write_text(code)
    return RewardFunction(f"{path}:score", timeout_s)


async def judged(folder: Path, code: str) -> CommandOutcome:
    return await function(folder, code)(scored(folder))


async def test_a_file_is_imported_once_and_again_where_it_has_changed(tmp_path: Path) -> None:
    """A metric of Prometheus's, say, can't be made twice."""
    code = "from pathlib import Path\nimports = Path(__file__).with_name('imports')\nimports.open('a').write('x')\n"
    code += "def score(workdir):\n    return 0.25\ndef other(workdir):\n    return 1.0\n"
    for _ in range(2):
        assert (await judged(tmp_path, code)).reward == 0.25
    assert (await RewardFunction(f"{tmp_path / 'score.py'}:other")(scored(tmp_path))).reward == 1.0
    assert (tmp_path / "imports").read_text() == "x"
    assert (await judged(tmp_path, code.replace("0.25", "0.75"))).reward == 0.75
    assert (tmp_path / "imports").read_text() == "xx"


async def test_a_digest_is_of_the_code_that_scores_whatever_becomes_of_its_file(tmp_path: Path) -> None:
    """`steno rescore` names groups after it while it runs, for hours maybe."""
    given = function(tmp_path, "def score():\n    return 1.0\n")
    digest = given.digest()
    other = function(tmp_path, "def score():\n    return 0.0\n")
    assert given.digest() == digest != other.digest()
    assert (await given(scored(tmp_path))).reward == 1.0
    (tmp_path / "score.py").unlink()
    assert given.digest() == digest


async def test_a_digest_is_of_what_was_imported_where_the_file_changes_meanwhile(tmp_path: Path) -> None:
    """An import may take seconds."""
    new = "def score():\n    return 0.0\n"
    given = function(
        tmp_path, f"from pathlib import Path\nPath(__file__).write_text({new!r})\n{new.replace('0', '1', 1)}"
    )
    assert (tmp_path / "score.py").read_text() == new and (await given(scored(tmp_path))).reward == 1.0
    assert given.digest() != function(tmp_path, new).digest()


def test_nothing_written_is_no_verdict(tmp_path: Path) -> None:
    assert read_reward(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text", "reward", "metrics"),
    [
        ("reward.txt", " 0.5\n", 0.5, {}),
        ("reward.txt", "0", 0.0, {}),
        ("reward.json", '{"reward": true}', 1.0, {}),
        (
            "reward.json",
            '{"reward": 1, "tests": 3, "metrics": {"lint": 0.5}, "note": "x"}',
            1.0,
            {"tests": 3.0, "lint": 0.5},
        ),
    ],
)
def test_a_file_says_the_reward(tmp_path: Path, name: str, text: str, reward: float, metrics: dict[str, float]) -> None:
    (tmp_path / name).write_text(text)
    assert read_reward(tmp_path) == CommandOutcome(EndReason.COMPLETED, reward, metrics)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("reward.txt", "", "reward.txt: got '', must be one number"),
        ("reward.txt", "nan", "finite number"),
        ("reward.txt", "1 2", "must be one number"),
        ("reward.json", "{", "reward.json: not valid JSON"),
        ("reward.json", "0.5", "got 0.5, must be an object with `reward`"),
        ("reward.json", '{"score": 1}', "`reward` is missing; got score"),
        ("reward.json", '{"reward": "1"}', "reward: got '1', must be a finite number"),
        ("reward.json", '{"reward": 1, "metrics": {"a": "b"}}', "metrics.a: got 'b', must be a finite number"),
        ("reward.json", '{"reward": 1, "metrics": [1]}', "must be an object of numbers"),
        ("reward.txt", "1" * 1_000_001, "more than 1000000 bytes"),
        ("reward.json", f'{{"reward": 1{"0" * 400}}}', "reward: got 1000"),
        ("reward.json", f'{{"reward": 1, "metrics": {{"a": -1{"0" * 400}}}}}', "metrics.a: got -1000"),
        ("reward.json", f'{{"reward": 1{"0" * 9000}}}', "reward.json: not valid JSON"),
        ("reward.json", "[" * 100_000, "reward.json: not valid JSON"),
        ("reward.json", f'{{"reward": {"[" * 400}{"]" * 400}}}', "reward: got [[[["),
        ("reward.json", '{"\\ud800": 1}', "`reward` is missing; got \\ud800"),
        (
            "reward.json",
            '{"reward": 1, "metrics": {"a\\ud800": 1}}',
            "reward.json: metrics: got the name 'a\\ud800', must be one that can be stored: invalid Unicode",
        ),
        (
            "reward.json",
            '{"reward": 1, ' + ", ".join(f'"{i}": 1' for i in range(60_000)) + "}",
            f"reward.json: metrics: got 60000 of together 828890 bytes, must be at most {MAX_METRICS_BYTES} bytes of JSON",
        ),
    ],
)
def test_a_malformed_file_is_an_error_that_says_what_is_wrong(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RewardError, match=re.escape(said)):
        read_reward(tmp_path)


def test_as_many_metrics_as_are_taken_can_be_posted(tmp_path: Path) -> None:
    """With names that take most bytes, in what the proxy reads of a body (1 MiB)."""
    names = {f"\x01\U0001f600é{i}": 1e300 / 3 for i in range(4000)}
    (tmp_path / "reward.json").write_text(json.dumps({"reward": 1, "metrics": names}))
    found = read_reward(tmp_path)
    assert found is not None and found.metrics == names
    assert (
        len(Completion(reward=1.0, metrics=found.metrics).model_dump_json().encode()) < MAX_METRICS_BYTES + 1000 < 2**20
    )


def test_a_link_is_no_reward_file(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "elsewhere")
    assert read_reward(tmp_path) is None


async def test_a_function_is_given_what_it_names(tmp_path: Path) -> None:
    code = (
        "def score(task, exit_code, *, workdir, note=1): return {'reward': task['_answer'] == '42', 'code': exit_code}"
    )
    assert await judged(tmp_path, code) == CommandOutcome(EndReason.COMPLETED, 1.0, {"code": 0.0})
    assert (await judged(tmp_path, "def score(**given): return len(given)")).reward == 8.0


async def test_numbers_of_numpy_are_metrics_too(tmp_path: Path) -> None:
    code = (
        "import numpy as np\n"
        "def score():\n"
        "    numbers = {'passed': np.int64(3), 'share': np.float32(0.25), 'ok': np.bool_(True)}\n"
        "    return {'reward': np.float32(0.5), 'why': '', **numbers}"
    )
    metrics = {"passed": 3.0, "share": 0.25, "ok": 1.0}
    assert await judged(tmp_path, code) == CommandOutcome(EndReason.COMPLETED, 0.5, metrics)


async def test_a_function_may_be_async_and_may_not_know(tmp_path: Path) -> None:
    code = "import asyncio\nasync def score(task):\n    await asyncio.sleep(0)\n    task['seed'] = 9\n    return None"
    found = await judged(tmp_path, code)
    assert found.reason is EndReason.NO_REWARD and found.reward is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def score(task): return task['nope']", "raised KeyError: 'nope'"),
        ("def score(): return float('inf')", "got inf, must be a finite number"),
        ("def score(): return 'good'", "got 'good', must be a finite number"),
        ("def score(): raise SystemExit(1)", "raised RuntimeError: SystemExit(1)"),
        ("def score(): return next(iter(()))", "raised RuntimeError: StopIteration()"),
        ("def score(): return 10**400", "score: reward: got 1000"),
        ("def score(): return 10**9000", "score: reward: got a value of type int, must be a finite number"),
        ("def score(): return {'reward': 1, 'metrics': {'\\ud800': 1}}", "metrics: got the name '\\ud800'"),
        ("def score(): return {'reward': 1, 'metrics': {str(i): i for i in range(60_000)}}", "metrics: got 60000 of"),
        (f"{TENSOR}def score(): return Tensor()", "reward: got a value of type Tensor, must be a finite number"),
        (f"{TENSOR}def score(): return {{'reward': 1, Tensor(): 1}}", "its answer raised RuntimeError: no scalar"),
    ],
)
async def test_what_a_function_does_wrong_is_its_trials_error(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(RewardError, match=re.escape(said)):
        await judged(tmp_path, code)


async def test_a_function_that_blocks_holds_up_nobody_and_is_given_up(tmp_path: Path) -> None:
    gate = threading.Event()
    code = "import builtins\ndef score(): return builtins.steno_test_gate.wait(60)"
    import builtins

    builtins.steno_test_gate = gate  # type: ignore[attr-defined]
    try:
        with pytest.raises(RewardError, match=r"no answer in 0\.01 s"):
            await asyncio.wait_for(function(tmp_path, code, timeout_s=0.01)(scored(tmp_path)), 30)
    finally:
        gate.set()
        del builtins.steno_test_gate  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("score", "", "must be FILE.py:function"),
        ("{}/none.py:score", "", "is not a file"),
        ("{}/score.py:other", "def score(): ...", "has no function 'other'; it has score"),
        ("{}/score.py:score", "import nothing_like_this", "can't be imported: ModuleNotFoundError"),
        ("{}/score.py:score", "def score(answer): ...", "no such input: answer; there are task, task_folder"),
    ],
)
def test_a_function_that_can_not_be_called_is_refused_at_start(
    tmp_path: Path, where: str, code: str, said: str
) -> None:
    (tmp_path / "score.py").write_text(code)
    with pytest.raises(ConfigError, match=re.escape(said)):
        RewardFunction(where.format(tmp_path))

"""An engine that fails in mid-generation: what can go on does, elsewhere; what cannot breaks; and its worker is gone (I9)."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from steno.models import TINY
from steno_proxy.workers.routing import score
from tests.integration.fleet.fleet import ask, wait_for
from tests.support.programs.stack import ROOT, Stack, running

FAILS_AT = 60
TOKENS = 150
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}


def words(name: str) -> list[str]:
    return ["--worker-id", name, "--engine", "transformers", "--model", str(TINY)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running(tmp_path, None, proxy=["--resume-grace-s", "60"]) as one:
        one.start_worker(*words("good"), name="good")
        with (tmp_path / "bad.log").open("ab") as log:
            faulty = [sys.executable, "-m", "tests.integration.fleet.faulty", str(FAILS_AT), "2"]
            command = [*faulty, "worker", "--proxy", f"ws://127.0.0.1:{one.port}", *words("bad")]
            one.workers.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        wait_for(one, "good", "bad")
        yield one


def trials_of(worker: str) -> Iterator[str]:
    """Trials whose turns go to this one of the two first."""
    names = (f"t{number}" for number in itertools.count())
    return (name for name in names if max(("good", "bad"), key=lambda one: score(name, one)) == worker)


def test_an_engine_that_fails_is_left_and_what_it_began_goes_on_or_breaks(stack: Stack) -> None:
    [alone, after], [plain, bent] = itertools.islice(trials_of("good"), 2), itertools.islice(trials_of("bad"), 2)
    whole = ask(stack, alone, "Hello", **GREEDY)
    with ThreadPoolExecutor() as pool:
        goes_on = pool.submit(ask, stack, plain, "Hello", **GREEDY)
        breaks = pool.submit(ask, stack, bent, "Hello", frequency_penalty=0.5, **GREEDY)
    assert whole.done and goes_on.result().done and goes_on.result().content == whole.content
    assert breaks.result().broken and not breaks.result().done
    [expected], [turn], [broken] = stack.turns(alone), stack.turns(plain), stack.turns(bent)
    assert (turn["attempt"], [span["worker_id"] for span in turn["workers"]]) == (1, ["bad", "good"])
    assert turn["completion_ids"] == expected["completion_ids"] and len(turn["completion_ids"]) == TOKENS
    assert turn["sampling_logprobs"] == pytest.approx(expected["sampling_logprobs"], abs=1e-4)
    assert broken["partial"] and broken["error"].startswith("engine_failed") and broken["worker_id"] == "bad"

    bad = stack.workers.pop()
    assert bad.wait(60) == 1
    wait_for(stack, "good")
    assert "announces: not healthy" in (stack.folder / "proxy.log").read_text()
    assert ask(stack, after, "Hello", **GREEDY).done

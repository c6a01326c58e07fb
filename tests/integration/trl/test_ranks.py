"""TRL's `GRPOTrainer` with `PromptRollouts` in two ranks of torchrun, as `accelerate launch` starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steno import Client
from steno.models import TINY
from tests.integration.trainer.launching import launch
from tests.support.programs.stack import running
from tests.support.programs.variables import without_settings
from tests.support.sources import SOURCES

pytestmark = pytest.mark.trl


def test_each_rank_trains_the_groups_of_its_own_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ["--engine", "transformers", "--model", str(TINY)]
    with without_settings(), running(tmp_path / "stack", worker) as stack:
        monkeypatch.setenv("PYTHONPATH", SOURCES)
        (tmp_path / "job.json").write_text(json.dumps({"proxy": stack.url, "run": "ranks"}))
        launch(2, "tests.integration.trl.prompt_rank", tmp_path)
        counts = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
        assert [(each["trials"], each["empty_trials"], each["earlier_groups"]) for each in counts] == [(4, 0, 0)] * 2
        with Client(stack.url) as client:
            views = [client.run(run).groups for run in ("ranks", "ranks-r1")]
            assert [(view.acknowledged, view.ready, view.leased) for view in views] == [(2, 0, 0)] * 2
            [policy] = [view for view in client.policies() if view.policy == "default"]
            assert policy.version is not None and policy.version.endswith("/1"), "the first rank pushed what was made"

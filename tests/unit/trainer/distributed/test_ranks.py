"""Who a process is among the ranks is what its launcher says, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from steno.contracts.errors import ConfigError
from steno_trainer.distributed.ranks import LAUNCHED, Ranks
from steno_trainer.run.main import check_beforehand
from steno_trainer.run_config import RunSettings
from tests.unit.trainer.launched import launched


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_launcher_that_says_half_of_it_leaves_no_rank_that_trains_alone(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would be rank 0 of 1, in the same folders."""
    launched(monkeypatch, rank)
    monkeypatch.delenv("LOCAL_RANK")
    words = "LOCAL_RANK: got nothing, must be set, since WORLD_SIZE is 2: a launcher sets RANK, WORLD_SIZE, LOCAL_RANK"
    for start in (lambda: check_beforehand(RunSettings(model="m")), lambda: Ranks.open("cpu")):
        with pytest.raises(ConfigError, match=words) as refused:
            start()
        assert refused.value.field == "LOCAL_RANK"
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match=r"^LOCAL_RANK, MASTER_PORT: got nothing"):
        Ranks.open("cpu")


@pytest.mark.parametrize("given", [{}, {"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}])
def test_a_process_without_a_launcher_is_the_first_rank_whatever_number_is_left_in_its_environment(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs alone, so it has the trackers, and it is what looks at the records."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"records: .*No such file"):
        check_beforehand(RunSettings(model="m", records=tmp_path / "r.jsonl"))

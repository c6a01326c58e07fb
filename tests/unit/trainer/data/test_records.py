"""Samples of a file in place of leased ones: read as they were exported, each group once, and what is no such file is refused."""

from __future__ import annotations

import json
import math
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steno.contracts.errors import ConfigError
from steno.contracts.records import Sample, readable
from steno_trainer.data.advantages import Estimator
from steno_trainer.data.ledger import Reason
from steno_trainer.data.overlong import Overlong
from steno_trainer.data.record_feed import RecordFeed
from steno_trainer.data.record_file import RecordFile
from steno_trainer.data.rows import TrainingTerms
from steno_trainer.data.staleness import PolicyVersion, VersionHistory
from steno_trainer.run.main import check_beforehand
from steno_trainer.run_config import RunSettings
from steno_trainer.step.assemble import assemble, says_something
from tests.unit.trainer.launched import launched
from tests.unit.trainer.recorded import VOCABULARY, Recording, session

HISTORY = VersionHistory((PolicyVersion("base", 0), PolicyVersion("mine", 7)))


def recorded(rewards: dict[str, float | None] | None = None, group_id: str | None = "g") -> list[Sample]:
    """Of each trial two samples that share a turn, by versions that nobody here knows."""
    found = []
    for seed, (trial_id, reward) in enumerate((rewards or {"g.0": 0.0, "g.1": 1.0}).items()):
        recording = Recording(seed)
        first = recording.turn(None, 3, 4, version="elsewhere/90")
        recording.turn(first, 2, 3, version="engine-0.9")
        recording.turn(first, 1, 2, version="base/0")
        found += recording.samples(session(trial_id, group_id, reward))
    return found


def write_jsonl(path: Path, samples: list[Sample]) -> Path:
    path.write_text("".join(json.dumps(readable(sample)) + "\n\n" for sample in samples))
    return path


def write_parquet(path: Path, samples: list[Sample]) -> Path:
    return write_rows(path, [readable(sample) for sample in samples])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Two rows to a row group, nested fields as JSON text, as the export writes them."""
    for row in rows:
        nested = {name: row[name] for name in ("turn_ids", "spans", "completions")}
        row |= {name: value if isinstance(value, str) else json.dumps(value) for name, value in nested.items()}
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


Write = Callable[[Path, list[Sample]], Path]
BOTH = pytest.mark.parametrize(("name", "write"), [("r.jsonl", write_jsonl), ("r.parquet", write_parquet)])


@BOTH
async def test_a_feed_brings_each_group_once_and_its_samples_as_recorded(
    tmp_path: Path, name: str, write: Write
) -> None:
    samples = [*recorded(), *recorded({"h.0": 1.0, "h.1": 0.5, "h.2": 0.0}, "h"), *recorded({"k.0": 1.0}, "k")]
    samples.append(samples.pop(1))  # a group's samples need not stand together
    path = write(tmp_path / name, samples)
    async with RecordFeed(path, run_id="r", trained={"k"}) as feed:
        assert feed.waiting == 2
        [first] = await feed.take(1)
        [second] = await feed.take(5)
        assert await feed.take(1) == [] and feed.held == 2
        view = await feed.run("r")
        assert view.rollouts_over and (view.groups.ready, view.groups.leased, view.groups.acknowledged) == (0, 2, 1)
        await feed.acknowledge(["g", "h"])
        assert feed.held == 0
    assert [first.group_id, second.group_id] == ["g", "h"]
    assert _plain(first.samples) == _plain(recorded()) and len(second.samples) == 6
    rewards = {trial.trial_id: trial.reward for trial in second.lease.trials}
    assert rewards == {"h.0": 1.0, "h.1": 0.5, "h.2": 0.0} and {t.counts.turns for t in second.lease.trials} == {3}
    assert first.lease.tokens["g.0"] == {"elsewhere/90": 4, "engine-0.9": 3, "base/0": 2}, "what is shared counts once"


def _plain(samples: list[Sample]) -> list[tuple[Any, ...]]:
    ordered = sorted(samples, key=lambda sample: (sample.trial_id, sample.leaf_id))
    return [
        (s.trial_id, s.leaf_id, s.turn_ids, s.token_ids, s.loss_mask, s.sampling_logprobs, s.spans, s.completions)
        for s in ordered
    ]


async def test_groups_that_say_nothing_come_beside_those_that_do_or_alone_once_they_are_as_many(tmp_path: Path) -> None:
    """As leased ones do: a file of them is not read to its end into one step, and steps stay equally large."""

    def silent(group_id: str) -> list[Sample]:
        return recorded({f"{group_id}.0": 1.0, f"{group_id}.1": 1.0}, group_id)

    def telling(group_id: str) -> list[Sample]:
        return recorded({f"{group_id}.0": 0.0, f"{group_id}.1": 1.0}, group_id)

    groups = [telling(name) if name in "acdh" else silent(name) for name in "abcdefghij"]
    path = write_jsonl(tmp_path / "r.jsonl", [sample for group in groups for sample in group])
    async with RecordFeed(path, run_id="r", trained=set(), counts=says_something) as feed:
        taken, left = [], []
        while found := await feed.take(2):
            taken.append("".join(leased.group_id for leased in found))
            ready = (await feed.run("r")).groups.ready
            assert ready == feed.waiting
            left.append(ready)
    assert taken == ["abc", "ef", "dgh", "ij"]
    assert left == [7, 5, 2, 0], "d waits for another one that says something"


async def test_any_version_is_trained_offline_and_every_token_is_booked(tmp_path: Path) -> None:
    """The same records would be orphaned, of a bad version and stale otherwise."""
    path = write_jsonl(tmp_path / "r.jsonl", recorded())
    async with RecordFeed(path, run_id="r", trained=set()) as feed:
        groups = await feed.take(1)
    settings = RunSettings(model="m", records=path)
    settings.check()
    bound = settings.staleness_bound
    assert bound is None and RunSettings(model="m").staleness_bound == 1
    terms = TrainingTerms(HISTORY, bound, 1000, VOCABULARY)
    ready = assemble(groups, terms, Estimator.GRPO, Overlong())
    for row in ready.batch.rows:
        for version, tokens in row.trained_by_version().items():
            ready.books.trained(version, tokens)
    ready.books.check()
    total = ready.books.total()
    assert total.trained == total.sampled == 18 and not total.untrained
    assert ready.batch.advantages["g.0"] < 0 < ready.batch.advantages["g.1"]
    assert "staleness/mean" not in ready.values, "none has a staleness, which is not 0"
    for sample, row in zip(groups[0].samples, ready.batch.rows, strict=True):
        said = row.sampling_logprobs_T[row.loss_mask_T].tolist()
        own = [
            one
            for one, kept in zip(sample.to_numpy().sampling_logprobs.tolist(), sample.loss_mask, strict=True)
            if kept
        ]
        assert said == own and all(map(math.isfinite, said)), "what corrects for the weights that sampled them"
    bounded = assemble(groups, TrainingTerms(HISTORY, 1, 1000, VOCABULARY), Estimator.GRPO, Overlong())
    assert not bounded.batch.rows and bounded.books.total().untrained.keys() <= {Reason.ORPHANED, Reason.BAD_VERSION}


async def test_new_rewards_turn_the_advantages_around(tmp_path: Path) -> None:
    found = []
    for number, rewards in enumerate(({"g.0": 0.0, "g.1": 1.0}, {"g.0": 1.0, "g.1": 0.0})):
        path = write_jsonl(tmp_path / f"{number}.jsonl", recorded(rewards))  # type: ignore[arg-type]
        async with RecordFeed(path, run_id="r", trained=set()) as feed:
            terms = TrainingTerms(HISTORY, None, 1000, VOCABULARY)
            found.append(assemble(await feed.take(1), terms, Estimator.GRPO, Overlong()).batch.advantages)
    assert found[0] == {trial: -advantage for trial, advantage in found[1].items()} and found[0]["g.1"] > 0


async def test_samples_without_a_reward_or_a_group_are_not_trained(tmp_path: Path) -> None:
    unscored = recorded({"g.2": None})
    path = write_jsonl(tmp_path / "r.jsonl", [*recorded(), *unscored, *recorded({"x": 1.0}, None)])
    async with RecordFeed(path, run_id="r", trained=set()) as feed:
        groups = await feed.take(9)
    ready = assemble(groups, TrainingTerms(HISTORY, None, 1000, VOCABULARY), Estimator.GRPO, Overlong())
    assert Counter(row.trial_id for row in ready.batch.rows) == {"g.0": 2, "g.1": 2}
    assert ready.books.total().untrained == {Reason.UNSCORED: 9}


@BOTH
@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_a_reward_that_is_no_finite_number_is_one_reward_and_leaves_its_group_out(
    reward: float, tmp_path: Path, name: str, write: Write
) -> None:
    path = write(tmp_path / name, [*recorded({"h.0": reward, "h.1": 1.0}, "h"), *recorded()])
    check_beforehand(RunSettings(model="m", records=path))
    async with RecordFeed(path, run_id="r", trained=set()) as feed:
        groups = await feed.take(2)
    ready = assemble(groups, TrainingTerms(HISTORY, None, 1000, VOCABULARY), Estimator.GRPO, Overlong())
    assert {row.group_id for row in ready.batch.rows} == {"g"} and ready.malformed.keys() == {"h"}


def _without(samples: list[Sample], name: str) -> list[str]:
    rows = [readable(sample) for sample in samples]
    rows[1].pop(name)
    return [json.dumps(row) for row in rows]


def _with(samples: list[Sample], **fields: Any) -> list[str]:
    """The second row has these."""
    rows = [readable(sample) for sample in samples]
    rows[1] |= fields
    return [json.dumps(row) for row in rows]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (["{"], "row 1: not valid JSON"),
        (["", "[1]"], r"row 2: got '\[1\]', must be an object"),
        (_without(recorded(), "leaf_id"), "row 2: leaf_id: got None, must be text: is it a row of samples?"),
        ([json.dumps(readable(s)) for s in recorded() * 2], "row 5: the sample of trial g.0, leaf 0+1, is in row 1"),
        (_with(recorded(), group_id=["g"]), r"row 2: group_id: got \['g'\], must be text or null"),
        (_with(recorded(), group_id="h"), "row 2: group_id: got h, must be g as in row 1: trial g.0 is in one group"),
        ([json.dumps(readable(s)) for s in recorded(group_id=None)], "has no sample of a group"),
        ([], "has no sample of a group"),
    ],
)
def test_a_file_that_holds_no_samples_is_refused_at_the_start(tmp_path: Path, lines: list[str], named: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=named) as refused:
        RecordFile.open(path)
    assert refused.value.field == "records"


def test_a_file_that_is_missing_or_no_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        RecordFile.open(tmp_path / "r.jsonl")
    (tmp_path / "r.parquet").write_text("{}")
    with pytest.raises(ConfigError, match="not a Parquet file"):
        RecordFile.open(tmp_path / "r.parquet")


def _late(samples: list[Sample]) -> list[dict[str, Any]]:
    """As the file has them, behind two groups that are in order."""
    return [readable(sample) for sample in [*recorded(), *recorded({"h.0": 1.0, "h.1": 0.5}, "h"), *samples]]


def _lacking(rows: list[dict[str, Any]]) -> None:
    rows[9] |= {"sampling_logprobs": None}


def _empty(rows: list[dict[str, Any]]) -> None:
    del rows[9]["sampling_logprobs"]


def _twofold(rows: list[dict[str, Any]]) -> None:
    rows[9]["reward"] = 0.25


NO_SAMPLE = "row 10: trial k.0: no sample: sampling_logprobs: "
TWO_REWARDS = "row 10: trial k.0: reward: got 0.25, must be 1.0 as in row 9: a trial has one"


@pytest.mark.parametrize(
    ("suffix", "spoil", "named"),
    [
        (".jsonl", _empty, f"{NO_SAMPLE}Field required$"),
        (".jsonl", _lacking, NO_SAMPLE),
        (".jsonl", _twofold, TWO_REWARDS),
        (".parquet", _lacking, NO_SAMPLE),
        (".parquet", _twofold, TWO_REWARDS),
    ],
)
async def test_a_row_that_can_not_be_trained_is_named_before_the_model_is_loaded(
    suffix: str, spoil: Callable[[list[dict[str, Any]]], None], named: str, tmp_path: Path
) -> None:
    rows = _late(recorded({"k.0": 1.0, "k.1": 0.0}, "k"))
    spoil(rows)
    path = tmp_path / f"r{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        write_rows(path, rows)
    with pytest.raises(ConfigError, match=named) as refused:
        check_beforehand(RunSettings(model="m", records=path))
    assert refused.value.field == "records" and str(path) in str(refused.value)
    async with RecordFeed(path, run_id="r", trained=set()) as feed:  # whoever did not look
        assert [leased.group_id for leased in await feed.take(2)] == ["g", "h"]
        with pytest.raises(ConfigError, match=named):
            await feed.take(1)


def test_names_that_no_call_of_the_file_asked_for_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    rows = [readable(sample) for sample in recorded()]
    for row in rows:
        row["completions"] = [{**part, "model": "main[think]"} for part in row["completions"]]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for names in (["main[think]"], ["mian", "main*"], [" main?think? "]):
        check_beforehand(RunSettings(model="m", records=path, train_models=names))
    with pytest.raises(ConfigError, match=r"got mian; the calls in .*r\.jsonl asked for 'main\[think\]'"):
        check_beforehand(RunSettings(model="m", records=path, train_models=["mian"]))
    del rows[-1]["completions"][0]["model"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=f"row {len(rows)}: train_models: these samples do not say"):
        check_beforehand(RunSettings(model="m", records=path, train_models=["main*"]))
    check_beforehand(RunSettings(model="m", records=path))
    with pytest.raises(ConfigError, match="train_models"):
        RunSettings.load({"model": "m", "train_models": [" "]}, None)


def test_nested_text_of_parquet_that_is_no_json_names_its_row(tmp_path: Path) -> None:
    rows = [readable(sample) for sample in recorded()]
    rows[2]["spans"] = "[{"
    write_rows(tmp_path / "r.parquet", rows)
    with pytest.raises(ConfigError, match="row 3: spans: not valid JSON: "):
        RecordFile.open(tmp_path / "r.parquet").check()


def test_the_first_rank_alone_reads_the_file_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(_without(recorded(), "loss_mask")))
    settings = RunSettings(model="m", records=path)
    launched(monkeypatch, "1")
    check_beforehand(settings)
    launched(monkeypatch, "0")
    with pytest.raises(ConfigError, match=r"row 2: trial g\.0: no sample: loss_mask"):
        check_beforehand(settings)


@BOTH
def test_rows_that_were_taken_from_the_middle_of_a_trial_are_told(
    tmp_path: Path, name: str, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """What the samples of a trial have in common is trained in the first of them alone."""
    samples = recorded()
    RecordFile.open(write(tmp_path / name, [samples[1], samples[0], *samples[2:]])).check()
    RecordFile.open(write(tmp_path / name, samples[:3])).check()
    assert "not trained" not in caplog.text
    RecordFile.open(write(tmp_path / name, samples[1::2])).check()
    [warning] = [one.message for one in caplog.records if "not trained" in one.message]
    assert f"{name}: 8 sampled tokens are not trained" in warning and "(row 1, trial g.0, has some)" in warning


@BOTH
def test_a_file_that_is_in_order_is_read_once_and_nothing_of_it_is_kept(
    tmp_path: Path, name: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [*recorded(), *recorded({"h.0": 1.0, "h.1": None}, "h")]
    file = RecordFile.open(write(tmp_path / name, samples))
    held: list[weakref.ref[Sample]] = []
    most = 0
    validate = Sample.model_validate

    def counted(row: Any) -> Sample:
        nonlocal most
        sample = validate(row)
        held.append(weakref.ref(sample))
        most = max(most, sum(one() is not None for one in held))
        return sample

    monkeypatch.setattr(Sample, "model_validate", counted)
    file.check()
    file.close()
    assert len(held) == len(samples) and most <= 5, "one group, and the row that is being read"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"offline": True, "mismatch": "off"}, "mismatch"),
        ({"offline": True, "eval_every": 1, "eval_config": "e.yaml"}, "eval_config"),
        ({"records": "r.csv"}, "records"),
        ({"records": "r.jsonl", "take_s": 5.0}, "take_s"),
    ],
)
def test_what_can_not_be_offline_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunSettings(model="m", **fields).check()
    assert refused.value.field == named
    RunSettings(model="m", offline=True, mismatch="off", proximal="sampler").check()
    RunSettings(model="m", offline=True, take_s=5.0).check()

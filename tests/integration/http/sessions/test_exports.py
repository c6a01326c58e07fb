"""`steno sessions export` of one recorded session: every id, log-probability and mask in a file is the record's, and Harbor's own
models take its trajectories."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steno import Client
from steno.contracts.errors import ConfigError, NotFound
from steno.contracts.records import Sample, Turn
from steno.contracts.rest import Completion, GroupSpec
from steno_cli.exports import export
from steno_cli.exports.export import ExportFormat, export_sessions
from steno_cli.exports.rows import Records
from steno_cli.exports.selection import Selection
from steno_cli.exports.tables import write_parquet
from tests.integration.http.conftest import Proxy, running
from tests.support.workers.parrot import ParrotEngine, Say

Message = dict[str, Any]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("read", "task")
]
TRIAL = "t"


def say(request: Any) -> Say:
    last = str(request.job.messages[-1]["content"])
    if "both" in last:
        return Say("I read.", reasoning="hm", calls=[("a", "read", '{"path": "a"}'), ("b", "task", '{"about": "b"}')])
    if "fail" in last:
        return Say("half an answer", fail_after=4)
    if "odd" in last:
        return Say(calls=[("c", "read", "[1]")])
    return Say(f"{last[:6]}!")


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    async with running(ParrotEngine(say)) as found:
        yield found


async def ask(proxy: Proxy, *messages: Any, status: int = 200, **fields: Any) -> Message:
    answer = await proxy.chat(TRIAL, *messages, **{"tools": TOOLS} | fields)
    assert answer.status_code == status, answer.text
    return {} if status != 200 else answer.json()["choices"][0]["message"]


async def record_a_session(proxy: Proxy) -> tuple[list[Turn], list[Sample]]:
    """Two calls at once; a sub-agent of three turns, the last a fork, while they run; a fork after their results; a failed turn;
    a call whose arguments are no object."""
    start: list[Any] = [{"role": "system", "content": "Be brief."}, "read both"]
    called = await ask(proxy, *start)
    helper: list[Any] = [{"role": "system", "content": "You look things up."}, "what is b"]
    found = await ask(proxy, *helper, tools=None)
    await ask(proxy, *helper, found, "surely", tools=None)
    await ask(proxy, *helper, found, "really", tools=None)
    for text in ("alpha", "gamma"):
        results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in called["tool_calls"]]
        await ask(proxy, *start, called, *results)
    said = await ask(proxy, *start, called, *results)
    await ask(proxy, *start, called, *results, said, "fail now", status=503)
    odd = await ask(proxy, *start, called, *results, said, "odd")
    answer = {"role": "tool", "tool_call_id": odd["tool_calls"][0]["id"], "content": "no"}
    await ask(proxy, *start, called, *results, said, "odd", odd, answer)
    await proxy.steno.complete(TRIAL, Completion(reward=0.5, metrics={"tests": 3.0}))
    listed = await proxy.steno.sample_list(TRIAL)
    assert not listed.unreadable
    return [turn async for turn in proxy.steno.turns(TRIAL)], listed.items


async def exported(proxy: Proxy, to: Path, file_format: ExportFormat, **how: Any) -> list[Any]:
    def write() -> int:
        with Client(proxy.url) as client:
            return export_sessions(client, [TRIAL], to, file_format, **how)

    count = await asyncio.to_thread(write)
    rows = rows_in(to)
    assert count == len(rows)
    return rows


def rows_in(to: Path) -> list[Any]:
    if to.is_dir():
        [data] = to.glob("*.arrow")
        return pa.ipc.open_stream(data.read_bytes()).read_all().to_pylist()  # type: ignore[no-any-return]
    if to.suffix == ".parquet":
        return pq.read_table(to).to_pylist()  # type: ignore[no-any-return]
    return list(map(json.loads, to.read_text().splitlines()))


def whole(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A document and all that are embedded in it."""
    yield document
    for inner in document.get("subagent_trajectories", ()):
        yield from whole(inner)


def sampled(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for step in document["steps"] if "metrics" in step]


async def test_each_trajectory_is_a_sample_and_together_they_train_each_token_once(
    proxy: Proxy, tmp_path: Path
) -> None:
    turns, samples = await record_a_session(proxy)
    rows = await exported(proxy, tmp_path / "t.jsonl", ExportFormat.ATIF, whole_prompts=True)
    documents = [one for row in rows for one in whole(row)]
    assert sorted(one["trajectory_id"] for one in documents) == sorted(sample.leaf_id for sample in samples)
    by_leaf = {one["trajectory_id"]: one for one in documents}
    for sample in samples:
        ids, mask, logprobs = sample.to_numpy()
        steps = sampled(by_leaf[sample.leaf_id])
        assert [step["extra"]["turn_id"] for step in steps] == sample.turn_ids
        for step, span in zip(steps, sample.completions, strict=True):
            metrics = step["metrics"]
            assert metrics["prompt_token_ids"] == ids[: span.start].tolist()
            assert metrics["completion_token_ids"] == ids[span.start : span.end].tolist()
            assert metrics["logprobs"] == logprobs[span.start : span.end].tolist()
            assert metrics["extra"]["loss_mask"] == mask[span.start : span.end].astype(int).tolist()
            assert step.get("is_copied_context", False) is span.shared
    trained = Counter(
        step["extra"]["turn_id"] for one in documents for step in sampled(one) if not step.get("is_copied_context")
    )
    assert trained == Counter(turn.turn_id for turn in turns)
    assert sum(one["final_metrics"]["total_completion_tokens"] for one in documents) == sum(
        len(turn.completion_ids) // 4 for turn in turns
    )
    assert rows[0]["extra"]["reward"] == 0.5 and rows[0]["extra"]["metrics"] == {"tests": 3.0}


async def test_results_stand_at_the_calls_and_a_sub_agent_in_the_step_that_waited_for_it(
    proxy: Proxy, tmp_path: Path
) -> None:
    turns, _ = await record_a_session(proxy)
    rows = await exported(proxy, tmp_path / "t.jsonl", ExportFormat.ATIF)
    first, *others = rows
    step = sampled(first)[0]
    assert (step["message"], step["reasoning_content"]) == ("I read.", "hm")
    assert [(call["function_name"], call["arguments"]) for call in step["tool_calls"]] == [
        ("read", {"path": "a"}),
        ("task", {"about": "b"}),
    ]
    results = step["observation"]["results"]
    answers, delegated = results[:2], results[2:]
    assert [(one["source_call_id"], one["content"]) for one in answers] == [
        (call["tool_call_id"], "alpha") for call in step["tool_calls"]
    ]
    inner = first["subagent_trajectories"]
    assert [one["steps"][0]["message"] for one in inner] == ["You look things up."] * 2
    assert [[turn["metrics"]["extra"]["new_prompt_token_ids"] for turn in sampled(one)] for one in inner] == [
        [turns[1].to_numpy().new_prompt_ids.tolist(), leaf.to_numpy().new_prompt_ids.tolist()] for leaf in turns[2:4]
    ]
    assert "prompt_token_ids" not in inner[0]["steps"][-1]["metrics"]
    assert [ref["trajectory_id"] for one in delegated for ref in one["subagent_trajectory_ref"]] == [
        one["trajectory_id"] for one in inner
    ]
    assert not any("subagent_trajectories" in other for other in others)
    failed = next(step for row in rows for step in sampled(row) if "error" in step["extra"])
    assert failed["message"] == "half" and failed["extra"]["partial"] is True
    odd = next(step for row in rows for step in sampled(row) if step.get("tool_calls", [{}])[0].get("extra"))
    assert odd["tool_calls"][0]["arguments"] == {} and odd["tool_calls"][0]["extra"] == {"arguments_as_sent": "[1]"}


async def test_labels_are_the_ids_exactly_where_the_mask_is_one(proxy: Proxy, tmp_path: Path) -> None:
    _, samples = await record_a_session(proxy)
    rows = await exported(proxy, tmp_path / "t.parquet", ExportFormat.SFT)
    assert [row["leaf_id"] for row in rows] == [sample.leaf_id for sample in samples if any(sample.loss_mask)]
    for row, sample in zip(rows, samples, strict=True):
        ids, mask, _ = sample.to_numpy()
        assert row["input_ids"] == ids.tolist()
        assert row["labels"] == [one if kept else -100 for one, kept in zip(ids.tolist(), mask, strict=True)]
        assert row["reward"] == 0.5
    assert await exported(proxy, tmp_path / "t", ExportFormat.DATASETS) == rows


@pytest.mark.trl
async def test_datasets_on_disk_go_through_trls_collator_as_they_are(proxy: Proxy, tmp_path: Path) -> None:
    """Read by Hugging Face's datasets; labels differ from -100 exactly where the record's mask is 1."""
    from datasets import load_from_disk
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    _, samples = await record_a_session(proxy)
    await exported(proxy, tmp_path / "sft", ExportFormat.DATASETS)
    data = load_from_disk(str(tmp_path / "sft"))
    assert data["leaf_id"][:] == [sample.leaf_id for sample in samples]
    collated = DataCollatorForLanguageModeling(pad_token_id=0)(list(data))
    for n, sample in enumerate(samples):
        ids, mask, _ = sample.to_numpy()
        labels = collated["labels"][n].numpy()
        assert (labels[: len(ids)] != -100).tolist() == mask.tolist() and (labels[len(ids) :] == -100).all()
        assert labels[: len(ids)][mask].tolist() == ids[mask].tolist()
        assert collated["input_ids"][n][collated["attention_mask"][n] == 1].tolist() == ids.tolist()
    data.save_to_disk(str(tmp_path / "again"))
    written, again = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("sft", "again"))
    assert written == again and load_from_disk(str(tmp_path / "again"))[:] == data[:]
    assert data.map(lambda row: {"tokens": len(row["input_ids"])})["tokens"][:] == [len(s.loss_mask) for s in samples]


async def test_lines_for_fine_tuning_learn_each_whole_reply_once(proxy: Proxy, tmp_path: Path) -> None:
    turns, _ = await record_a_session(proxy)
    lines = await exported(proxy, tmp_path / "t.jsonl", ExportFormat.CHAT)
    learnt = [m for line in lines for m in line["messages"] if m["role"] == "assistant" and m["weight"] == 1]
    assert len(learnt) == sum(not turn.partial for turn in turns)
    roles = [message["role"] for message in lines[-1]["messages"]]
    assert roles[:6] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    calling = lines[-1]["messages"][2]
    assert [call["id"] for call in calling["tool_calls"]] == [m["tool_call_id"] for m in lines[-1]["messages"][3:5]]
    assert lines[-1]["tools"] == turns[0].tools
    assert any(line.get("tools") is None for line in lines), "the sub-agent has no tools"


async def test_filters_choose_sessions(proxy: Proxy) -> None:
    made = await proxy.steno.create_group(GroupSpec(run_id="r", size=3))
    trials = [trial.session.trial_id for trial in made.trials]
    for trial, reward in zip(trials, (0.0, 1.0, 1.0), strict=True):
        assert (await proxy.chat(trial, "hello")).status_code == 200
        await proxy.steno.complete(trial, Completion(reward=reward))
    alone = await proxy.chat("alone", "hello")
    assert alone.status_code == 200

    def chosen(**how: Any) -> list[str]:
        with Client(proxy.url) as client:
            return Selection(**how).trial_ids(client)

    for how, expected in (
        ({}, [*trials, "alone"]),
        ({"run_id": "r"}, trials),
        ({"min_reward": 0.0}, trials),
        ({"min_reward": 0.5}, trials[1:]),
        ({"best_of_group": True}, [trials[1]]),
        ({"best_of_group": True, "min_reward": 2.0}, []),
        ({"end_reason": "completed"}, trials),
        ({"end_reason": "limit:max_turns"}, []),
        ({"status": "open"}, ["alone"]),
    ):
        assert sorted(await asyncio.to_thread(chosen, **how)) == sorted(expected), how


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"file_format": ExportFormat.SFT, "records": Records.TURNS}, "--records: got turns, but --format sft"),
        ({"file_format": ExportFormat.CHAT, "whole_prompts": True}, "--whole-prompts: only with --format atif, got"),
        ({"file_format": ExportFormat.SFT, "to": None}, "--format sft writes Parquet, which needs a file"),
        ({"file_format": ExportFormat.DATASETS, "to": None}, "--format datasets writes a folder: give --output FOLDER"),
        (
            {"file_format": ExportFormat.DATASETS, "whole_prompts": True},
            "--whole-prompts: only with --format atif, got",
        ),
    ],
)
def test_options_that_a_format_does_not_take_are_refused(how: dict[str, Any], words: str, tmp_path: Path) -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(ConfigError, match=words):
        export_sessions(client, ["t"], **{"to": tmp_path / "out"} | how)
    assert not list(tmp_path.iterdir())


def test_an_export_replaces_nothing_that_is_no_export(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("kept")
    for to, file_format, words in [
        (tmp_path / "notes", ExportFormat.DATASETS, "notes is there already; --format datasets writes a folder"),
        (tmp_path / "notes" / "mine.txt", ExportFormat.DATASETS, "mine.txt is there already"),
        (tmp_path / "notes", ExportFormat.CHAT, "notes is a folder; --format chat writes a file"),
        (tmp_path / "none" / "x", ExportFormat.DATASETS, "--output: no such folder: .*none"),
    ]:
        with Client("http://127.0.0.1:9") as client, pytest.raises(ConfigError, match=words):
            export_sessions(client, ["t"], to, file_format)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "kept" and len(list(tmp_path.rglob("*"))) == 2


async def test_a_folder_is_whole_or_not_there(proxy: Proxy, tmp_path: Path) -> None:
    """Also where a trial goes meanwhile, or a link leads to it."""
    await record_a_session(proxy)

    def write(trials: list[str], name: str) -> int:
        with Client(proxy.url) as client:
            return export_sessions(client, trials, tmp_path / name, ExportFormat.DATASETS)

    with pytest.raises(NotFound):
        await asyncio.to_thread(write, [TRIAL, "nobody"], "gone")
    (tmp_path / "t").mkdir()
    assert await asyncio.to_thread(write, [TRIAL], "t") == len(rows_in(tmp_path / "t"))
    assert await asyncio.to_thread(write, [], "none") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none", "t"]
    (tmp_path / "empty").mkdir()
    for name, target in [("link", "empty"), ("dangling", "new")]:
        (tmp_path / name).symlink_to(target)
        assert await asyncio.to_thread(write, [TRIAL], name) == len(rows_in(tmp_path / target))
        assert (tmp_path / name).is_symlink()
    assert len(list(tmp_path.iterdir())) == 6


def test_what_can_not_be_replaced_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    (tmp_path / "link").symlink_to("mount")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == mount)
    for to in (mount, tmp_path / "link"):
        with Client("http://127.0.0.1:9") as client, pytest.raises(ConfigError, match=r"--output: .*mount is a mount"):
            export_sessions(client, ["t"], to, ExportFormat.DATASETS)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for to in (Path(), tmp_path / "here", Path("../here")):
        with Client("http://127.0.0.1:9") as client, pytest.raises(ConfigError, match=r"--output: .*working directory"):
            export_sessions(client, ["t"], to, ExportFormat.DATASETS)
    assert not list((tmp_path / "here").iterdir()) and not list(mount.iterdir())


@pytest.mark.parametrize("file_format", [ExportFormat.JSONL, ExportFormat.DATASETS])
def test_two_exports_to_one_name_do_not_mix(
    file_format: ExportFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins and ends while the first writes."""
    to = tmp_path / "t"

    def rows(_: Any, trial_id: str, *__: Any, **___: Any) -> Iterator[dict[str, Any]]:
        yield {"trial_id": trial_id, "reward": 1.0}
        if trial_id == "first":
            assert export_sessions(client, ["second"], to, file_format) == 2
        yield {"trial_id": trial_id, "reward": 2.0}

    monkeypatch.setattr(export, "_rows", rows)
    with Client("http://127.0.0.1:9") as client:
        if file_format is ExportFormat.DATASETS:
            with pytest.raises(ConfigError, match=r"--output: .*t was made or removed during the export"):
                export_sessions(client, ["first"], to, file_format)
        else:
            assert export_sessions(client, ["first"], to, file_format) == 2
    kept = "second" if file_format is ExportFormat.DATASETS else "first"
    assert [row["trial_id"] for row in rows_in(to)] == [kept, kept]
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_long_sessions_are_written_a_few_at_a_time(tmp_path: Path) -> None:
    rows = ({"input_ids": [7] * 300_000, "labels": [-100] * 300_000} for _ in range(5))
    assert write_parquet(rows, {"input_ids": bytes, "labels": bytes}, tmp_path / "t.parquet") == 5
    found = pq.read_metadata(tmp_path / "t.parquet")
    assert [found.row_group(n).num_rows for n in range(found.num_row_groups)] == [2, 2, 1]


@pytest.mark.agents
async def test_harbors_own_models_take_every_trajectory(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`STENO_TEST_HARBOR` names a folder that has Harbor's package (made by `.ci/run`)."""
    monkeypatch.setattr(sys, "path", [*sys.path, os.environ["STENO_TEST_HARBOR"]])
    from harbor.models.trajectories import Trajectory  # type: ignore[import-not-found]

    await record_a_session(proxy)
    for whole_prompts in (False, True):
        rows = await exported(proxy, tmp_path / "t.jsonl", ExportFormat.ATIF, whole_prompts=whole_prompts)
        for row in rows:
            read = Trajectory.model_validate(row)
            assert read.to_json_dict() == row, "nothing is lost on the way through the models"
    with pytest.raises(ValueError, match="step_id"):
        Trajectory.model_validate(rows[0] | {"steps": rows[0]["steps"][1:]})

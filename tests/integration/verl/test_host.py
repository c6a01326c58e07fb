"""The parts of an agent-loop worker that need verl's packages, and no Ray: answers of its servers, the ends of trials."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from verl.workers.rollout.replica import TokenOutput

from steno import Client
from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import ConfigError, Unreachable
from steno.models import TINY
from steno_adapters.verl import agent_host, loop, seam
from steno_adapters.verl.agent_host import AgentHost, PlayedSession
from steno_adapters.verl.checks import FILTERS
from steno_adapters.verl.job import JobFacts
from steno_adapters.verl.loop import RemoteAgentLoop
from steno_adapters.verl.prompt_groups import PromptGroups, PromptSession
from steno_adapters.verl.session_rows import SessionRow, SessionRows
from steno_adapters.verl.settings import VerlSettings
from steno_adapters.verl.tokens import VerlTokens
from steno_rollouts.build import Prepared
from steno_rollouts.outcome import TrialResult
from steno_worker.chat import chat_engine
from tests.integration.verl.verl_job import task_folders, verl_config
from tests.support.programs.stack import Stack, running

pytestmark = pytest.mark.verl


async def test_an_answer_that_is_broken_off_before_its_first_token_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """verl's vLLM server answers so where new weights come."""
    answers = [
        TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields={"global_steps": 1}),
        TokenOutput(token_ids=[7], log_probs=[-0.5], stop_reason="aborted", extra_fields={"global_steps": 1}),
        TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields={"global_steps": 2}),
        TokenOutput(
            token_ids=[8, 2], log_probs=[-0.25, -1.0], stop_reason="completed", extra_fields={"global_steps": 3}
        ),
    ]
    asked = []

    async def attempt(servers: Any, name: str, ids: list[int], sampling: dict[str, Any]) -> TokenOutput:
        asked.append(ids)
        return answers.pop(0)

    monkeypatch.setattr("steno_adapters.verl.tokens.attempt", attempt)
    monkeypatch.setattr("steno_adapters.verl.tokens.RESUME_S", 0.0)
    tokens = VerlTokens(
        SimpleNamespace(), name="policy", lineage="verl-a", context_tokens=64, vocabulary_size=64,
        tokenizer_digest="d", stop_ids=[2],
    )  # fmt: skip
    law = Sampling(max_tokens=8)
    steps = [step async for step in tokens.sample("r", [5], law, Job(messages=[]))]
    for step in steps:
        chat_engine._check(step, law, False)
    assert [(step.ids, step.version, step.finish) for step in steps] == [
        ([7], "verl-a/1", None),
        ([8, 2], "verl-a/3", "stop"),
    ]
    assert asked == [[5], [5], [5, 7], [5, 7]]


@pytest.mark.parametrize(("server", "seed_name"), [("vllm", "seed"), ("sglang", "sampling_seed")])
async def test_a_seed_is_named_as_the_server_names_it(
    server: str, seed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang refuses a name that it does not know."""
    asked: list[dict[str, Any]] = []

    async def attempt(servers: Any, name: str, ids: list[int], sampling: dict[str, Any]) -> TokenOutput:
        asked.append(sampling)
        return TokenOutput(token_ids=[5], log_probs=[-0.5], stop_reason="completed", extra_fields={})

    monkeypatch.setattr("steno_adapters.verl.tokens.attempt", attempt)
    config = verl_config(None, f"actor_rollout_ref.rollout.name={server}")
    tokens, _ = agent_host._engine(None, AutoTokenizer.from_pretrained(TINY), config, "policy", "verl-a")
    async for _ in tokens.sample("r", [5], Sampling(max_tokens=1, seed=7), Job(messages=[])):
        pass
    assert {name: value for name, value in asked[0].items() if "seed" in name} == {seed_name: 7}


def test_verls_template_options_hold_where_an_agent_says_no_other() -> None:
    """verl's data set measures prompts with them."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{{ 'thinks' if enable_thinking | default(true) else 'answers' }}"

    def text(options: dict[str, Any], *overrides: str) -> str:
        _, engine = agent_host._engine(None, tokenizer, verl_config(None, *overrides), "policy", "verl-a")
        return str(tokenizer.decode(engine._format.render([{"role": "user", "content": "?"}], [], options)))

    off = "+data.apply_chat_template_kwargs.enable_thinking=false"
    assert (text({}), text({}, off)) == ("thinks", "answers")
    assert text({"enable_thinking": True}, off) == "thinks", "the agent's own counts"


def test_a_model_with_code_of_its_own_is_read_as_verl_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    own = "from transformers import PretrainedConfig\n\n\nclass Own(PretrainedConfig):\n    model_type = 'own'\n"
    (folder / "configuration_own.py").write_text(own)
    mapped = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}, "vocab_size": 99_999}
    (folder / "config.json").write_text(json.dumps(mapped))
    tokenizer, path = AutoTokenizer.from_pretrained(TINY), f"actor_rollout_ref.model.path={folder}"
    trusted = verl_config(None, path, "actor_rollout_ref.model.trust_remote_code=true")
    tokens, _ = agent_host._engine(None, tokenizer, trusted, "policy", "verl-a")
    assert tokens.card().vocabulary_size == 99_999
    with pytest.raises(
        ConfigError, match=r"actor_rollout_ref.model.path: got .*/model, its configuration can't be read"
    ):
        agent_host._engine(None, tokenizer, verl_config(None, path), "policy", "verl-a")


def test_a_model_of_another_file_system_is_where_verl_has_copied_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[str, bool]] = []

    def copy_to_local(path: str, use_shm: bool) -> str:
        copied.append((path, use_shm))
        return str(TINY)

    monkeypatch.setattr(seam, "copy_to_local", copy_to_local)
    config = verl_config(None, "actor_rollout_ref.model.path=hdfs://x/q", "actor_rollout_ref.model.use_shm=true")
    agent_host._engine(None, AutoTokenizer.from_pretrained(TINY), config, "policy", "verl-a")
    assert copied == [("hdfs://x/q", True)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("proxy"), None) as found:
        yield found


def settings_of(folder: Path, url: str) -> VerlSettings:
    tasks = task_folders(folder / "tasks", {"plain": "Write a note."})
    return VerlSettings(
        tasks=tasks, command=["true"], proxy=url, work_dir=folder / "trials", confine="off", in_flight=1, timeout_s=10
    )


async def test_whatever_a_session_fails_by_no_trial_of_its_group_stays_open(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose runner raises, one that is cancelled while it waits, one that fails before it plays."""
    settings = settings_of(tmp_path, stack.url)
    prepared = Prepared.of(settings, "ends")
    facts = JobFacts("ends", "verl-a", stack.url, None, None)
    host = AgentHost(verl_config(None), settings, prepared, prepared, facts)
    runs = asyncio.Event()

    async def run(*_: Any) -> None:
        runs.set()
        raise Unreachable("the proxy is away")

    monkeypatch.setattr(host._runners[False], "run", run)
    groups = PromptGroups()
    come = [groups.come("u") for _ in range(3)]
    task = host.task("plain", validate=False)
    sessions = [PromptSession("u", group, i, task, {}, False, waiting=groups.open) for group, i in come]
    group = come[0][0]
    with pytest.raises(Unreachable):
        await host.play(sessions[0])
    await host._slots.acquire()
    waits = asyncio.create_task(host.play(sessions[1]))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    with Client(stack.url) as client:
        [group_id] = {session.group_id for session in client.session_page(run_id="ends").items}
        registered = client.group(group_id)
        ends = [client.session(trial) for trial in registered.trial_ids]
        assert [(each.status, each.end_reason) for each in ends] == [
            ("aborted", "interrupted"),
            ("aborted", "cancelled"),
            ("open", None),
        ]
        assert registered.task["verl"]["lineage"] == "verl-a"
        assert registered.deadline_s is not None and registered.deadline_s > 3 * 10
        await host.end_rest(group)
        assert client.session(registered.trial_ids[2]).end_reason == "interrupted"
    await host.close()


async def test_a_trial_is_marked_until_it_has_ended_and_longer_where_its_end_could_not_be_told(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its mark the next process knows what this one left. A folder that is kept has none."""
    settings = settings_of(tmp_path, stack.url)
    prepared = Prepared.of(settings, "marked")
    host = AgentHost(
        verl_config(None), settings, prepared, prepared, JobFacts("marked", "verl-a", stack.url, None, None)
    )
    runner, trials, during = host._runners[False], settings.work_dir, list[str]()
    play = runner._player.play

    def found() -> list[str]:
        return sorted(path.name.rpartition(".")[2] for path in trials.iterdir())

    async def seen(*given: Any) -> Any:
        during.extend(found())
        return await play(*given)

    async def away(*_: Any) -> Any:
        raise Unreachable("the proxy is away")

    monkeypatch.setattr(runner._player, "play", seen)
    groups = PromptGroups()
    come = [groups.come("u") for _ in range(2)]
    task = host.task("plain", validate=False)
    first, second = (PromptSession("u", group, i, task, {}, False, waiting=groups.open) for group, i in come)
    played = await host.play(first)
    assert (played.result.failed, during) == (True, ["launcher", "running"])
    assert found() == ["0"], "it failed, and its folder is kept"
    monkeypatch.setattr(runner, "_post", away)
    with pytest.raises(Unreachable):
        await host.play(second)
    assert "running" in found()
    await host.end_rest(come[0][0])
    assert "running" not in found()
    await host.close()


async def test_sessions_that_verl_starts_together_are_one_group_also_where_nothing_has_to_be_waited_for(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine TransferQueue's answer may be there before it is looked for."""
    settings = settings_of(tmp_path, stack.url)
    prepared = Prepared.of(settings, "together")
    config = verl_config(None)
    host = AgentHost(config, settings, prepared, prepared, JobFacts("together", "verl-a", stack.url, None, None))

    async def at_once(*_: Any) -> Any:
        return host

    async def training(uid: str) -> bool:
        return False

    async def run(*_: Any) -> None:
        raise Unreachable("the proxy is away")

    monkeypatch.setattr(loop, "host_here", at_once)
    monkeypatch.setattr(loop.seam, "is_validation", training)
    monkeypatch.setattr(host._runners[False], "run", run)
    law = {"temperature": 0.7, "top_p": 1.0, "top_k": -1}
    found = await asyncio.gather(
        *(
            RemoteAgentLoop(SimpleNamespace(config=config), None, None).run(
                law, uid="u", session_id=number, global_steps=1, extra_info={"task_id": "plain"}
            )
            for number in range(3)
        ),
        return_exceptions=True,
    )
    assert [type(each) for each in found] == [Unreachable] * 3
    with Client(stack.url) as client:
        [group_id] = {session.group_id for session in client.session_page(run_id="together").items}
        assert len(client.group(group_id).trial_ids) == 3
    await host.close()


async def test_a_host_that_the_proxy_does_not_serve_leaves_nothing_running(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def facts(*_: Any) -> JobFacts:
        return JobFacts("begun", "verl-a", stack.url, None, None)

    monkeypatch.setattr(agent_host, "job_facts", facts)
    monkeypatch.setattr(agent_host, "SERVED_S", 0.0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with pytest.raises(ConfigError, match=r"does not serve the model policy after 0 s"):
        await AgentHost.begun(verl_config(None), settings_of(tmp_path, stack.url), SimpleNamespace(), tokenizer)
    assert not {task.get_name() for task in asyncio.all_tasks()} & {"steno-worker", "steno-handed-over"}


async def test_a_process_has_one_host_and_so_one_http_client_however_many_sessions_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Any] = []

    async def begin(*given: Any) -> Any:
        begun.append(given)
        await asyncio.sleep(0)
        if len(begun) == 1:
            raise ConfigError("the proxy is not there yet", field="proxy")
        return "host"

    monkeypatch.setattr(loop, "_host", None)
    monkeypatch.setattr(AgentHost, "begun", begin)
    monkeypatch.setattr(VerlSettings, "found", lambda file, line: None)

    def asked() -> Any:
        return asyncio.gather(*(loop.host_here({}, None, None, None) for _ in range(3)), return_exceptions=True)

    assert [type(each) for each in await asked()] == [ConfigError] * 3
    assert await asked() == ["host"] * 3 and await asked() == ["host"] * 3
    assert len(begun) == 2, "the first one could not be made, and is made again once"


def test_outputs_of_a_session_share_nothing_that_can_be_changed() -> None:
    """verl writes into them. The last one has `reward_extra_info`, which verl copies to the others."""
    rows = [SessionRow([1], [2, 3][:length], [1] * length, [-1.0] * length, (4, 5)) for length in (1, 2)]
    ended = TrialResult("r", "g", "g.0", "t", "0", "completed", "completed", reward=1.0, turns=3)
    made = loop.outputs(PlayedSession(ended, SessionRows(rows), 1.0))
    before = made[1].model_dump()
    assert before["extra_fields"]["reward_extra_info"] == {"steno_turns": 3, "steno_rows": 2, "steno_failed": 0}
    assert {"reward", *before["extra_fields"]["reward_extra_info"]} >= set(FILTERS)
    assert (before["reward_score"], before["extra_fields"]["steno_trial_id"]) == (1.0, "g.0")
    made[0].extra_fields["reward_extra_info"]["steno_turns"] = 9
    made[0].extra_fields["more"] = made[0].metrics.generate_sequences = 7
    for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs"):
        getattr(made[0], name).append(0)
    assert made[1].model_dump() == before

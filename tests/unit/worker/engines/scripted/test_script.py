"""Scripts: loading, what they are told, what they may answer, and what is said when they are wrong."""

from pathlib import Path
from typing import Any

import pytest

from steno.contracts.chat import Job, ResponseFormat
from steno.contracts.errors import ConfigError, EngineFailed, TooManyRequests
from steno_worker.engines.scripted.script import Reply, ScriptFunction, read_reply, request_of


def script(tmp_path: Path, source: str, name: str = "say") -> ScriptFunction:
    file = tmp_path / "script.py"
    file.write_text(source)
    return ScriptFunction(f"{file}:{name}")


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        ("x = 1", "say", "no function 'say'; it has none"),
        ("def other(r): ...", "say", "it has other"),
        ("import nothing_like_it", "say", "ModuleNotFoundError"),
        ("def say(:", "say", "SyntaxError"),
    ],
)
def test_a_broken_script_is_a_config_error(tmp_path: Path, source: str, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        script(tmp_path, source, name)


@pytest.mark.parametrize("where", ["script.py", ":say", "no/such.py:say"])
def test_a_script_that_is_none_is_a_config_error(where: str) -> None:
    with pytest.raises(ConfigError, match="script"):
        ScriptFunction(where)


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_functions_may_be_sync_or_async(tmp_path: Path, kind: str) -> None:
    said = await script(tmp_path, f"{kind} say(request): return request['trial_id']")({"trial_id": "t"})
    assert said.message == {"role": "assistant", "content": "t"}


async def test_a_script_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "steno_test_neighbour.py").write_text("WORD = 'hi'")
    said = await script(tmp_path, "from steno_test_neighbour import WORD\ndef say(r): return WORD")({})
    assert said.message["content"] == "hi"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise KeyError('x')", "script.py:say raised KeyError"),
        ("return 7", "script.py:say returned 7"),
        ("return None", "returned None"),
        ("return {'contents': 'x'}", "unknown keys .'contents'."),
        ("return {'content': ['x']}", "content is list"),
        ("return {'tool_calls': [{'function': {}}]}", "'name'"),
        ("return {'error': ['nonsense', 'x']}", "no error has the code 'nonsense'"),
    ],
)
async def test_a_script_that_breaks_its_contract_is_told_so(tmp_path: Path, body: str, expected: str) -> None:
    with pytest.raises(EngineFailed, match=expected):
        await script(tmp_path, f"def say(request): {body}")({})


async def test_an_error_that_was_asked_for_is_raised(tmp_path: Path) -> None:
    with pytest.raises(TooManyRequests, match="slow down"):
        await script(tmp_path, "def say(r): return {'error': {'code': 'rate_limited', 'message': 'slow down'}}")({})


def test_messages_become_what_templates_take() -> None:
    reply = read_reply({"content": None, "tool_calls": [{"name": "ls", "arguments": {"a": "é"}}], "pace_s": 0.1})
    call = {"id": "call00000", "type": "function", "function": {"name": "ls", "arguments": '{"a": "é"}'}}
    assert reply == Reply({"role": "assistant", "content": "", "tool_calls": [call]}, pace_s=0.1)


def test_scripts_are_told_openai_shapes() -> None:
    told: dict[str, Any] = request_of(
        Job(tool_choice="function:ls", response_format=ResponseFormat("json_schema", name="n", schema={"a": 1})),
        trial_id="t",
        turn=3,
    )
    assert told["tool_choice"] == {"type": "function", "function": {"name": "ls"}}
    assert told["response_format"] == {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}
    assert (told["trial_id"], told["turn"]) == ("t", 3)

"""The command: quick, light, and one clear line for what went wrong."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from steno.contracts.errors import ConfigError, Gone, NotFound, Unauthorized
from steno_cli.main import COMMANDS, main, whole_app
from steno_cli.terminal.connection import ClientSettings
from steno_cli.terminal.flags import sections
from steno_cli.terminal.output import one_line_errors
from steno_proxy.config.settings import ProxySettings
from steno_rollouts.config import RolloutSettings
from steno_trainer.run_config import RunSettings
from steno_worker.config import WorkerSettings


def steno(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STENO_")}
    return subprocess.run(
        [sys.executable, "-m", "steno", *words],
        capture_output=True, text=True, timeout=300, env=kept | {"COLUMNS": "120", "NO_COLOR": "1"} | environment,
    )  # fmt: skip


PROGRAMS = ("steno_proxy", "steno_worker", "steno_trainer", "steno_rollouts", "steno_adapters")
HEAVY = ("torch", "transformers", "vllm", "fastapi", "uvicorn", "redis", "pyarrow", *PROGRAMS)
SLOW = ("steno_cli.commands", "pydantic", "httpx", "yaml", "asyncio")
"""What none but a command needs: most of the time that `steno --help` would take."""


@pytest.mark.parametrize(
    ("words", "absent", "said"),
    [
        (["--help"], HEAVY + SLOW, ["proxy", "worker", "demo", "sessions"]),
        (["--version"], HEAVY + SLOW, ["steno "]),
        (["sessions", "--help"], HEAVY, ["list", "show", "export", "tail"]),
        (["worker", "--help"], tuple({*HEAVY} - {"steno_worker"}), ["--engine"]),
    ],
    ids=["help", "version", "sessions", "worker"],
)
def test_a_command_line_imports_what_it_runs_alone(words: list[str], absent: tuple[str, ...], said: list[str]) -> None:
    code = (
        f"import sys\nsys.argv = ['steno', *{words}]\nimport steno_cli.main\n"
        "try:\n    steno_cli.main.main()\nexcept SystemExit:\n    pass\n"
        f"print('IMPORTED', [name for name in {absent} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED []"
    assert [word for word in said if word not in done.stdout] == []


def test_the_list_of_commands_has_the_first_lines_of_their_help() -> None:
    assert {command.name: command.help for command in COMMANDS} == {
        name: command.help.split("\n\n")[0] for name, command in whole_app().commands.items()
    }


def test_version_is_one_line() -> None:
    done = steno("--version")
    assert done.returncode == 0 and done.stdout.startswith("steno ") and done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["proxy", "--port", "x"], {}, "--port: Input should be a valid integer"),
        (["proxy"], {"STENO_PROT": "1"}, "STENO_PROT: no such setting; did you mean STENO_PORT?"),
        (["proxy", "--host", "0.0.0.0"], {}, "admin_key"),
        (["worker", "--proxy", "x"], {}, "--proxy: got 'x', must be http(s)://HOST[:PORT][/PREFIX]"),
        (["worker", "--proxy", "ws://host:80x0"], {}, "--proxy: got 'ws://host:80x0', must be http(s)://HOST"),
        (["runs", "list", "--url", "http://x"], {}, "--url was renamed to --proxy"),
        (
            ["sessions", "list"],
            {"STENO_CLIENT_URL": "http://x"},
            "STENO_CLIENT_URL: this setting was renamed to STENO_PROXY",
        ),
        (["sessions", "list"], {"STENO_PROXY": "x"}, "STENO_PROXY: got 'x', must be http(s)://HOST"),
        (["sessions", "list", "--proxy", "x"], {}, "--proxy: got 'x', must be http(s)://HOST"),
        (["train", "--proxy", "localhost:8000"], {}, "--proxy: got 'localhost:8000', must be http(s)://HOST"),
        (
            ["sessions", "list", "--proxy", "http://host:80x0"],
            {},
            "--proxy: got 'http://host:80x0', must be http(s)://HOST",
        ),
        (["rollout", "--proxy", "http://", "true"], {}, "--proxy: got 'http://', must be http(s)://HOST"),
        (["sessions", "export", "--format", "parquet", "t"], {}, "--format parquet writes Parquet, which needs a file"),
    ],
)
def test_wrong_configuration_is_one_line_and_exit_code_2(
    words: list[str],
    environment: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in os.environ if name.startswith("STENO_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["steno", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert said in err and err.startswith("error: ") and err.count("\n") == 1
    assert out == ""


def test_one_variable_says_where_the_proxy_is_to_every_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("STENO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STENO_PROXY", "https://here/steno")
    tasks = {"tasks": str(tmp_path)}
    for settings, given in ((RolloutSettings, tasks), (RunSettings, {"model": "m"}), (ClientSettings, {})):
        assert settings.load(given, None).proxy == "https://here/steno"  # type: ignore[attr-defined]
        assert settings.load({**given, "proxy": "http://there"}, None).proxy == "http://there"  # type: ignore[attr-defined]
    assert WorkerSettings.load({}, None).proxy == ["https://here/steno"]
    ProxySettings.load({}, None)  # on the proxy's own machine it says nothing


def test_a_programs_options_are_grouped_as_its_settings_are() -> None:
    panels = {name: sections(settings) for name, settings in (("train", RunSettings), ("proxy", ProxySettings))}
    assert panels["train"]["learning_rate"] == "The optimizer" and panels["train"]["proxy"] == "Where groups come from"
    assert RunSettings.model_fields.keys() == panels["train"].keys()
    said = steno("train", "--help").stdout
    assert "─ The optimizer ─" in said and "--trust-remote-code" in said and "false|true" not in said
    [line] = [line for line in said.splitlines() if "--take-over" in line]
    assert "<bool>" not in line


@pytest.mark.parametrize("words", ["train", "doctor", "demo", "sessions list", "sessions export", "results"])
def test_help_says_what_a_flag_takes_in_no_words_of_python(words: str) -> None:
    options = [line for line in steno(*words.split(), "--help").stdout.splitlines() if re.match(r"│ [ *]*-", line)]
    assert len(options) > 2
    assert [line for line in options if re.search(r"<(bool|str|path|float|int( range)?|list.*)>", line)] == []


def test_a_proxy_that_is_not_there_is_one_line_and_exit_code_1() -> None:
    done = steno("sessions", "list", "--proxy", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no answer from the proxy at http://127.0.0.1:1")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("port: no"), 2, "port: no"),
        (Gone("completed"), 1, "completed"),
        (NotFound("Not Found (request 1)"), 1, "where a proxy has a --control-port, that one is meant"),
        (
            Unauthorized("no key was given"),
            1,
            "no key was given; give the admin key by --key-file or STENO_ADMIN_KEY",
        ),
        (
            ModuleNotFoundError("x", name="pyarrow.parquet"),
            2,
            "this needs pyarrow: ",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), 1, "error: /root/x: Permission denied"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_expected_failures_end_in_their_exit_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise error
    assert ended.value.code == code
    assert said in capsys.readouterr().err


def test_a_surprise_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), one_line_errors():
        raise ZeroDivisionError
    with pytest.raises(ModuleNotFoundError), one_line_errors():
        raise ModuleNotFoundError("x", name="proxy.nothing")
    with pytest.raises(FileNotFoundError), one_line_errors():
        Path("/nowhere/of-ours").read_text()
    with pytest.raises(PermissionError), one_line_errors():  # of a process, say: it names nothing to correct
        raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_parquet_file_for_verl_is_made_of_one_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, task in (("train", "a"), ("test", "b")):
        table = pyarrow.table({"id": [task], "prompt": ["Hello"]})
        parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    out = tmp_path / "out" / "held.parquet"
    out.parent.mkdir()
    monkeypatch.setattr(sys, "argv", ["steno", "tasks", "parquet", str(tmp_path), str(out), "--split", "test"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert [row["extra_info"]["task_id"] for row in parquet.read_table(out).to_pylist()] == ["b"]


DEMO = ("demo", "--train", "--set", "nothing=1")
"""It starts nothing: should the plot's place not be looked at first, the setting is refused."""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sessions", "export", "t", "-o", "/proc/x"], "--output: /proc/x: No such file or directory"),
        (["tasks", "parquet", "t.jsonl", "none/x.parquet"], "output: none/x.parquet: No such file or directory"),
        (["tasks", "parquet", "t.jsonl", "folder"], "output: folder: Is a directory"),
        (
            ["tasks", "check", "--tasks", "t.jsonl", "--work-dir", "t.jsonl/x"],
            "work_dir: got 'HERE/t.jsonl/x', must be a folder that",
        ),
        (["merge", "adapter", "-o", "/proc/x/y"], "--output: /proc/x/y: No such file or directory"),
        (["merge", "adapter", "-o", "t.jsonl/y"], "--output: t.jsonl/y: Not a directory"),
        ([*DEMO, "--plot", "/proc/x.png"], "--plot: /proc/x.png: No such file or directory"),
        ([*DEMO, "--plot", "folder"], "--plot: folder is a folder; a PNG is written"),
    ],
    ids=["export", "parquet", "parquet-folder", "work-dir", "merge", "merge-file", "plot", "plot-folder"],
)
def test_a_place_where_nothing_can_be_written_is_one_line_that_names_the_option(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("STENO_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "t.jsonl").write_text('{"id": "a", "prompt": "Hello"}\n')
    monkeypatch.setattr(sys, "argv", ["steno", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert err.startswith(f"error: {said.replace('HERE', str(tmp_path))}") and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "t.jsonl"]


def test_a_failed_export_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    assert steno("sessions", "export", "t", "-o", str(file), "--proxy", "http://127.0.0.1:1").returncode == 1
    assert list(tmp_path.iterdir()) == []

"""What is told to be installed exists, and brings what was missing."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from steno.config.extras import how_to_install
from steno_cli.terminal.output import EXTRAS, one_line_errors, require_modules
from tests.support.programs.stack import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OFFERED: dict[str, list[str]] = PROJECT["optional-dependencies"]


@functools.cache
def distributions_of_modules() -> Mapping[str, list[str]]:
    """Reads the lists of files of all that is installed: seconds."""
    return metadata.packages_distributions()


def brought_by(extra: str) -> set[str]:
    """Names of distributions: what the extra asks for, and what those that are installed here ask for in turn."""
    found: set[str] = set()
    waiting = [*PROJECT["dependencies"], *OFFERED[extra]]
    while waiting:
        wanted = Requirement(waiting.pop())
        name = canonicalize_name(wanted.name)
        if name == "steno":
            waiting += [text for more in wanted.extras for text in OFFERED[more]]
        elif name not in found:
            found.add(name)
            waiting += required(name, wanted.extras or {""})
    return found


def required(name: str, extras: set[str]) -> Iterator[str]:
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        marker = Requirement(text).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield text


@pytest.mark.parametrize("module", EXTRAS)
def test_an_extra_brings_the_module_that_was_missing(module: str) -> None:
    distributions = distributions_of_modules().get(module, [module])
    assert {canonicalize_name(name) for name in distributions} & brought_by(EXTRAS[module])


def test_every_extra_that_is_named_exists() -> None:
    named: dict[str, str] = {}
    for folder in (
        "proxy",
        "inference_worker",
        "trainer_bridge",
        "rollouts",
        "steno",
        "steno_cli",
        "docs",
        "deploy",
        ".",
    ):
        for file in (ROOT / folder).glob("*" if folder == "." else "**/*"):
            if file.suffix in (".py", ".md"):
                for hint in re.findall(r"pip install ['\"]([\w.]+\[[\w,-]+\])", file.read_text()):
                    named[hint] = str(file)
    assert named
    for hint, where in named.items():
        distribution, _, extras = hint.rstrip("]").partition("[")
        assert distribution == ".", f"{where}: {hint}: it is on no index, the checkout is installed"
        assert set(extras.split(",")) <= OFFERED.keys(), f"{where}: {hint}"


@pytest.mark.parametrize("module", ["websockets", "uvloop", "litellm", "aiohttp"])
def test_a_worker_for_other_upstreams_needs_one_extra_and_no_torch(module: str) -> None:
    brought = brought_by("litellm")
    assert module in brought and not brought & {"torch", "transformers"}


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ({"url": "file:///src/my%20steno", "dir_info": {"editable": True}}, "pip install -e '/src/my steno[trainer]'"),
        ({"url": "file:///src/steno", "dir_info": {}}, "pip install '/src/steno[trainer]'"),
        (
            {"url": "file:///w/steno-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'steno[trainer] @ file:///w/steno-0.1.0-py3-none-any.whl'",
        ),
        (None, "install the same wheel or checkout again with its extra: pip install 'PATH[trainer]'"),
    ],
)
def test_a_hint_names_what_was_installed_here(
    source: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = tmp_path / "pip"
    pip.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    class Installed:
        def read_text(self, name: str) -> str | None:
            return json.dumps(source) if source and name == "direct_url.json" else None

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert how_to_install("trainer") == command
    monkeypatch.setenv("PATH", "/nowhere")  # a virtual environment that is not active
    assert how_to_install("trainer") == command.replace("pip install", f"{tmp_path}/python -m pip install")


def test_what_other_processes_will_import_is_looked_for_before_they_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXTRAS, "not_there", "trainer")
    require_modules("json", "openai")
    with pytest.raises(SystemExit) as ended, one_line_errors():
        require_modules("json", "not_there")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "this needs not_there: " in said and "pip install -e" in said


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["train", "--model", "m", "--run", "r", "--checkpoint-dir", "c", "--total-steps", "1"], "trainer"),
        (["worker", "--engine", "litellm", "--model", "openai/m"], "litellm"),
        (["worker", "--engine", "vllm", "--model", "m"], "vllm"),
        (["worker", "--engine", "transformers", "--model", "m"], "worker"),
        (["proxy"], "proxy"),
        (["demo"], "demo"),
    ],
)
def test_of_an_installation_without_extras_each_command_says_which_it_needs(words: list[str], extra: str) -> None:
    """The modules of all extras are missing, as after `pip install .`."""
    bare = f"""
import importlib.util, sys
gone = set({sorted(EXTRAS)!r})

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Gone())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in gone else found(name, package)
sys.argv = ["steno", *{words!r}]
from steno_cli.main import main
main()
"""
    done = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, f"[{extra}]'" in done.stderr) == (2, True), done.stderr
    assert done.stderr.startswith("error: this needs ") and done.stderr.count("\n") == 1
